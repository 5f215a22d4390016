"""Store the embeddings of all layers on disk, written once and read one layer at a time."""

from midlayer_encoders.errors import DiskFullError
from midlayer_encoders.sweeping.store.embeddings import EmbeddingStore, StoreDtype, text_key
from midlayer_encoders.sweeping.store.shard import StoreError, TextNotStoredError

__all__ = ["DiskFullError", "EmbeddingStore", "StoreDtype", "StoreError", "TextNotStoredError", "text_key"]
