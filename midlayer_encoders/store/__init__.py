"""Embeddings of all layers on disk, written once, read one layer at a time. `docs/store.md` says why in this form."""

from __future__ import annotations

from midlayer_encoders.errors import DiskFullError, deprecated_names
from midlayer_encoders.store.cache import StoreInfo, list_stores, prune
from midlayer_encoders.store.embeddings import EmbeddingStore, StoreDtype, text_key
from midlayer_encoders.store.shard import StoreError, TextNotStoredError

__all__ = [
    "DiskFullError",
    "EmbeddingStore",
    "StoreDtype",
    "StoreError",
    "StoreInfo",
    "TextNotStoredError",
    "list_stores",
    "prune",
    "text_key",
]

__getattr__ = deprecated_names(__name__, {"StoreFullError": "DiskFullError"})
