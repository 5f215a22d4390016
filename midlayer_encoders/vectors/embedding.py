"""Write the vectors or token states of many inputs at many layers to files, from one pass over each input.

The vectors go to the same kind of store that a sweep fills, so an interrupted run resumes. Files are written block by
block, not memory-mapped: on a full disk a mapped file kills the process, while a write raises an error.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, Unpack

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders._types import Engine, Layer, Progress, Stage, content_digest
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder, load_shared
from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import (
    atomic_write,
    check_links,
    expand_home,
    explain_full_disk,
    file_checksums,
    read_artifact,
    read_sealed,
    sealed,
    write_file,
)
from midlayer_encoders.media import check_taken, medium_of, read_image
from midlayer_encoders.processes.sharing import Group
from midlayer_encoders.reading.batches import TokenBudget, batches_of, check_budget, count_tokens, tokens_that_fit
from midlayer_encoders.reading.capture import final_norm
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.reading.vllm import check_engine
from midlayer_encoders.report.results import versions
from midlayer_encoders.store import EmbeddingStore
from midlayer_encoders.sweeping.embedder import Embedder, item_key, num_dims, open_store, store_key
from midlayer_encoders.validation import check_flag, check_list, check_path, check_progress, check_texts

_CHUNK = 1 << 16  # inputs per store: the index of a single store would grow with the number of inputs
_BLOCK_BYTES = 128 * 2**20  # of vectors that are written at a time
_SHARD_BYTES = 128 * 2**20  # of token states
_SHARD_MEDIA = 32  # images or waveforms per shard, since their number of states is unknown
_COUNTED = 4096  # texts tokenized at a time
_SPEC_FIELDS = ("model", "revision", "weights", "tower", "num_layers", "norm", "pooling", "asked", "max_length")
_SUFFIXES = (".npy", ".safetensors", ".parquet")
_DTYPES = {"float32": "F32", "int64": "I64", "bool": "BOOL"}  # in NumPy and in safetensors

Blocks: TypeAlias = Iterable[tuple[int, list[npt.NDArray[np.float32]]]]
"""The first input of each block, and its vectors ``(rows, D)`` at each layer."""

Tensor: TypeAlias = tuple[str, Sequence[int], Iterable[npt.NDArray[Any]]]
"""NumPy's name of the dtype, the shape, and the blocks of a tensor."""


