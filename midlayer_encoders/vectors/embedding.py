"""Write the vectors of many inputs at many layers to a file, from one pass over each input.

The vectors go to the same kind of store that a sweep fills, so an interrupted run resumes, and a file can be written
from the store of a sweep.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage, content_digest
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import expand_home, explain_full_disk, folder_lock
from midlayer_encoders.media import check_taken, medium_of, read_image
from midlayer_encoders.reading.batches import TokenBudget, check_budget, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.report.versions import versions
from midlayer_encoders.store import EmbeddingStore, StoreDtype, StoreError, TextNotStoredError, list_stores
from midlayer_encoders.sweeping.embedder import Embedder, item_key, num_dims, open_store, store_key
from midlayer_encoders.sweeping.layer_sweep import load_encoder
from midlayer_encoders.validation import check_flag, check_list, check_path, check_progress, check_texts
from midlayer_encoders.vectors.token_files import write_states
from midlayer_encoders.vectors.vector_files import Blocks, check_suffix, write_vectors

_CHUNK = 1 << 16  # inputs per store: the index of a single store would grow with the number of inputs
_MAX_NAMED = 3  # missing texts in an error message


def embed(
    model: str | LayerEncoder,
    inputs: Sequence[Any],
    out: Path | str,
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    tokens: bool = False,
    from_sweep: Path | str | None = None,
    prompt_name: str | None = None,
    prompt: str | None = None,
    token_budget: TokenBudget = "auto",
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
        site: ``"block"``, or ``"attention"`` or ``"mlp"`` to read what these add in each block, from layer 1 up.
        tokens: write the states of every token, with the encoder's norm, instead of pooled vectors: safetensors shards
            and an ``index.json`` that lists them.
        from_sweep: folder of a sweep of this model; vectors are read from its store, and the model does not run.
        prompt_name: name of the encoder's prompt for each text; its default prompt by default.
        prompt: text of the prompt.
        token_budget: tokens per batch; ``"auto"`` chooses the fastest size for the device.
        progress: called with the stages ``"embedding"`` (inputs) and ``"writing"`` (vectors).
        options: as in :class:`~midlayer_encoders.EncoderOptions` if ``model`` is a name; with an encoder they must
            match its own.

    Raises:
        TextNotStoredError: the sweep has not stored some of the inputs.
    """
    tokens = check_flag("tokens", tokens)
    budget = check_budget(token_budget)
    check_progress(progress)
    path = check_out(out, tokens=tokens)
    items = check_list("inputs", inputs, "inputs")
    if tokens and from_sweep is not None:
        raise OptionError("`tokens` must be False with `from_sweep`: a sweep stores pooled vectors only.")
    check_path("from_sweep", from_sweep)
    encoder = load_encoder(model, options)
    run = _EmbedRun(encoder, items, path, layers, site, encoder.prompt_text(prompt_name, prompt, items), progress)
    if from_sweep is not None:
        run.write_vectors(run.stored_by_sweep(expand_home(from_sweep)))
        return path
    part = path.with_name(f"{path.name}.part")
    with folder_lock(part):
        if tokens:
            run.write_states(part, budget)
        else:
            run.write_vectors(run.embed(part, budget))
        shutil.rmtree(part, ignore_errors=True)
    return path


def check_out(out: Path | str, *, tokens: bool) -> Path:
    """Return the path to write to, or raise if it cannot be written."""
    check_path("out", out)
    path = expand_home(out)
    if not path.parent.is_dir():
        raise OptionError(f"`out` must be in an existing folder, but {path.parent} does not exist: create it first.")
    if tokens:
        if path.suffix in (".npy", ".safetensors", ".parquet"):
            raise OptionError(
                f"`out` must be a new folder with `tokens`, for safetensors shards, but got {path.name!r}: "
                f"each text has a different number of states. Name it {path.stem!r}."
            )
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise OptionError(f"`out` must be a new or empty folder with `tokens`, but {path} is not: use another.")
        return path
    check_suffix(path)
    if path.is_dir():
        raise OptionError(f"`out` must be a file, but {path} is a folder: use another name.")
    return path


class _FixedTotal(Stage):
    """A stage with a fixed total, which ignores expected steps."""

    def expect(self, more: int) -> None:  # noqa: ARG002  (the signature of the base class)
        self._report()


