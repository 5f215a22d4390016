"""``LayerEncoder``: a SentenceTransformer over a model that ends at the layer you name."""
