"""Embed every layer of inputs into a store, and transform stored vectors as a recipe does."""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders._types import EncoderSpec, Join, Stage, content_digest
from midlayer_encoders.arguments import TokenBudget
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import read_artifact, write_file
from midlayer_encoders.reading.ahead import Behind
from midlayer_encoders.reading.batches import batches_of, is_combined, tokens_that_fit
from midlayer_encoders.reading.media_inputs import is_pil, read_audio, read_image
from midlayer_encoders.reading.pooled_spans import SPANS, join_spans, split_spans
from midlayer_encoders.reading.reader import Passed
from midlayer_encoders.recipes import Recipe, centering_offset
from midlayer_encoders.sweeping.store import EmbeddingStore, StoreDtype, text_key

_SHORT_TEXT = 16  # tokens of a text in a batch with as many texts as possible
_MIN_TEXTS = 256  # that any batch may hold
_BATCH_BYTES = 128 * 2**20  # vectors of a larger batch

_Array: TypeAlias = npt.NDArray[np.float32]


def item_key(item: Any, prompt: str = "") -> str:
    """Return the key of a text under a prompt, of an image by its pixels, of both, or of a waveform by its samples."""
    if isinstance(item, str):
        return text_key(item, prompt)
    if is_combined(item):
        return content_digest(item_key(item["text"], prompt) + item_key(item["image"]), 16)
    if is_pil(item):
        # As the model reads it: palette images with equal bytes can have different colors.
        image = read_image(item, max_pixels=max(item.width * item.height, 1))
        head = f"{image.mode} {image.size} "
        content = image.tobytes()
    else:
        waveform = read_audio(item)
        head = f"{waveform['sampling_rate']} "
        content = waveform["array"].tobytes()
    return content_digest(head.encode() + content, 16)


