"""Layers as data: the vectors of many inputs at many layers in a file that says what it is.

It lives beside the sweep because it is the sweep's first half: the same store is filled by the same embedder, so a run
that was stopped goes on, and a file can be written from what a sweep has stored.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Unpack

import numpy as np

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.files import expand_home, explain_full_disk, folder_lock
from midlayer_encoders.media import check_taken, medium_of, read_image
from midlayer_encoders.reading.batches import TokenBudget, check_budget, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.report.versions import versions
from midlayer_encoders.store import EmbeddingStore, StoreDtype, StoreError, TextNotStoredError, list_stores
from midlayer_encoders.sweeping.items import item_key
from midlayer_encoders.sweeping.stored_layer import Embedder, num_dims, open_store, store_key
from midlayer_encoders.validation import check_flag, check_list, check_path, check_progress, check_texts
from midlayer_encoders.vectors.token_files import write_states
from midlayer_encoders.vectors.vector_files import Blocks, check_suffix, write_vectors

__all__ = ["check_out", "embed"]

_CHUNK = 1 << 16  # inputs in a store of their own: of one store for all, the index would grow with their number
_NAMED = 3  # texts that are missing, in an error


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
    """Write the vectors of inputs at many layers to a file, from one pass over each, and return its path.

    Vectors go to a store in ``<out>.part`` as they are made: the same call after one that was stopped goes on where it
    was. The folder is removed once the file is there; until then the disk holds the vectors twice.

    Args:
        model: folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        inputs: texts, or for a model of images or audio what it takes.
        out: ``.npy`` of shape ``(L, N, D)`` with a ``.json`` beside it, ``.safetensors`` or ``.parquet``; with
            ``tokens`` a new folder. The folder that it lies in must be there.
        layers: ``"all"`` or some; they are written in ascending order.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up.
        tokens: write the states of every token, with the encoder's norm, in place of pooled vectors: safetensors shards
            and an ``index.json`` that names them.
        from_sweep: folder of a sweep of this model: the vectors are read from its store, and nothing is run.
        prompt_name: which of the encoder's prompts is put before each text; the default one by default.
        prompt: the prompt itself.
        token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with.
        progress: called with the stages ``"embedding"`` (of inputs) and ``"writing"`` (of vectors).
        options: as in :class:`~midlayer_encoders.EncoderOptions`, when ``model`` is a name; beside an encoder they must
            be its own.

    Raises:
        TextNotStoredError: naming inputs that the sweep has not stored.
    """
    tokens, budget = check_flag("tokens", tokens), check_budget(token_budget)
    check_progress(progress)
    path, items = check_out(out, tokens=tokens), check_list("inputs", inputs, "inputs")
    if tokens and from_sweep is not None:
        raise OptionError("`tokens` must be False with `from_sweep`: a sweep stores pooled vectors alone.")
    check_path("from_sweep", from_sweep)
    if isinstance(model, LayerEncoder):
        encoder = model
        encoder.check_own(options)
    else:
        encoder = LayerEncoder(model, -1, **options)
    return _Run(encoder, items, path, layers, site, encoder.prompt_text(prompt_name, prompt, items)).write(
        tokens=tokens, stored=None if from_sweep is None else expand_home(from_sweep), budget=budget, progress=progress
    )


def check_out(out: Path | str, *, tokens: bool) -> Path:
    """Return where to write, or raise why nothing can be written there."""
    check_path("out", out)
    path = expand_home(out)
    if not path.parent.is_dir():
        raise OptionError(f"`out` must be in a folder that is there, but {path.parent} is not: make it first.")
    if tokens:
        if path.suffix in (".npy", ".safetensors", ".parquet"):
            raise OptionError(
                f"`out` must be a new folder with `tokens`, whose safetensors shards it holds, but got {path.name!r}: "
                f"every text has its own number of states. Name it {path.stem!r}."
            )
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise OptionError(f"`out` must be a new or empty folder with `tokens`, but {path} is not: name another.")
        return path
    check_suffix(path)
    if path.is_dir():
        raise OptionError(f"`out` must be a file, but {path} is a folder: name another.")
    return path


class _Whole(Stage):
    """A stage whose total is known from the start, whoever finds more to do."""

    def expect(self, more: int) -> None:  # noqa: ARG002  (the base class's)
        self._report()


class _Run:
    """One call of :func:`embed`."""

    def __init__(
        self,
        encoder: LayerEncoder,
        inputs: list[Any],
        out: Path,
        layers: Sequence[Layer] | str,
        site: ReadSite,
        prompt: str,
    ) -> None:
        self.encoder, self.inputs, self.out, self.site, self.prompt = encoder, inputs, out, site, prompt
        self.reader = layer_reader(encoder, layers=layers, prompt=prompt, site=site)  # refuses what cannot be read
        self.layers = self.reader.layers
        self.spec = replace(encoder.spec, site=site)
        medium = medium_of(inputs[0], encoder.media)
        check_taken(medium, encoder.media, inputs[0], model=encoder.name)
        if medium == "text":
            check_texts("inputs", inputs)
        # As bytes side by side: of a million inputs, strings would take more memory than the model.
        keys = (_key(item, medium, encoder, prompt).encode() for item in inputs)
        self._keys = np.fromiter(keys, dtype="S32", count=len(inputs))
        self.digest = hashlib.blake2b(self._keys.tobytes(), digest_size=16).hexdigest()

    def keys(self, start: int, end: int) -> list[str]:
        """Return the keys of some inputs in the store."""
        return [key.decode() for key in self._keys[start:end].tolist()]

    def write(self, *, tokens: bool, stored: Path | None, budget: TokenBudget, progress: Progress | None) -> Path:
        """Write the file or folder, and remove what was kept to resume."""
        part = self.out.with_name(f"{self.out.name}.part")
        with nullcontext() if stored is not None else folder_lock(part):
            if tokens:
                self._write_states(part, budget, progress)
            else:
                place = self._embedded(part, budget, progress) if stored is None else self._found(stored)
                self._write_vectors(place, progress)
            if stored is None:
                shutil.rmtree(part, ignore_errors=True)
        return self.out

    def _write_vectors(self, place: Callable[[int], EmbeddingStore], progress: Progress | None) -> None:
        """Write the file from the stores that hold the inputs: ``place`` returns that of one."""
        writing = Stage(progress, "writing", len(self.layers) * len(self.inputs))
        names = [str(item) if isinstance(item, str | Path) else None for item in self.inputs]
        opened = lru_cache(maxsize=1)(place)
        keys = lru_cache(maxsize=1)(self.keys)

        def read(layer: int, start: int, end: int) -> Any:
            return opened(start // _CHUNK).read(layer, keys(start, end))

        blocks = Blocks(self.layers, names, num_dims(self.encoder, self.spec.norm), _CHUNK, read, writing.step)
        write_vectors(self.out, blocks, self.about())

    def _embedded(self, part: Path, budget: TokenBudget, progress: Progress | None) -> Callable[[int], EmbeddingStore]:
        """Embed every input into the stores beside the output, and return what opens that of a chunk."""

        def place(chunk: int) -> EmbeddingStore:
            return open_store(part / str(chunk), self.spec, self.layers, self.encoder, "float32")

        stage = _Whole(progress, "embedding", len(self.inputs))
        for start in range(0, len(self.inputs), _CHUNK):
            end = min(start + _CHUNK, len(self.inputs))
            embedder = Embedder(self.encoder, place(start // _CHUNK), budget, stage, site=self.site)
            embedder(self.inputs[start:end], self.keys(start, end), self.prompt)
            stage.step(end - stage.done)  # also those that were stored, or stand there twice
        return place

    def _found(self, folder: Path) -> Callable[[int], EmbeddingStore]:
        """Return what gives the store of a sweep, where it holds every input at every layer."""
        halves: tuple[StoreDtype, ...] = ("float32", "float16")
        lacking: list[int] | None = None
        for root in (folder / "embeddings", folder):
            known = {info.key for info in list_stores(root)}
            for dtype in halves:
                if store_key(self.spec, dtype) in known:
                    store = open_store(root, self.spec, self.layers, self.encoder, dtype)
                    lacking = store.missing(self.keys(0, len(self.inputs)))
                    if not lacking:
                        return lambda _, store=store: store  # type: ignore[misc]
        if lacking is None:
            raise StoreError(self._no_store(folder))
        first = ", ".join(short_repr(self.inputs[place]) for place in lacking[:_NAMED])
        more = f" and {len(lacking) - _NAMED} more" if len(lacking) > _NAMED else ""
        raise TextNotStoredError(
            f"`inputs` must all be stored in {folder} at the layers {', '.join(map(str, self.layers))}, but "
            f"{len(lacking)} are not: {first}{more}. Texts are stored under the prompt of their task, layers as they "
            "were swept. Leave these out, or embed without --from."
        )

    def _no_store(self, folder: Path) -> str:
        """Return what the stores of a folder differ in from what is asked for."""
        names = ("model", "weights", "norm", "pooling", "asked", "site")
        wanted = {name: value for name, value in self.spec.to_dict().items() if name in names}
        found = [*list_stores(folder / "embeddings"), *list_stores(folder)]
        others = "; ".join(
            ", ".join(
                f"{name} {short_repr(info.description.get(name))} instead of {short_repr(value)}"
                for name, value in wanted.items()
                if info.description.get(name) != value
            )
            or "the same model with other options"
            for info in found[:_NAMED]
        )
        has = f"it holds vectors with {others}" if found else "it holds none"
        return (
            f"`from_sweep` must be the folder of a sweep of {self.encoder.name} with these options, but {folder}: "
            f"{has}. Name the sweep's own folder, or its store, and pass the options that it was made with."
        )

    def _write_states(self, part: Path, budget: TokenBudget, progress: Progress | None) -> None:
        """Write the states into a folder of this model and these inputs alone, and put it in its place."""
        layers = hashlib.blake2b(str(self.layers).encode(), digest_size=4).hexdigest()
        aside = part / f"{store_key(self.spec)}-{layers}-{self.digest}"
        size = tokens_that_fit(self.encoder) if budget == "auto" else budget
        write_states(
            aside, self.encoder, self.reader, self.inputs, width=num_dims(self.encoder, self.spec.norm),
            prompt=self.prompt, token_budget=size, about=self.about(tokens=True),
            stage=Stage(progress, "embedding", len(self.inputs)),
        )  # fmt: skip
        with explain_full_disk(self.out):
            aside.replace(self.out)  # an empty folder in its place is replaced

    def about(self, *, tokens: bool = False) -> dict[str, Any]:
        """Return what the file holds, of what, made by which versions."""
        spec, encoder = self.spec, self.encoder
        return {
            "format": "midlayer states 1" if tokens else "midlayer vectors 1",
            "model": spec.model,
            "revision": spec.revision,
            "commit": getattr(getattr(encoder.transformer, "config", None), "_commit_hash", None),
            "weights": spec.weights_digest,
            "tower": spec.tower,
            "layers": list(self.layers),
            "num_layers": spec.num_layers,
            "site": spec.site,
            "norm": spec.norm,
            "pooling": None if tokens else spec.pooling,
            "recipe": encoder.options.recipe,
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
    """Return the key of an input; of an image by its pixels, also where it is a file."""
    if medium == "image":
        return item_key(read_image(item, max_pixels=encoder.max_pixels))
    return item_key(Path(item) if medium == "audio" and isinstance(item, str) else item, prompt)
