"""``LayerEncoder``: a SentenceTransformer over a model that is cut at a layer."""
