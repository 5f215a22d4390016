"""Embeddings from the layer that embeds best."""
