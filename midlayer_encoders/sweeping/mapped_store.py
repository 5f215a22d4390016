"""Stored vectors with what a recipe does to them: centered, whitened, filtered or scaled as they are read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.recipes.vectors import LEFT_OUT, middle_directions, vector_map
from midlayer_encoders.store import EmbeddingStore
from midlayer_encoders.sweeping.items import item_key
from midlayer_encoders.sweeping.stored_layer import Embedder

__all__ = ["MappedStore", "map_words", "mapped_store"]

_Numbers = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class MappedStore:
    """A store whose vectors are mapped when they are read; it can be sent to another process.

    Attributes:
        store: holds the vectors as they were pooled.
        maps: matrix (``None`` for none) and offset of each layer.
        normalize: whether vectors are then scaled to length 1.
        key: names the store and the maps.
    """

    store: EmbeddingStore
    maps: Mapping[int, tuple[_Numbers | None, _Numbers]]
    normalize: bool
    key: str

    @property
    def dim(self) -> int:
        """Dimensions of a vector."""
        return self.store.dim

    def refresh(self) -> None:
        """See what other processes have stored."""
        self.store.refresh()

    def read(self, layer: int, keys: Sequence[str]) -> _Numbers:
        """Return the mapped vectors of some keys, shape ``(N, D)``."""
        vectors = self.store.read(layer, keys)
        if layer in self.maps:
            matrix, offset = self.maps[layer]
            vectors = (vectors if matrix is None else vectors @ matrix.T) + offset
        if self.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return vectors


def map_words(recipe: Recipe, texts: Sequence[str]) -> dict[str, Any]:
    """Return what tells maps apart: what is done, and a digest of the texts that it is fitted on."""
    fitted = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest() if recipe.center else ""
    return {
        "center": fitted,
        "whiten": recipe.whiten,
        "embed_filter": LEFT_OUT if recipe.embed_filter else None,
        "normalize": recipe.normalize,
    }


def mapped_store(embedder: Embedder, recipe: Recipe, texts: Sequence[str]) -> MappedStore:
    """Return the embedder's store with what a recipe does to vectors, fitted for each layer on some texts.

    Args:
        embedder: of the recipe's encoder; embeds the texts where they are not stored.
        recipe: says what is done.
        texts: whose mean is subtracted, and by whose spread directions are scaled.
    """
    encoder, store = embedder.encoder, embedder.store
    if encoder.truncate_dim is not None and (recipe.center or recipe.embed_filter):
        raise OptionError(
            f"`truncate_dim` must be None with {recipe.name!r}, which maps whole vectors; truncate what is exported."
        )
    projection = middle_directions(encoder.output_embeddings()) if recipe.embed_filter else None
    prompt = encoder.default_prompt
    keys = [item_key(text, prompt) for text in texts]
    if recipe.center:
        embedder(texts, keys, prompt)
    maps: dict[int, tuple[_Numbers | None, _Numbers]] = {}
    if recipe.center or projection is not None:
        for layer in store.layers:
            sample = torch.from_numpy(store.read(layer, keys)) if recipe.center else None
            matrix, offset = vector_map(sample, width=store.dim, whiten=recipe.whiten, projection=projection)
            plain = projection is None and not recipe.whiten
            maps[layer] = None if plain else matrix.float().numpy(), offset.float().numpy()
    words = json.dumps([store.key, map_words(recipe, texts)], sort_keys=True)
    key = hashlib.blake2b(words.encode(), digest_size=6).hexdigest()
    return MappedStore(store, maps, recipe.normalize, f"{store.key}-{key}")
