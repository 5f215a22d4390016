"""Numbers of the zoo, which several pages state: causal models are 0 SmolLM2-135M, 1 Gemma-3-270M, 2 TinyStories-15M."""

from __future__ import annotations

from benchmarks.intervals import mean_interval
from benchmarks.zoo import table as zoo
from tests.docs.frames import MINILM, last, recipe, table


def zoo_scores(number: int) -> list[float]:
    """Of a causal model: plain at the last and its best layer; at 0.95 `one-word`, `echo`, `word-echo`; best pair, last."""
    scores = zoo.means(zoo.CAUSAL[number])
    num_layers = max(layer for _, layer in scores)
    layer = zoo.resolve_layer(zoo.DEPTH, num_layers)
    best_plain = max(score for (name, _), score in scores.items() if name == "plain")
    best_pair = max(score for (name, _), score in scores.items() if not name.startswith("word-echo"))
    named = [scores[name, layer] for name in ("one-word", "echo", "word-echo")]
    return [scores["plain", num_layers], best_plain, *named, best_pair, scores["word-echo", num_layers]]


def zoo_choice(model: str, choice: str, *columns: str) -> list[float]:
    rows = table(f"zoo/results/{model}-choices.csv").filter(choice=choice)
    return [rows[name].item() for name in columns]


def zoo_gain(number: int, choice: str = "word-echo at 0.95") -> list[float]:
    """Of a causal model: the gain of a choice over the best plain layer, and its interval."""
    return zoo_choice(zoo.CAUSAL[number], choice, "gain", "gain_low", "gain_high")


def best_over_last(number: int) -> list[float]:
    """Of a causal model: the gain of the best plain layer over the last, and its interval."""
    return absolute(zoo_gain(number, "plain, last layer"))


def best_plain_depth(number: int) -> float:
    """Of a causal model: the depth of the best plain layer in percent."""
    scores = zoo.means(zoo.CAUSAL[number])
    layer = max((place for place in scores if place[0] == "plain"), key=scores.__getitem__)[1]
    return 100 * layer / max(layer for _, layer in scores)


def with_intervals(number: int) -> list[float]:
    """Of a causal model: plain at the last and the best layer, and the answer without labels, with intervals; its gain."""
    choices = ("plain, last layer", "plain, best layer", "word-echo at 0.95")
    scores = [zoo_scores(number)[place] for place in (0, 1, 4)]
    ends = [zoo_choice(zoo.CAUSAL[number], choice, "low", "high") for choice in choices]
    return [*(value for score, both in zip(scores, ends, strict=True) for value in (score, *both)), *zoo_gain(number)]


def absolute(values: list[float]) -> list[float]:
    """Return a loss and the ends of its interval, the smaller one first, without their signs."""
    return [-values[0], -values[2], -values[1]]


def variant_gain(name: str, number: int) -> tuple[float, float, float]:
    """Of a causal model at 0.95 of its depth: the gain of a variant over `word-echo`, and its interval over the six tasks."""
    model = zoo.CAUSAL[number]
    layer = zoo.resolve_layer(zoo.DEPTH, max(layer for _, layer in zoo.means(model)))
    rows = table(f"zoo/results/{model}-variants.csv").filter(layer=layer).sort("task")
    one, other = (rows.filter(variant=variant)["score"] for variant in (name, "word-echo"))
    assert len(one) == len(other) == 6
    return mean_interval((one - other).to_list())


def parameters(model: str) -> int:
    return table("results/tuning.csv").filter(model=model)["parameters"].max()  # type: ignore[return-value]


def minilm() -> list[float]:
    return [last(recipe("plain", "minilm")), *zoo_choice(MINILM, "plain, last layer", "low", "high")]


def long_losses() -> list[tuple[float, float, float]]:
    """Return how far ``word-echo`` is below the best plain layer on long documents, with the interval, of each model."""
    rows = [table(f"zoo/results/long/{model}-choices.csv") for model in ("SmolLM2-135M", "Gemma-3-270M")]
    chosen = [row.filter(choice="word-echo at 0.95").row(0, named=True) for row in rows]
    assert all(row.filter(choice="best single recipe and layer")["gain_low"].item() < 0 for row in rows)
    return [(-row["gain"], -row["gain_high"], -row["gain_low"]) for row in chosen]


def author_scores() -> list[float]:
    """Return the best plain layer and the number of layers of two models on authors, its scores, and those of `word-echo`."""
    layers: list[float] = []
    plain, prompted = [], []
    for model in ("SmolLM2-135M", "Gemma-3-270M"):
        rows = table(f"zoo/results/long/{model}.csv").filter(task="AuthorClassification")
        num_layers = rows["layer"].max()
        best = rows.filter(recipe="plain").sort("score").row(-1, named=True)
        layers += [best["layer"], num_layers]
        plain.append(best["score"])
        layer = zoo.resolve_layer(zoo.DEPTH, num_layers)
        prompted.append(rows.filter(recipe="word-echo", layer=layer)["score"].item())
    return [*layers, *plain, *prompted]
