"""What pages say of recipes, and the frames that say it."""

from __future__ import annotations

import re

from benchmarks.intervals import mean_interval
from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import table as zoo
from benchmarks.zoo.rivals import OWN_PROMPT
from tests.docs.frames import BENCH, table
from tests.docs.stated import Claim
from tests.docs.zoo_numbers import (
    absolute,
    group_gain,
    minilm,
    parameters,
    short_tasks,
    variant_gain,
    with_intervals,
    zoo_gain,
    zoo_score,
)

RECIPES = "docs/recipes.md"
PASSAGES = rivals.GROUPS["passages"]
ROWS = {
    "plain text, last layer": "plain, last layer",
    "`one-word+center` at 0.95 of the depth": "one-word",
    "`echo+center` at 0.95": "echo",
    "best of these and layer, chosen with labels": "best single",
    "`word-echo+center`, last layer": "last layer",
}
"""Rows of the table of gains, and their choices."""
GROUPS = {
    "passages (XQuAD, 124 words)": "passages",
    "three passages joined": "joined passages",
    "texts of 300 to 600 words, three tasks": rivals.LONG,
    "authors of texts of 1,300 to 1,600 words": rivals.LONGEST,
    rivals.CROSS: rivals.CROSS,
}
"""Rows of the table of gains on other tasks, and their groups."""


def _row(choice: str) -> list[float]:
    """Return the score of each causal model, and the interval of its gain over the best plain layer."""
    return [number for k in range(3) for number in (zoo_score(k, choice), *zoo_gain(k, choice)[1:])]


def _own_prompt() -> list[float]:
    """Return what a prompt in the language of the texts gains on Gemma-3-270M, in German and in French."""
    of = rivals.results(zoo.CAUSAL[1])
    pairs = [rivals.LANGUAGES[f"{language} pairs"] for language in ("German", "French")]
    return [of.mean(tasks, of.at(OWN_PROMPT)) - of.mean(tasks, of.default) for tasks in pairs]


def _aligned(number: int) -> list[float]:
    """Of a causal model's short tasks: the score of AlignedWVA, with at most 0.55 of the tokens, and what it is below the default."""
    of, tasks = rivals.results(zoo.CAUSAL[number]), short_tasks(number)
    settings = [of.chosen("AlignedWVA", task) for task in tasks]
    assert of.tokens(tasks, settings) < 0.55 * of.tokens(tasks, of.default)
    return [of.mean(tasks, settings), of.mean(tasks, of.default) - of.mean(tasks, settings)]


def _stated(recipe: str, *, layers: str) -> list[list[float]]:
    """Return the numbers of each cell after a recipe and its layers, in the tables of benchmarks/recipes/README.md."""
    text = (BENCH / "recipes" / "README.md").read_text(encoding="utf8")
    (row,) = re.findall(rf"^\| {re.escape(recipe)} \| {re.escape(layers)} \|(.*)\|$", text, re.MULTILINE)
    return [[float(number) for number in re.findall(r"-?\d+\.\d+", cell)] for cell in row.split("|")]


def _ids() -> list[float]:
    """Return the least and the most that separate ids gain, and the interval that excludes zero, if it is Gemma's `echo`."""
    gains = {}
    for model in ("gemma-3-270m", "tinystories-15m"):
        for recipe in ("one-word", "echo"):
            rows = table(f"results/recipe_tokens_{model}.csv").filter(recipe=recipe).sort("task")
            parts, whole = (rows.filter(ids=ids)["score"] for ids in ("parts", "whole"))
            gains[model, recipe] = mean_interval((parts - whole).to_list())
    ((place, (_, low, high)),) = [(key, gain) for key, gain in gains.items() if gain[1] > 0]
    assert place == ("gemma-3-270m", "echo")
    means = [mean for mean, _, _ in gains.values()]
    return [min(means), max(means), len(gains), low, high]


def _stock_folder() -> list[float]:
    """Return the gains of the stock folder; no other variant is better on all models, and Token Prepending on none."""
    variants = table(f"zoo/results/{zoo.CAUSAL[0]}-variants.csv")["variant"].unique()
    prompted = [zoo.variants(model) for model in zoo.CAUSAL[:2]]
    assert all(scores[name] < scores["word-echo"] for scores in prompted for name in scores if "Prepending" in name)
    gains = {name: [variant_gain(name, k)[0] for k in range(3)] for name in variants}
    assert all(min(values) <= 0 for values in gains.values())
    return [number for k in range(3) for number in variant_gain("stock folder", k)]


