"""Stored vectors, transformed by a recipe as they are read: centered, whitened, filtered or normalized."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.recipes.vectors import LEFT_OUT, middle_directions, vector_map
from midlayer_encoders.store import EmbeddingStore
from midlayer_encoders.sweeping.stored_layer import Embedder, item_key

_Array = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class MappedStore:
    """A store whose vectors are transformed when they are read; it can be sent to another process.

    Attributes:
        store: holds the pooled vectors.
        maps: matrix (``None`` for the identity) and offset of each layer.
        normalize: scale the result to length 1.
        key: identifies the store and the maps.
    """

    store: EmbeddingStore
    maps: Mapping[int, tuple[_Array | None, _Array]]
    normalize: bool
    key: str

    @property
    def dim(self) -> int:
        """Number of dimensions."""
        return self.store.dim

    def refresh(self) -> None:
        """Read which vectors other processes have stored."""
        self.store.refresh()

    def read(self, layer: int, keys: Sequence[str]) -> _Array:
        """Return the transformed vectors of keys, shape ``(N, D)``."""
        vectors = self.store.read(layer, keys)
        if layer in self.maps:
            matrix, offset = self.maps[layer]
            vectors = (vectors if matrix is None else vectors @ matrix.T) + offset
        if self.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors = vectors / np.maximum(lengths, np.float32(1e-12))
        return vectors


def map_identity(recipe: Recipe, texts: Sequence[str]) -> dict[str, Any]:
    """Return what distinguishes maps: the transformations, and a digest of the texts they are fitted on."""
    return {
        "center": content_digest("\0".join(texts), 8) if recipe.center else "",
        "whiten": recipe.whiten,
        "embed_filter": LEFT_OUT if recipe.embed_filter else None,
        "normalize": recipe.normalize,
    }


def mapped_store(embedder: Embedder, recipe: Recipe, texts: Sequence[str]) -> MappedStore:
    """Return the embedder's store with the transformations of a recipe, fitted for each layer.

    Args:
        embedder: embedder of the recipe's encoder; it embeds texts that are not stored.
        recipe: defines the transformations.
        texts: texts to fit the mean and the spread on.
    """
    encoder, store = embedder.encoder, embedder.store
    if encoder.truncate_dim is not None and (recipe.center or recipe.embed_filter):
        raise OptionError(
            f"`truncate_dim` must be None with {recipe.name!r}, which maps whole vectors: truncate when you export."
        )
    projection = middle_directions(encoder.output_embeddings()) if recipe.embed_filter else None
    prompt = encoder.default_prompt
    keys = [item_key(text, prompt) for text in texts]
    if recipe.center:
        embedder(texts, keys, prompt)
    maps: dict[int, tuple[_Array | None, _Array]] = {}
    if recipe.center or projection is not None:
        for layer in store.layers:
            sample = torch.from_numpy(store.read(layer, keys)) if recipe.center else None
            matrix, offset = vector_map(sample, width=store.dim, whiten=recipe.whiten, projection=projection)
            only_offset = projection is None and not recipe.whiten
            maps[layer] = None if only_offset else matrix.float().numpy(), offset.float().numpy()
    identity = json.dumps([store.key, map_identity(recipe, texts)], sort_keys=True)
    return MappedStore(store, maps, recipe.normalize, f"{store.key}-{content_digest(identity)}")
