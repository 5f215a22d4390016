"""Write the vectors of many inputs at many layers to files, from one pass over each input.

The vectors go to the same kind of store that a sweep fills, so an interrupted run resumes. Files are written block by
block, not memory-mapped: on a full disk a mapped file kills the process, while a write raises an error.
"""

import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from midlayer_encoders._types import Layer, Progress, Stage, content_digest
from midlayer_encoders.arguments import TokenBudget
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import atomic_write, folder_lock, write_file
from midlayer_encoders.reading.media_inputs import check_taken, medium_of, read_image
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.embedder import Embedder, item_key, open_store, store_key
from midlayer_encoders.sweeping.store import EmbeddingStore
from midlayer_encoders.validation import check_texts

CHUNK = 1 << 16  # inputs per store: the index of a single store would grow with the number of inputs
_BLOCK_BYTES = 128 * 2**20  # of vectors that are written at a time
_SPEC_FIELDS = ("model", "revision", "weights", "tower", "num_layers", "norm", "pooling", "asked", "max_length")

#: The first input of each block, and its vectors ``(rows, D)`` at each layer.
Blocks: TypeAlias = Iterable[tuple[int, list[npt.NDArray[np.float32]]]]


@dataclass
class _FixedTotal(Stage):
    """A stage with a fixed total, which ignores expected steps."""

    def expect(self, more: int) -> None:  # noqa: ARG002  (the signature of the base class)
        self._report()

    def step(self, count: int = 1) -> None:
        """Count steps."""
        self.reach(min(self.done + count, self.total))

    def reach(self, done: int) -> None:
        """Set the number of steps done."""
        self.done = done
        self._report()


@dataclass
class EmbedRun:
    """One call of :func:`embed`."""

    encoder: LayerEncoder
    inputs: list[Any]
    out: Path
    requested_layers: InitVar[Sequence[Layer] | str]
    prompt: str
    budget: TokenBudget = "auto"
    progress: Progress | None = None

    @classmethod
    def of(
        cls,
        encoder: LayerEncoder,
        inputs: list[Any],
        out: Path,
        layers: Sequence[Layer] | str,
        prompt_name: str | None,
        prompt: str | None,
        token_budget: TokenBudget,
        progress: Progress | None = None,
    ) -> Self:
        """Return the run of the arguments of :func:`embed`."""
        text = encoder.prompt_text(prompt_name, prompt, inputs)
        return cls(encoder, inputs, out, layers, text, token_budget, progress)

    def __post_init__(self, requested_layers: Sequence[Layer] | str) -> None:
        encoder, inputs = self.encoder, self.inputs
        self.layers = encoder.vector_reader(requested_layers, prompt=self.prompt).layers
        self.spec = encoder.spec
        self.dim = encoder.get_embedding_dimension() or 0
        medium = medium_of(inputs[0], encoder.media)
        check_taken(medium, encoder.media, inputs[0], model=encoder.name)
        if medium == "text":
            check_texts("inputs", inputs)
        # As bytes: a million strings would take more memory than the model.
        keys = (_key(item, medium, encoder, self.prompt).encode() for item in inputs)
        self._keys = np.fromiter(keys, dtype="S32", count=len(inputs))
        self.digest = content_digest(self._keys.tobytes(), 16)

    def keys(self, start: int, end: int) -> list[str]:
        """Return the store keys of a range of inputs."""
        return [key.decode() for key in self._keys[start:end].tolist()]

    def _blocks(self) -> Blocks:
        """Yield the first input of each block, and its vectors at each layer."""
        stage = Stage(self.progress, "writing", len(self.layers) * len(self.inputs))
        num_rows = max(1, _BLOCK_BYTES // (4 * self.dim * len(self.layers)))
        for first in range(0, len(self.inputs), CHUNK):
            store = self.store(first // CHUNK)
            last = min(first + CHUNK, len(self.inputs))
            for start in range(first, last, num_rows):
                keys = self.keys(start, min(start + num_rows, last))
                vectors = []
                for layer in self.layers:
                    vectors.append(store.read(layer, keys))
                    stage.step(len(keys))
                yield start, vectors

    def store(self, chunk: int) -> EmbeddingStore:
        """Open the store of a chunk."""
        root = self.out.with_name(f"{self.out.name}.part") / str(chunk)
        return open_store(root, self.spec, self.layers, self.encoder, "float32")

    def embedder(self, chunk: int, stage: Stage) -> Embedder:
        """Return what embeds the inputs of a chunk."""
        return Embedder(self.encoder, self.store(chunk), self.budget, stage)

    def run(self) -> None:
        """Embed the inputs into a store beside the file, and write the file."""
        part = self.out.with_name(f"{self.out.name}.part")
        if part.is_symlink():
            raise OptionError(
                f"`out` must not be next to a link {part.name}, which this run would write through: remove it."
            )
        with folder_lock(part):
            self._embed_and_write()
            shutil.rmtree(part, ignore_errors=True)

    def _embed_and_write(self) -> None:
        stage = _FixedTotal(self.progress, "embedding", len(self.inputs))
        for start in range(0, len(self.inputs), CHUNK):
            end = min(start + CHUNK, len(self.inputs))
            self.embedder(start // CHUNK, stage)(self.inputs[start:end], self.keys(start, end), self.prompt)
            stage.reach(end)  # including stored and repeated inputs
        names = [str(item) if isinstance(item, str | Path) else None for item in self.inputs]
        write_vectors(self.out, self.layers, names, self.dim, self._blocks(), self.metadata())

    def metadata(self) -> dict[str, Any]:
        """Return the description of the file."""
        fields = self.spec.to_dict()
        return {
            "format": "midlayer vectors 1",
            **{name: fields[name] for name in (*_SPEC_FIELDS, "truncate_dim", "dtype")},
            "commit": getattr(getattr(self.encoder.transformer, "config", None), "_commit_hash", None),
            "layers": list(self.layers),
            "recipe": self.encoder.options.recipe,
            "prompt": self.prompt,
            "spec": store_key(self.spec),
            "inputs": len(self.inputs),
            "inputs_digest": self.digest,
            "versions": versions(),
        }


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
                tensors = [f"layer.{layer}" for layer in layers]
                file.write(_safetensors_header(tensors, (len(names), dim), metadata))
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
            columns = [pa.array(names[start : start + len(vectors[0])], pa.string()), *map(vector_column, vectors)]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def vector_column(rows: npt.NDArray[np.float32]) -> Any:
    """Return vectors ``(N, D)`` as a pyarrow array of lists of D numbers."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])


def _safetensors_header(names: Sequence[str], shape: Sequence[int], metadata: Mapping[str, Any]) -> bytes:
    """Return the header of a file with float32 tensors of one shape."""
    table: dict[str, Any] = {"__metadata__": {"midlayer": json.dumps(metadata)}}
    size = 4 * math.prod(shape)
    for number, name in enumerate(names):
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [number * size, (number + 1) * size]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
