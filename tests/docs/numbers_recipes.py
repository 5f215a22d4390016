"""What pages say of recipes, and the frames that say it."""

import re

from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import table as zoo
from tests.docs.frames import BENCH, table
from tests.docs.zoo_numbers import TASKS, variant_gain, zoo_gain, zoo_score

PASSAGES = rivals.GROUPS["passages"]


def choice_row(choice: str) -> list[float]:
    """Return the score of each causal model, and the interval of its gain over the best plain layer."""
    return [number for k in range(3) for number in (zoo_score(k, choice), *zoo_gain(k, choice)[1:])]


def readme_row(number: int, choice: str) -> list[float]:
    """Return the score of a causal model on the short tasks and on passages."""
    return [zoo_score(number, choice, tasks) for tasks in (TASKS, PASSAGES)]


def stated(recipe: str, *, layers: str) -> list[list[float]]:
    """Return the numbers of each cell after a recipe and its layers, in the tables of benchmarks/recipes/README.md."""
    text = (BENCH / "recipes" / "README.md").read_text(encoding="utf8")
    (row,) = re.findall(rf"^\| {re.escape(recipe)} \| {re.escape(layers)} \|(.*)\|$", text, re.MULTILINE)
    return [[float(number) for number in re.findall(r"-?\d+\.\d+", cell)] for cell in row.split("|")]


def stock_folder() -> list[float]:
    """Return the gains of the stock folder; no other variant is better on all models, and Token Prepending on none."""
    variants = table(f"zoo/results/{zoo.CAUSAL[0]}-variants.csv")["variant"].unique()
    prompted = [zoo.variants(model) for model in zoo.CAUSAL[:2]]
    assert all(scores[name] < scores["word-echo"] for scores in prompted for name in scores if "Prepending" in name)
    gains = {name: [variant_gain(name, k)[0] for k in range(3)] for name in variants}
    assert all(min(values) <= 0 for values in gains.values())
    return [number for k in range(3) for number in variant_gain("stock folder", k)]


def tf_idf() -> float:
    """Return the mean of TF-IDF over the tasks, which the page of benchmarks states beside each task's score."""
    text = (BENCH / "recipes" / "README.md").read_text(encoding="utf8")
    (row,) = re.findall(r"^\| TF-IDF \|(.*)\|$", text, re.MULTILINE)
    mean, *scores = (float(number) for number in re.findall(r"\d+\.\d+", row))
    assert abs(mean - sum(scores) / 6) < 0.05
    return mean