def embed(
    model: str | LayerEncoder,
    inputs: Sequence[Any],
    out: Path | str,
    *,
    layers: Sequence[Layer] | str = "all",
    engine: Engine = "transformers",
    tokens: bool = False,
    prompt_name: str | None = None,
    prompt: str | None = None,
    token_budget: TokenBudget = "auto",
    devices: int = 1,
    num_nodes: int = 1,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> Path:
    """Write the vectors of inputs at many layers to a file, from one pass over each input, and return its path.

    Vectors are first stored in ``<out>.part``, so that the same call resumes after an interruption. The folder is
    removed when the file is complete; until then the disk holds the vectors twice.

    Args:
        model: a folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        inputs: texts, or images or audio for a model that takes them.
        out: ``.npy`` of shape ``(L, N, D)`` with a ``.json`` next to it, ``.safetensors`` or ``.parquet``; with
            ``tokens`` a new folder. Its parent folder must exist.
        layers: ``"all"``, or some layers; they are written in ascending order.
        engine: ``"vllm"`` to compute the states with vLLM, in its own environment; see ``docs/engines.md``.
        tokens: write the states of every token, with the encoder's norm, instead of pooled vectors: safetensors shards
            and an ``index.json`` that lists them.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        devices: processes on this machine that share the inputs; the first one writes the file, which is that of one
            process, to the bit if the batches are the same (on a CPU, or with ``token_budget``).
        num_nodes: number of machines that share the inputs; ``out`` is then on a disk that all of them can write to.
        progress: called by the first process with the stages ``"embedding"`` (inputs) and ``"writing"`` (vectors).
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.
    """
    tokens = check_flag("tokens", tokens)
    budget = check_budget(token_budget)
    check_progress(progress)
    path = check_out(out, tokens=tokens)
    items = check_list("inputs", inputs, "inputs")
    check_engine(engine, tokens=tokens, devices=devices, num_nodes=num_nodes)
    encoder, group = load_shared(model, options, devices, num_nodes)
    text = encoder.prompt_text(prompt_name, prompt, items)
    run = _EmbedRun(encoder, items, path, layers, engine, text, group.progress(progress), group)
    part = path.with_name(f"{path.name}.part")
    if part.is_symlink():
        raise OptionError(
            f"`out` must not be next to a link {part.name}, which this run would write through: remove it."
        )
    check_links(part, [part])
    with group.lock(part):
        group.first(lambda: check_out(path, tokens=tokens))  # another run may have written it since
        group.share(lambda: run.write_states(part, budget) if tokens else run.embed_and_write(part, budget))
        if group.is_first:
            shutil.rmtree(part, ignore_errors=True)
    return path


def check_out(out: Path | str, *, tokens: bool) -> Path:
    """Return the path to write to, or raise if it cannot be written."""
    if tokens:
        return check_new_folder(out, "with `tokens`", "each text has a different number of states")
    path = _check_parent(out)
    if path.suffix not in _SUFFIXES:
        raise OptionError(
            f"`out` must end in {', '.join(_SUFFIXES)}, which selects the format, but got {path.name!r}."
            f"{did_you_mean(path.suffix, _SUFFIXES)}"
        )
    if path.is_dir():
        raise OptionError(f"`out` must be a file, but {path} is a folder: use another name.")
    return path


def check_new_folder(out: Path | str, condition: str, reason: str) -> Path:
    """Return the folder to write several files to, or raise unless it is new or empty.

    Args:
        out: path of the folder.
        condition: when the output is a folder, for an error message.
        reason: why it is not a file.
    """
    path = _check_parent(out)
    if path.suffix in _SUFFIXES:
        raise OptionError(
            f"`out` must be a new folder {condition}, but got {path.name!r}: {reason}. Name it {path.stem!r}."
        )
    if path.is_file() or path.is_symlink() or (path.is_dir() and any(path.iterdir())):
        raise OptionError(f"`out` must be a new or empty folder {condition}, but {path} is not: use another.")
    return path


def _check_parent(out: Path | str) -> Path:
    check_path("out", out)
    path = expand_home(out)
    if not path.parent.is_dir():
        raise OptionError(f"`out` must be in an existing folder, but {path.parent} does not exist: create it first.")
    return path


@dataclass
class _FixedTotal(Stage):
    """A stage with a fixed total, which ignores expected steps; each step of this process stands for ``world``."""

    world: int = 1

    def expect(self, more: int) -> None:  # noqa: ARG002  (the signature of the base class)
        self._report()

    def step(self, count: int = 1) -> None:
        """Count the steps of all processes, which take as long as this one."""
        self.reach(min(self.done + self.world * count, self.total))

    def reach(self, done: int) -> None:
        """Set the number of steps done."""
        self.done = done
        self._report()


@dataclass
class _EmbedRun:
    """One call of :func:`embed`."""

    encoder: LayerEncoder
    inputs: list[Any]
    out: Path
    requested_layers: InitVar[Sequence[Layer] | str]
    engine: Engine
    prompt: str
    progress: Progress | None
    group: Group = field(default_factory=Group)

    def __post_init__(self, requested_layers: Sequence[Layer] | str) -> None:
        encoder, inputs = self.encoder, self.inputs
        self.reader = layer_reader(encoder, layers=requested_layers, prompt=self.prompt)
        self.layers = self.reader.layers
        encoder.vector_reader(self.layers, engine=self.engine)  # rejects what the engine cannot read
        self.spec = encoder.spec.read_by(self.engine)
        self.dim = num_dims(encoder, self.spec.norm)
        self.medium = medium_of(inputs[0], encoder.media)
        check_taken(self.medium, encoder.media, inputs[0], model=encoder.name)
        if self.medium == "text":
            check_texts("inputs", inputs)
        # As bytes: a million strings would take more memory than the model.
        keys = (_key(item, self.medium, encoder, self.prompt).encode() for item in inputs)
        self._keys = np.fromiter(keys, dtype="S32", count=len(inputs))
        self.digest = content_digest(self._keys.tobytes(), 16)

    @property
    def identity(self) -> str:
        """Name of the folder that a killed run resumes in: it differs whenever the states do."""
        return f"{store_key(self.spec)}-{content_digest(str(self.layers), 4)}-{self.digest}"

    def keys(self, start: int, end: int) -> list[str]:
        """Return the store keys of a range of inputs."""
        return [key.decode() for key in self._keys[start:end].tolist()]

    def write_vectors(self, store_of: Callable[[int], EmbeddingStore]) -> None:
        """Write the file from the stores of the chunks."""
        names = [str(item) if isinstance(item, str | Path) else None for item in self.inputs]
        write_vectors(self.out, self.layers, names, self.dim, self._blocks(store_of), self.metadata())

    def _blocks(self, store_of: Callable[[int], EmbeddingStore]) -> Blocks:
        """Yield the first input of each block, and its vectors at each layer."""
        stage = Stage(self.progress, "writing", len(self.layers) * len(self.inputs))
        num_rows = max(1, _BLOCK_BYTES // (4 * self.dim * len(self.layers)))
        for first in range(0, len(self.inputs), _CHUNK):
            store = store_of(first // _CHUNK)
            last = min(first + _CHUNK, len(self.inputs))
            for start in range(first, last, num_rows):
                keys = self.keys(start, min(start + num_rows, last))
                vectors = []
                for layer in self.layers:
                    vectors.append(store.read(layer, keys))
                    stage.step(len(keys))
                yield start, vectors

    def embed_and_write(self, part: Path, budget: TokenBudget) -> None:
        """Embed this process's share of the inputs, and write the file in the first process."""
        store_of = self.embed(part, budget)
        if self.group.is_first:
            self.write_vectors(store_of)

    def embed(self, part: Path, budget: TokenBudget) -> Callable[[int], EmbeddingStore]:
        """Embed this process's share of the inputs, and return a function that opens the store of a chunk."""

        def open_chunk(chunk: int) -> EmbeddingStore:
            return open_store(part / str(chunk), self.spec, self.layers, self.encoder, "float32")

        stage = _FixedTotal(self.progress, "embedding", len(self.inputs), world=self.group.world)
        for start in range(0, len(self.inputs), _CHUNK):
            end = min(start + _CHUNK, len(self.inputs))
            store = open_chunk(start // _CHUNK)
            embedder = Embedder(self.encoder, store, budget, stage, self.group, engine=self.engine)
            embedder(self.inputs[start:end], self.keys(start, end), self.prompt)
            stage.reach(end)  # including stored and repeated inputs
        return open_chunk

    def write_states(self, part: Path, budget: TokenBudget) -> None:
        """Write this process's share of the shards of token states, except complete ones.

        The first process then writes ``index.json`` and moves the folder into place.

        A shard holds ``layer.K`` ``(T, D)`` per layer, the concatenated states of its inputs; ``offsets`` ``(n + 1)``,
        where the states of each input begin; and ``counted`` ``(T)``, which states the pooling includes.
        """
        folder = part / self.identity
        group = self.group
        tokens = group.first(lambda: tokens_that_fit(self.encoder) if budget == "auto" else budget, inside=True)
        metadata = self.metadata(tokens=True)
        stage = _FixedTotal(self.progress, "embedding", len(self.inputs), world=group.world)
        shards = {f"states-{number:06d}.safetensors": shard for number, shard in enumerate(self._shards())}

        def write_part() -> None:
            for name, (start, end) in group.part(list(shards.items())):
                self._write_shard(folder / name, start, end, tokens, metadata)
                stage.step(end - start)

        group.share(write_part, inside=True)
        if not group.is_first:
            return
        stage.reach(len(self.inputs))
        index = [{"file": name, "first": start, "inputs": end - start} for name, (start, end) in shards.items()]
        write_file(folder / "index.json", json.dumps({**metadata, "shards": index}, indent=2).encode())
        leftovers = {path.name for path in folder.iterdir()} - {"index.json", *shards}
        with explain_full_disk(self.out):
            for leftover in leftovers:
                (folder / leftover).unlink()  # of a killed run
            folder.replace(self.out)  # replaces an empty folder

    def _write_shard(self, path: Path, start: int, end: int, tokens: int, metadata: Mapping[str, Any]) -> None:
        """Write a shard and its checksum, unless an interrupted run has written both."""
        checksum_file = path.with_suffix(".json")  # for a run that resumes
        saved = read_artifact(checksum_file, read_sealed)
        if saved is None or saved != file_checksums(path.parent, path.name):
            tensors = self._read_states(self.inputs[start:end], tokens)
            write_safetensors(path, tensors, {**metadata, "first": start, "count": end - start})
            write_file(checksum_file, sealed(file_checksums(path.parent, path.name)))

    def _shards(self) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each shard, which depend on the inputs only, so that a run can resume."""
        if self.medium != "text":
            for start in range(0, len(self.inputs), _SHARD_MEDIA):
                yield start, min(start + _SHARD_MEDIA, len(self.inputs))
            return
        token_bytes = 4 * self.dim * len(self.layers)
        begin = size = 0
        for start in range(0, len(self.inputs), _COUNTED):
            texts = [self.prompt + text for text in self.inputs[start : start + _COUNTED]]
            for index, count in enumerate(count_tokens(self.encoder, texts), start):
                if size and size + count * token_bytes > _SHARD_BYTES:
                    yield begin, index
                    begin, size = index, 0
                size += count * token_bytes
        yield begin, len(self.inputs)

    def _read_states(self, inputs: Sequence[Any], tokens: int) -> dict[str, Tensor]:
        """Return the tensors of a shard in blocks, one per input."""
        reader = self.reader
        states: dict[int, dict[int, npt.NDArray[np.float32]]] = {layer: {} for layer in reader.layers}
        counted: dict[int, npt.NDArray[np.bool_]] = {}
        norm = final_norm(reader.model, reader.anatomy, reader.norm)

        def receive(layer: int, batch: torch.Tensor, mask: torch.Tensor, positions: list[int]) -> None:
            rows = norm(batch)[..., : reader.truncate_dim].float().cpu().numpy()
            real = mask.bool().cpu().numpy()
            ids = None
            if reader.counting.special_ids:
                ids = reader.preprocess([inputs[position] for position in positions])["input_ids"]
            pooled = reader.counting(mask, ids).bool().cpu().numpy()
            for row, position in enumerate(positions):
                states[layer][position] = rows[row][real[row]]
                counted[position] = pooled[row][real[row]]

        batches = batches_of(self.encoder, inputs, token_budget=tokens, prompt=self.prompt)
        for _ in reader.embed(inputs, batches, tokens=receive):
            pass
        order = range(len(inputs))
        offsets = np.cumsum([0, *(len(counted[position]) for position in order)], dtype=np.int64)
        total = int(offsets[-1])
        tensors: dict[str, Tensor] = {
            "offsets": ("int64", offsets.shape, [offsets]),
            "counted": ("bool", (total,), [counted[position] for position in order]),
        }
        for layer, blocks in states.items():
            shape = total, blocks[0].shape[1]
            tensors[f"layer.{layer}"] = ("float32", shape, [blocks[position] for position in order])
        return tensors

    def metadata(self, *, tokens: bool = False) -> dict[str, Any]:
        """Return the description of the file."""
        fields = self.spec.to_dict()
        return {
            "format": "midlayer states 1" if tokens else "midlayer vectors 1",
            **{name: fields[name] for name in (*_SPEC_FIELDS, "truncate_dim", "dtype")},
            **({"pooling": None} if tokens else {}),
            "commit": getattr(getattr(self.encoder.transformer, "config", None), "_commit_hash", None),
            "layers": list(self.layers),
            "recipe": self.encoder.options.recipe,
            "prompt": self.prompt,
            "engine": self.engine,
            "spec": store_key(self.spec),
            "inputs": len(self.inputs),
            "inputs_digest": self.digest,
            "versions": versions(),
        }


def describe_vectors(encoder: LayerEncoder, texts: list[str], *, layers: Sequence[int], prompt: str) -> dict[str, Any]:
    """Return the description that a file with the vectors of these texts holds."""
    return _EmbedRun(encoder, texts, Path(), layers, "transformers", prompt, None).metadata()


def _key(item: Any, medium: str, encoder: LayerEncoder, prompt: str) -> str:
    """Return the key of an input; of an image by its pixels, even if it is a file."""
    if medium == "image":
        return item_key(read_image(item, max_pixels=encoder.max_pixels))
    return item_key(Path(item) if medium == "audio" and isinstance(item, str) else item, prompt)


def write_vectors(
    out: Path, layers: Sequence[int], names: Sequence[str | None], dim: int, blocks: Blocks, metadata: Mapping[str, Any]
) -> None:
    """Write vectors and their metadata atomically, in the format of the suffix.

    Args:
        out: ``.npy`` holds ``(L, N, D)``, with the metadata in a ``.json`` next to it; ``.safetensors`` a tensor
            ``layer.K`` ``(N, D)`` per layer; ``.parquet`` a row per input and a column ``layer_K`` per layer. The last
            two hold the metadata under ``midlayer``.
        layers: layers in the order of the file.
        names: the text or path of each input; ``None`` if it has none.
        dim: number D of dimensions.
        blocks: vectors to write.
        metadata: description of the vectors.
    """
    if out.suffix == ".parquet":
        _write_parquet(out, layers, names, dim, blocks, metadata)
        return
    label = out.with_name(f"{out.name}.json")
    with atomic_write(out) as temporary:
        with temporary.open("xb") as file:
            if out.suffix == ".npy":
                shape = len(layers), len(names), dim
                np.lib.format.write_array_header_2_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            else:
                tensors = {f"layer.{layer}": ("float32", (len(names), dim)) for layer in layers}
                file.write(_safetensors_header(tensors, metadata))
            offset = file.tell()
            for start, vectors in blocks:
                for number, rows in enumerate(vectors):
                    file.seek(offset + 4 * dim * (number * len(names) + start))
                    file.write(np.ascontiguousarray(rows).data)
        if out.suffix == ".npy":
            label.unlink(missing_ok=True)  # it describes the previous file
    if out.suffix == ".npy":
        write_file(label, json.dumps(metadata, indent=2).encode())


def _write_parquet(
    out: Path, layers: Sequence[int], names: Sequence[str | None], dim: int, blocks: Blocks, metadata: Mapping[str, Any]
) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    vector = pa.list_(pa.float32(), dim)
    fields = [pa.field("input", pa.string()), *(pa.field(f"layer_{layer}", vector) for layer in layers)]
    schema = pa.schema(fields, metadata={"midlayer": json.dumps(metadata)})
    with atomic_write(out) as temporary, parquet.ParquetWriter(temporary, schema, use_dictionary=False) as writer:
        for start, vectors in blocks:
            columns: list[Any] = [pa.array(names[start : start + len(vectors[0])], pa.string())]
            for rows in vectors:
                columns.append(vector_column(rows))
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def vector_column(rows: npt.NDArray[np.float32]) -> Any:
    """Return vectors ``(N, D)`` as a pyarrow array of lists of D numbers."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def write_safetensors(out: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]) -> None:
    """Write tensors block by block."""
    with atomic_write(out) as temporary, temporary.open("xb") as file:
        header = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
        file.write(_safetensors_header(header, metadata))
        for _, _, blocks in tensors.values():
            for block in blocks:
                file.write(np.ascontiguousarray(block).data)


def _safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, Any]) -> bytes:
    table: dict[str, Any] = {"__metadata__": {"midlayer": json.dumps(metadata)}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start = end
        end += int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        table[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