class _EmbedRun:
    """One call of :func:`embed`."""

    def __init__(
        self,
        encoder: LayerEncoder,
        inputs: list[Any],
        out: Path,
        layers: Sequence[Layer] | str,
        site: ReadSite,
        prompt: str,
        progress: Progress | None,
    ) -> None:
        self.encoder = encoder
        self.inputs = inputs
        self.out = out
        self.site = site
        self.prompt = prompt
        self.progress = progress
        self.reader = layer_reader(encoder, layers=layers, prompt=prompt, site=site)  # rejects an unreadable site
        self.layers = self.reader.layers
        self.spec = replace(encoder.spec, site=site)
        self.dim = num_dims(encoder, self.spec.norm)
        medium = medium_of(inputs[0], encoder.media)
        check_taken(medium, encoder.media, inputs[0], model=encoder.name)
        if medium == "text":
            check_texts("inputs", inputs)
        # As bytes: a million strings would take more memory than the model.
        keys = (_key(item, medium, encoder, prompt).encode() for item in inputs)
        self._keys = np.fromiter(keys, dtype="S32", count=len(inputs))
        self.digest = content_digest(self._keys.tobytes(), 16)

    def keys(self, start: int, end: int) -> list[str]:
        """Return the store keys of a range of inputs."""
        return [key.decode() for key in self._keys[start:end].tolist()]

    def write_vectors(self, store_of: Callable[[int], EmbeddingStore]) -> None:
        """Write the file from the stores of the chunks."""
        stage = Stage(self.progress, "writing", len(self.layers) * len(self.inputs))
        names = [str(item) if isinstance(item, str | Path) else None for item in self.inputs]
        store_of = lru_cache(maxsize=1)(store_of)
        keys = lru_cache(maxsize=1)(self.keys)

        def read(layer: int, start: int, end: int) -> Any:
            return store_of(start // _CHUNK).read(layer, keys(start, end))

        write_vectors(self.out, Blocks(self.layers, names, self.dim, _CHUNK, read, stage.step), self.metadata())

    def embed(self, part: Path, budget: TokenBudget) -> Callable[[int], EmbeddingStore]:
        """Embed every input, and return a function that opens the store of a chunk."""

        def open_chunk(chunk: int) -> EmbeddingStore:
            return open_store(part / str(chunk), self.spec, self.layers, self.encoder, "float32")

        stage = _FixedTotal(self.progress, "embedding", len(self.inputs))
        for start in range(0, len(self.inputs), _CHUNK):
            end = min(start + _CHUNK, len(self.inputs))
            embedder = Embedder(self.encoder, open_chunk(start // _CHUNK), budget, stage, site=self.site)
            embedder(self.inputs[start:end], self.keys(start, end), self.prompt)
            stage.step(end - stage.done)  # including stored and repeated inputs
        return open_chunk

    def stored_by_sweep(self, folder: Path) -> Callable[[int], EmbeddingStore]:
        """Return a function that returns a sweep's store, which must hold every input at every layer."""
        dtypes: tuple[StoreDtype, ...] = ("float32", "float16")
        missing: list[int] | None = None
        roots = folder / "embeddings", folder
        for root, dtype in itertools.product(roots, dtypes):
            if store_key(self.spec, dtype) in {info.key for info in list_stores(root)}:
                store = open_store(root, self.spec, self.layers, self.encoder, dtype)
                missing = store.missing(self.keys(0, len(self.inputs)))
                if not missing:
                    return lambda _, store=store: store  # type: ignore[misc]
        if missing is None:
            stores = [info for root in roots for info in list_stores(root)]
            held = "; ".join(self._differences(info.description) for info in stores[:_MAX_NAMED])
            raise StoreError(
                f"`from_sweep` must be the folder of a sweep of {self.encoder.name} with these options, but {folder} "
                f"holds {f'vectors with {held}' if held else 'none'}. Pass the folder of the sweep, or its store, and "
                "the options of the sweep."
            )
        first = ", ".join(short_repr(self.inputs[index]) for index in missing[:_MAX_NAMED])
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise TextNotStoredError(
            f"`inputs` must all be stored in {folder} at the layers {', '.join(map(str, self.layers))}, but "
            f"{len(missing)} are not: {first}{more}. A sweep stores texts with the prompt of their task, at the swept "
            "layers. Leave these inputs out, or embed without --from."
        )

    def _differences(self, description: Any) -> str:
        """Return how the vectors of a store differ from the requested ones."""
        expected = self.spec.to_dict()
        differences = [
            f"{name} {short_repr(description.get(name))} instead of {short_repr(expected[name])}"
            for name in ("model", "weights", "norm", "pooling", "asked", "site")
            if description.get(name) != expected[name]
        ]
        return ", ".join(differences) or "the same model with other options"

    def write_states(self, part: Path, budget: TokenBudget) -> None:
        """Write the states into a folder of this model and these inputs, and move it into place."""
        folder = part / f"{store_key(self.spec)}-{content_digest(str(self.layers), 4)}-{self.digest}"
        write_states(
            folder,
            self.encoder,
            self.reader,
            self.inputs,
            dim=self.dim,
            prompt=self.prompt,
            token_budget=tokens_that_fit(self.encoder) if budget == "auto" else budget,
            metadata=self.metadata(tokens=True),
            stage=Stage(self.progress, "embedding", len(self.inputs)),
        )
        with explain_full_disk(self.out):
            folder.replace(self.out)  # replaces an empty folder

    def metadata(self, *, tokens: bool = False) -> dict[str, Any]:
        """Return the description of the file."""
        spec = self.spec
        return {
            "format": "midlayer states 1" if tokens else "midlayer vectors 1",
            "model": spec.model,
            "revision": spec.revision,
            "commit": getattr(getattr(self.encoder.transformer, "config", None), "_commit_hash", None),
            "weights": spec.weights_digest,
            "tower": spec.tower,
            "layers": list(self.layers),
            "num_layers": spec.num_layers,
            "site": spec.site,
            "norm": spec.norm,
            "pooling": None if tokens else spec.pooling,
            "recipe": self.encoder.options.recipe,
            "asked": spec.prompting,
            "prompt": self.prompt,
            "max_length": spec.max_length,
            "truncate_dim": spec.truncate_dim,
            "dtype": spec.dtype,
            "spec": store_key(spec),
            "inputs": len(self.inputs),
            "inputs_digest": self.digest,
            "versions": versions(),
        }


def _key(item: Any, medium: str, encoder: LayerEncoder, prompt: str) -> str:
    """Return the key of an input; of an image by its pixels, even if it is a file."""
    if medium == "image":
        return item_key(read_image(item, max_pixels=encoder.max_pixels))
    return item_key(Path(item) if medium == "audio" and isinstance(item, str) else item, prompt)
