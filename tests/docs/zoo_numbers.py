"""Numbers of the zoo, which several pages state: causal models are 0 SmolLM2-135M, 1 Gemma-3-270M, 2 TinyStories-15M."""

from collections.abc import Callable, Sequence

from benchmarks.intervals import mean_interval
from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import table as zoo
from tests.docs.frames import MINILM, last, recipe, table

TASKS = rivals.GROUPS[rivals.SHORT]
CHOICES: dict[str, Callable[[rivals.Results, Sequence[str]], rivals.Setting]] = {
    "plain, last layer": lambda of, _: of.at("plain", 1.0),
    "plain, best layer": lambda of, tasks: of.best(tasks, "plain"),
    "one-word": lambda of, _: of.at("one-word centered"),
    "echo": lambda of, _: of.at("echo centered"),
    "best single": lambda of, tasks: of.best(tasks, "plain", "one-word", "echo"),
    "default": lambda of, _: of.default,
    "last layer": lambda of, _: of.at(rivals.DEFAULT, 1.0),
}


def zoo_score(number: int, choice: str = "default", tasks: Sequence[str] = ()) -> float:
    of, tasks = rivals.results(zoo.CAUSAL[number]), tasks or TASKS
    return of.mean(tasks, CHOICES[choice](of, tasks))


def zoo_gain(number: int, choice: str = "default", tasks: Sequence[str] = ()) -> list[float]:
    """Of a causal model: the gain of a choice over the best plain layer, centered or not, and its interval."""
    of, tasks = rivals.results(zoo.CAUSAL[number]), tasks or TASKS
    return list(of.gain(tasks, CHOICES[choice](of, tasks)))


def group_gain(number: int, group: str, *, of_method: str = rivals.DEFAULT) -> list[float]:
    """Of a causal model: the gain of a method on a group of tasks, its settings chosen on others."""
    model, tasks = zoo.CAUSAL[number], (rivals.GROUPS | rivals.LANGUAGES)[group]
    of = rivals.results(model)
    return list(of.gain(tasks, [of.chosen(of_method, task) for task in tasks]))


def zoo_choice(model: str, choice: str, *columns: str) -> list[float]:
    rows = table(f"zoo/results/{model}-choices.csv").filter(choice=choice)
    return [rows[name].item() for name in columns]


def with_intervals(number: int) -> list[float]:
    """Of a causal model: plain at the last and the best layer, and the answer without labels, with intervals; its gain."""
    of, tasks, values = rivals.results(zoo.CAUSAL[number]), TASKS, []
    for choice in ("plain, last layer", "plain, best layer", "default"):
        setting = CHOICES[choice](of, tasks)
        values += [of.mean(tasks, setting), *of.interval(tasks, setting)]
    return [*values, *zoo_gain(number)]


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


def authors(number: int, *tasks: str) -> list[float]:
    """Of a causal model: the scores of the best plain layer and of the default on each task."""
    of = rivals.results(zoo.CAUSAL[number])
    return [of.mean([task], setting) for task in tasks for setting in (of.best([task], "plain"), of.default)]
