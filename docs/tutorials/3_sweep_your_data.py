# %% [markdown]
# # 3. Sweep your own data and read the result
#
# In this tutorial you score every layer of a model on your own files and interpret the result. The best layer depends
# on the task, so use your own data. A sweep passes each text through the model only once, for all layers.
#
# The columns of a file determine the task: `text` and `label` define a classification task, `sentence1`, `sentence2`
# and `score` a similarity task, and so on ([all types](../tasks.md)). This script writes two files from the
# documentation of installed packages: which library is a sentence from, and do two sentences describe the same
# function?

# %%
import csv
import itertools

from midlayer_encoders.tasks.docstrings import entries

functions = entries()[::16]
with open("libraries.csv", "w", newline="", encoding="utf8") as file:
    rows = csv.writer(file)
    rows.writerow(["text", "label"])
    rows.writerows((function.summary, function.library) for function in functions)

with open("same_function.csv", "w", newline="", encoding="utf8") as file:
    rows = csv.writer(file)
    rows.writerow(["sentence1", "sentence2", "label"])
    rows.writerows((function.summary, function.description, 1) for function in functions)
    rows.writerows((first.summary, second.description, 0) for first, second in itertools.pairwise(functions))

print(len(functions), "functions; the first says:", functions[0].summary)

# %% [markdown]
# Run the sweep. `built-in` is SmolLM2-135M; a name on the hub or a folder works, too.

# %%
from midlayer_encoders import LayerEncoder, sweep

encoder = LayerEncoder("built-in", -1, max_length=32)
result = sweep(encoder, ["./libraries.csv", "./same_function.csv"], out="run")

curves = result.curves
for curve in [*curves.tasks, curves.average]:
    print(
        f"{curve.name.split('-')[0]:<16} best {curve.best:.1f} at layer {curve.best_layer:>2}, "
        f"last {curve.last:.1f}, gain {curve.gain:+.1f}"
    )
gain = result.gain()
print(f"95 % interval of the last gain: {gain.low:+.1f} to {gain.high:+.1f}")

# %% [markdown]
# The last row, the average over the tasks, determines the best layer, and `gain` is its advantage over the last
# layer, with an [interval](../tasks.md#intervals) over resampled examples. It contains zero: 80 functions are too few
# to tell the two layers apart. Baselines put these scores in context. A sweep always scores TF-IDF, which only counts
# words, and all-MiniLM-L6-v2, a small embedding model, if its package is installed:

# %%
for name, scores in result.notes.baselines.items():
    print(f"{name:<18}", "  ".join(f"{task.split('-')[0]} {100 * score:.1f}" for task, score in scores.items()))

# %% [markdown]
# A text and its partner share words in `same_function`, which favors TF-IDF. [The FAQ](../faq.md) compares language
# and embedding models on larger tasks.
#
# Look at the whole curve, not only its maximum: on a broad hill, the exact layer hardly matters; a single spike among
# noisy neighbors is chance.

# %%
figure = result.plot()
figure.savefig("sweep.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![Scores of every layer on two tasks](figures/sweep.png)
#
# The results are in one tidy frame with a row per layer and task, and in an HTML page:

# %%
import polars as pl

print(result.to_html().name)
rows = result.frame.filter(pl.col("kind") == "score").select("layer", "value").group_by("layer").mean()
for layer, value in rows.sort("value", descending=True).head(3).iter_rows():
    print(f"layer {layer:>2}: {100 * value:.1f} on average")

# %% [markdown]
# If two distant layers differ by only a tenth of a point, as layers 7 and 24 do here, the data cannot decide between
# them (`result.gain(7, over=24)` has the interval). Use the smaller one, or add rows.
#
# `kind` is `score` for all layers, and `confirmed` for the best, the second best and the last, which mteb's own
# evaluators score again. If the two differ by more than rounding, trust mteb and report the difference.
#
# On the command line, `midlayer sweep built-in --tasks ./libraries.csv,./same_function.csv --out run` does the same,
# and ends with the lines that build the encoder of the best layer:

# %%
from midlayer_encoders.sweeping.best_layer import export_lines

for language, line in export_lines(result.notes, result.best()).items():
    print(f"{language}: {line}")