CLAIMS = [
    Claim(
        "README.md",
        "scores {} at its last layer, {} at the best one with centered vectors, and {} with [a prompt](docs/recipes.md) at "
        "0.95 of the depth ({} to {} more than the best layer",
        lambda: (
            [zoo_score(0, each) for each in ("plain, last layer", "plain, best layer", "default")] + zoo_gain(0)[1:]
        ),
    ),
    Claim(
        "README.md",
        "the best layer has {}, the prompt {} ({} to {} more)",
        lambda: (
            [zoo_score(0, each, PASSAGES) for each in ("plain, best layer", "default")]
            + zoo_gain(0, tasks=PASSAGES)[1:]
        ),
    ),
    Claim(
        "README.md",
        "Gemma-3-270M has {} at its best layer and {} with the prompt ({} to {} more)",
        lambda: [zoo_score(1, each) for each in ("plain, best layer", "default")] + zoo_gain(1)[1:],
    ),
    Claim("README.md", "scores more on SmolLM2's short texts ({}, at half of the tokens)", lambda: _aligned(0)[:1]),
    Claim("README.md", "it gains nothing ({} to {};", lambda: zoo_gain(2)[1:]),
    Claim(
        "README.md",
        "all-MiniLM-L6-v2 ({}M parameters) scores {} ({} to {})",
        lambda: [parameters("all-MiniLM-L6-v2") / 1e6, *minilm()],
    ),
    *(
        Claim(
            RECIPES,
            f"| {label} | {{}} [{{}} to {{}}] | {{}} [{{}} to {{}}] | {{}} [{{}} to {{}}] |",
            lambda choice=choice: _row(choice),
        )
        for label, choice in ROWS.items()
    ),
    Claim(
        RECIPES,
        "| plain text, best layer, centered or not | {} at 6 of 30 | {} at 13 of 18 | {} at 1 of 6 |",
        lambda: [zoo_score(k, "plain, best layer") for k in range(3)],
    ),
    Claim(
        RECIPES,
        "| `word-echo+center` at 0.95, nothing chosen | **{}** [{} to {}] | **{}** [{} to {}] | {} [{} to {}] |",
        lambda: _row("default"),
    ),
    *(
        Claim(RECIPES, f"| {label} | {{}} [{{}} to {{}}] |", lambda group=group: group_gain(0, group))
        for label, group in GROUPS.items()
    ),
    Claim(
        RECIPES,
        "| German and French pairs, which it hardly knows | {} [{} to {}] and {} [{} to {}] |",
        lambda: [*group_gain(0, "German pairs"), *group_gain(0, "French pairs")],
    ),
    Claim(
        RECIPES,
        "| German and Chinese passages | {} [{} to {}] and {} [{} to {}] |",
        lambda: [*group_gain(0, "German passages"), *group_gain(0, "Chinese passages")],
    ),
    Claim(
        RECIPES,
        "Gemma-3-270M gains {} [{} to {}] and {} points [{} to {}], and with a prompt in the language of the texts {} and {} more",
        lambda: [*group_gain(1, "German pairs"), *group_gain(1, "French pairs"), *_own_prompt()],
    ),
    Claim(
        RECIPES,
        "on SmolLM2's short texts, {} at half of its tokens, and {} points less on Gemma's",
        lambda: [_aligned(0)[0], _aligned(1)[1]],
    ),
    Claim(
        RECIPES,
        "TF-IDF scores {} on these tasks, all-MiniLM-L6-v2 {} [{} to {}]. Embedding models do not benefit: `one-word` costs "
        "MiniLM {} points [{} to {}]",
        lambda: [_tf_idf(), *minilm(), *absolute(_stated("`one-word`", layers="6")[1])],
    ),
    Claim(
        RECIPES,
        "changes the score by {} points on SmolLM2-135M (95 % interval over tasks {} to {}), {} on Gemma-3-270M ({} to {}) "
        "and {} on TinyStories-15M ({} to {})",
        _stock_folder,
    ),
    Claim(
        RECIPES,
        "the separate ids score {} to {} points more on average over six tasks of at most 1,000 test rows",
        lambda: _ids()[:2],
    ),
    Claim(RECIPES, "of the {} 95 % intervals over tasks, only that of Gemma's `echo` ({} to {})", lambda: _ids()[2:]),
    Claim("README.md", "TF-IDF scores {}", lambda: [_tf_idf()]),
    Claim(
        "docs/faq.md",
        "scores {} at its best layer ({} to {}) and {} with the [prompt](recipes.md) `word-echo+center` ({} to {})",
        lambda: with_intervals(0)[3:9],
    ),
    Claim("docs/faq.md", "trained for embeddings, scores **{}** ({} to {})", minilm),
    Claim(
        "CHANGELOG.md",
        "`summarize` scores {}, {} and {} and `instruction` {}, {} and {}, where `word-echo` scores {}, {} and {}",
        lambda: [
            zoo.means(model)[name, layer]
            for name in ("summarize", "instruction", "word-echo")
            for model, layer in zip(zoo.CAUSAL, (29, 17, 6), strict=True)
        ],
    ),
]


def _tf_idf() -> float:
    """Return the mean of TF-IDF over the tasks, which the page of benchmarks states beside each task's score."""
    text = (BENCH / "recipes" / "README.md").read_text(encoding="utf8")
    (row,) = re.findall(r"^\| TF-IDF \|(.*)\|$", text, re.MULTILINE)
    mean, *scores = (float(number) for number in re.findall(r"\d+\.\d+", row))
    assert abs(mean - sum(scores) / 6) < 0.05
    return mean
