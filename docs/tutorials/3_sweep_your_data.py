# %% [markdown]
# # 3. Sweep your own data and read the result
#
# The best layer depends on the task. So put yours in a file, score every layer on it, and look. This takes one pass of the model over each text, however
# many layers it has.
#
# A file needs nothing but the right columns: `text` and `label` make a classification, `sentence1`, `sentence2` and `score` a similarity task, and so on
# ([the list](../tasks.md)). Here are two made of the documentation that is installed on this machine: which library is a sentence from, and do two sentences speak
# of the same function?

# %%
import csv
import itertools

from midlayer_encoders.tasks.docstrings import entries

found = entries()[::16]
with open("libraries.csv", "w", newline="", encoding="utf8") as file:
    rows = csv.writer(file)
    rows.writerow(["text", "label"])
    rows.writerows((entry.summary, entry.library) for entry in found)

with open("same_function.csv", "w", newline="", encoding="utf8") as file:
    rows = csv.writer(file)
    rows.writerow(["sentence1", "sentence2", "label"])
    rows.writerows((one.summary, one.description, 1) for one in found)
    rows.writerows((one.summary, two.description, 0) for one, two in itertools.pairwise(found))

print(len(found), "functions; the first says:", found[0].summary)

# %% [markdown]
# Now the sweep. `built-in` is SmolLM2-135M; a name on the hub or a folder works alike.

# %%
from midlayer_encoders import LayerEncoder, sweep

encoder = LayerEncoder("built-in", -1, max_length=32)
result = sweep(encoder, ["./libraries.csv", "./same_function.csv"], out="run")

summary = result.summary()
for curve in [*summary.tasks, summary.average]:
    print(
        f"{curve.name.split('-')[0]:<16} best {curve.best:.1f} at layer {curve.best_layer:>2}, last {curve.last:.1f}, gain {curve.gain:+.1f}"
    )

# %% [markdown]
# Read it from the bottom: the average over the tasks decides, and `gain` is what its best layer has over the last one, the layer you would get from the model as
# it comes. Is that a lot? Ask what no model at all would score. A sweep always scores TF-IDF, which only counts words, and, where its package is installed,
# all-MiniLM-L6-v2, a small model that was trained for embeddings:

# %%
for name, scores in result.notes.baselines.items():
    print(f"{name:<18}", "  ".join(f"{task.split('-')[0]} {100 * score:.1f}" for task, score in scores.items()))

# %% [markdown]
# That is the honest frame of every number above. Where a text and its partner share their words (`same_function`), counting words beats every layer of this language model, and the
# embedding model beats both; telling libraries apart is another matter. On larger and more varied tasks the embedding model is far ahead, and [the FAQ](../faq.md) says what that
# means for you.
#
# The curve tells more than its maximum: a broad hill means that the exact layer hardly matters, a lone spike among noisy neighbors is luck.

# %%
figure = result.plot()
figure.savefig("sweep.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![Scores of every layer on two tasks](figures/sweep.png)
#
# Everything is in one tidy frame, a row for each layer and task, and in a page to open in a browser:

# %%
import polars as pl

print(result.to_html().name)
rows = result.frame.filter(pl.col("kind") == "score").select("layer", "value").group_by("layer").mean()
for layer, value in rows.sort("value", descending=True).head(3).iter_rows():
    print(f"layer {layer:>2}: {100 * value:.1f} on average")

# %% [markdown]
# Look at the layers that lead: where two that lie far apart are equal to a tenth of a point, the data does not choose between them, and with so few rows it cannot.
# Take the smaller, or bring more rows.
#
# `kind` is `score` for all layers, and `confirmed` for the best, the second best and the last, which mteb's own evaluators have scored once more.
# If the two differ by more than rounding, trust mteb, and tell us.
#
# From a shell the same is `midlayer sweep built-in --tasks ./libraries.csv,./same_function.csv --out run`, which ends with the lines that make the encoder of the best
# layer:

# %%
from midlayer_encoders.sweeping.sweep_result import export_lines

for language, line in export_lines(result.notes, result.best()).items():
    print(f"{language}: {line}")