@dataclass(frozen=True)
class Embedder:
    """Embeds the items that are not stored: every layer from one pass, batch by batch.

    Attributes:
        encoder: encoder with the whole model.
        store: where the vectors are written.
        token_budget: tokens per batch, or ``"auto"`` for the fastest size on the device.
        stage: counts the texts that are embedded.
        planning: receives a report while batches are planned.
    """

    encoder: LayerEncoder
    store: EmbeddingStore
    token_budget: TokenBudget = "auto"
    stage: Stage = field(default_factory=lambda: Stage(None, "embedding"))
    planning: Stage = field(default_factory=lambda: Stage(None, "planning"))

    @cached_property
    def tokens(self) -> int:
        """Tokens per batch."""
        return tokens_that_fit(self.encoder) if self.token_budget == "auto" else self.token_budget

    def __call__(self, items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
        """Embed the items whose keys are not stored.

        Batches are planned once and the plan is saved next to the store, so that a resumed run computes the same
        batches and therefore the same vectors.
        """
        distinct: dict[str, Any] = dict(zip(keys, items, strict=True))
        # The second round plans anew, in case shards were removed or damaged since the plan was made.
        for make_plan in (self.plan, self._plan):
            missing = set(self.store.missing(list(distinct)))
            if not missing:
                return
            self.planning.step(0)
            self.embed(distinct, missing, make_plan(distinct, missing, prompt), prompt)

    def _plan(self, items: Mapping[str, Any], missing: set[int], prompt: str) -> list[list[int]]:
        positions = sorted(missing)
        contents = list(items.values())
        max_texts = max_batch_texts(self.tokens, len(self.store.layers), self.store.dim)
        missing_items = [contents[n] for n in positions]
        batches = batches_of(self.encoder, missing_items, token_budget=self.tokens, max_texts=max_texts, prompt=prompt)
        return [[positions[n] for n in batch] for batch in batches]

    def plan(self, items: Mapping[str, Any], missing: set[int], prompt: str) -> list[list[int]]:
        """Return the saved batches of these items, or plan and save them."""
        # On a GPU the automatic budget can change between runs; the plan must not.
        budget = self.token_budget if self.encoder.device.type == "cuda" else self.tokens
        digest = content_digest("".join((*items, str(budget))), 12)
        path = self.store.folder / "plans" / f"{digest}.json"
        read = partial(_read_plan, count=len(items))
        while (batches := read_artifact(path, read)) is None:
            write_file(path, json.dumps(self._plan(items, missing, prompt)).encode(), once=True)
        return batches

    def embed(self, items: Mapping[str, Any], missing: set[int], batches: list[list[int]], prompt: str) -> None:
        """Embed the batches that have a missing item, and store those items."""
        reader = self.encoder.vector_reader(self.store.layers, prompt=prompt)
        batches = [batch for batch in batches if missing.intersection(batch)]
        self.stage.expect(sum(map(len, batches)))
        contents = list(items.values())
        with Behind(done=self.stage.step) as writer, closing(reader.passes(contents, batches)) as passes:
            for passed in passes:
                writer.hand_on(self._write, passed, list(items), missing)

    def _write(self, passed: Passed, names: Sequence[str], missing: set[int]) -> int:
        """Store the missing items of a batch and return the batch size."""
        rows = [row for row, position in enumerate(passed.positions) if position in missing]
        vectors = passed.vectors()
        if len(rows) < len(passed.positions):
            vectors = vectors[:, rows]
        self.store.write([names[passed.positions[row]] for row in rows], vectors.numpy(), finite=True)
        return len(passed.positions)


def max_batch_texts(tokens: int, num_layers: int, dim: int) -> int:
    """Return the maximum number of texts in a batch, whose vectors of all layers must fit in memory."""
    return max(_MIN_TEXTS, min(tokens // _SHORT_TEXT, _BATCH_BYTES // (4 * num_layers * dim)))


def _read_plan(path: Path, *, count: int) -> list[list[int]]:
    """Return the batches in a file, or raise if they are not indices of ``count`` items."""
    batches: list[list[int]] = json.loads(path.read_bytes())
    if not isinstance(batches, list) or any(index not in range(count) for batch in batches for index in batch):
        raise ValueError(f"it must be lists of numbers below {count}")
    return batches


def open_store(
    root: Path | str, spec: EncoderSpec, layers: Sequence[int], encoder: LayerEncoder, dtype: StoreDtype
) -> EmbeddingStore:
    """Open the store of an encoder's vectors."""
    description = spec.to_dict()
    del description["layer"], description["similarity"]
    dim = encoder.get_embedding_dimension() or 0
    return EmbeddingStore(
        root, key=store_key(spec, dtype), layers=layers, dim=dim, dtype=dtype, description=description
    )


def store_key(spec: EncoderSpec, dtype: StoreDtype = "float32") -> str:
    """Return the key of the store of an encoder's vectors."""
    # The similarity changes scores, not vectors.
    return replace(spec, layer=-1, similarity="cosine").digest + ("-half" if dtype == "float16" else "")


def joined_dim(stored: int, join: Join | None) -> int:
    """Return the number of dimensions of a vector once its stored spans are joined."""
    return stored if join in (None, "none") else stored // len(SPANS)


@dataclass(frozen=True, eq=False)
class MappedStore:
    """A store whose vectors are transformed when they are read; it can be sent to another process.

    Attributes:
        store: holds the pooled vectors.
        offsets: added to the vectors of each layer, or to their spans.
        normalize: scale the result to length 1.
        key: identifies the store and the transformations.
        join: how the spans of each stored vector are joined; ``None`` if it has one.
    """

    store: EmbeddingStore
    offsets: Mapping[int, _Array]
    normalize: bool
    key: str
    join: Join | None = None

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return joined_dim(self.store.dim, self.join)

    def refresh(self) -> None:
        """Read which vectors other processes have stored."""
        self.store.refresh()

    def read(self, layer: int, keys: Sequence[str]) -> _Array:
        """Return the transformed vectors of keys, shape ``(N, D)``."""
        vectors = self.store.read(layer, keys)
        offsets = self.offsets.get(layer)
        if self.join is not None:
            each = None if offsets is None else torch.from_numpy(offsets)
            vectors = join_spans(*split_spans(torch.from_numpy(vectors)), self.join, each).numpy()
        elif offsets is not None:
            vectors = vectors + offsets
        if self.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return vectors


#: The vectors of every layer.
Vectors: TypeAlias = EmbeddingStore | MappedStore


def map_identity(recipe: Recipe, texts: Sequence[str]) -> dict[str, Any]:
    """Return what distinguishes transformations: their settings, and a digest of the texts they are fitted on."""
    return {
        "center": content_digest("\0".join(texts), 8) if recipe.center else "",
        "normalize": recipe.normalize,
        **({"join": recipe.join} if recipe.join is not None else {}),
    }


def mapped_store(embedder: Embedder, recipe: Recipe, texts: Sequence[str]) -> MappedStore:
    """Return the embedder's store with the transformations of a recipe, fitted for each layer.

    Args:
        embedder: embedder of the recipe's encoder; it embeds texts that are not stored.
        recipe: defines the transformations.
        texts: texts to fit the mean on.
    """
    encoder, store = embedder.encoder, embedder.store
    if encoder.truncate_dim is not None:
        raise OptionError(
            f"`truncate_dim` must be None with {recipe.name!r}, which maps whole vectors. Pass "
            f"dims=[{encoder.truncate_dim}] to the sweep instead."
        )
    prompt = encoder.default_prompt
    keys = [item_key(text, prompt) for text in texts]
    if recipe.center:
        embedder(texts, keys, prompt)
    offsets: dict[int, _Array] = {}
    if recipe.center:
        for layer in store.layers:
            vectors = torch.from_numpy(store.read(layer, keys))
            rows = vectors if recipe.join is None else split_spans(vectors)[0]
            offsets[layer] = centering_offset(rows).float().numpy()
    identity = json.dumps([store.key, map_identity(recipe, texts)], sort_keys=True)
    return MappedStore(store, offsets, recipe.normalize, f"{store.key}-{content_digest(identity)}", recipe.join)
