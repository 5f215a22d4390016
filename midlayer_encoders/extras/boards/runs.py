"""The runs of a board: sweeps in folders, scores and costs of their layers, and the best layers for their costs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import LOCK, expand_home
from midlayer_encoders.frame.summaries import Curve, Gain, Summary, paired_gain, summary
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report.labels import amount
from midlayer_encoders.sweeping.compression import vector_bytes
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.validation import check_path

#: What an encoder costs.
Cost: TypeAlias = Literal["parameters", "milliseconds", "tokens", "bytes"]

#: The label of each cost on an axis.
COSTS: Mapping[Cost, str] = {
    "parameters": "parameters",
    "milliseconds": "milliseconds per text",
    "tokens": "tokens per text",
    "bytes": "bytes per vector",
}

#: The maximum of each cost; a cost that is missing is not limited.
Budget: TypeAlias = Mapping[Cost, float]

_SWEEP_FOLDERS = ("together", "mteb", "recipes", "embeddings")  # created before a sweep is finished
_MAX_DEPTH = 4  # of folders below the one that is named


@dataclass(frozen=True)
class Point:
    """The score of one layer of a run, in points, and its known costs."""

    run: str
    layer: int
    score: float
    costs: Mapping[Cost, float]

    def describe(self) -> str:
        """Return the score and the costs, in two lines."""
        return f"{self.run}, layer {self.layer}: {self.score:.1f} points\n{cost_text(self.costs)}".rstrip("\n")


@dataclass(frozen=True)
class Run:
    """The sweep of one model at one revision under one recipe.

    Attributes:
        result: of the sweep.
        home: folder of the sweep's page.
        recipe: of the sweep.
        name: unique among the runs of a board.
        shared: name and metric of the tasks that all runs of the board share.
        labels: of all tasks, by name.
        page: URL of the sweep's page; empty if there is none.
    """

    result: SweepResult
    home: Path
    recipe: str
    name: str = ""
    shared: frozenset[tuple[str, str]] = frozenset()
    labels: Mapping[str, str] = field(default_factory=dict)
    page: str = ""

    @property
    def identity(self) -> str:
        """Everything that determines its vectors and times."""
        notes, frame = self.result.notes, self.result.frame
        how = [notes.how.get(name) for name in ("weights", "dtype", "device", "longest text")]
        options = {**notes.options, **notes.vectors, "recipe": self.recipe, **notes.compression}
        return json.dumps([frame["model"][0], frame["revision"][0], how, options], sort_keys=True, default=str)

    @property
    def label(self) -> str:
        """Model, revision and recipe, without the defaults."""
        model, revision = self.result.frame["model"][0], self.result.frame["revision"][0]
        model = self.result.notes.name if model.startswith("local/") else model
        name = model if revision == "default" else f"{model}@{revision}"
        recipe = self.recipe.removeprefix(f"{PLAIN}, ")
        return name if recipe == PLAIN else f"{name} with {recipe}"

    @property
    def device(self) -> str:
        """The device on which the time was measured."""
        notes = self.result.notes
        return str(notes.timing.get("device") or notes.how.get("device", ""))

    @cached_property
    def tasks(self) -> set[tuple[str, str]]:
        """Name and metric of each task on which a layer has a finite score."""
        scores = self.result.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite())
        return set(scores.select("dataset", "name").unique().iter_rows())

    @property
    def scores(self) -> pl.DataFrame:
        """The tidy scores on the shared tasks, with their labels."""
        selected = pl.DataFrame(sorted(self.shared), schema=["dataset", "name"], orient="row")
        rows = selected.join(self.result.scores, on=["dataset", "name"], maintain_order="left")
        return rows.select(self.result.frame.columns).with_columns(pl.col("dataset").replace(self.labels))

    @property
    def resamples(self) -> pl.DataFrame:
        """The scores on resampled test items, with the labels of the tasks."""
        return self.result.resamples.with_columns(pl.col("dataset").replace(self.labels))

    @cached_property
    def summary(self) -> Summary:
        """The scores on the shared tasks by layer."""
        return summary(self.scores)

    @property
    def average(self) -> Curve:
        """The mean score by layer."""
        if self.summary.average is None:
            raise OptionError(
                f"`runs` must have a layer with a score on every shared task, but {self.home} has none: sweep it again."
            )
        return self.summary.average

    @property
    def gain(self) -> Gain:
        """The gain of the best layer over the last, with its interval."""
        return paired_gain(self.summary, self.resamples)

    @property
    def points(self) -> list[Point]:
        """One point per layer."""
        return self.points_of(self.average)

    @property
    def best(self) -> Point:
        """The point of the best layer."""
        return next(point for point in self.points if point.layer == self.average.best_layer)

    def points_of(self, curve: Curve) -> list[Point]:
        """Return a point for each layer of the average or of a task."""
        notes = self.result.notes
        tokens = [notes.tokens[task] for task, _ in self.shared if task in notes.tokens]
        mean_tokens = sum(tokens) / len(tokens) if tokens else None
        size = vector_bytes(notes.dimensions, notes.precision) or None
        points = []
        for layer, score in curve.points.items():
            values = (notes.parameters.get(layer), notes.milliseconds.get(layer), mean_tokens, size)
            costs = {cost: value for cost, value in zip(COSTS, values, strict=True) if value is not None}
            points.append(Point(self.name, layer, score, costs))
        return points


def pareto_front(points: Iterable[Point], cost: Cost) -> list[Point]:
    """Return the points that no other point beats at the same or a lower cost, cheapest first.

    Example:
        >>> points = [Point("m", k, score, {"bytes": 10 * k}) for k, score in ((1, 5.0), (2, 4.0), (3, 7.0))]
        >>> [point.layer for point in pareto_front(points, "bytes")]
        [1, 3]
    """
    front: list[Point] = []
    priced = [point for point in points if cost in point.costs]
    for point in sorted(priced, key=lambda point: (point.costs[cost], -point.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front


def fronts_by_run(runs: Sequence[Run]) -> dict[str, list[Cost]]:
    """Return, for each run, the costs for which its best layer is on the Pareto front of all layers of all runs."""
    points = [point for run in runs for point in run.points]
    members = {cost: {(point.run, point.layer) for point in pareto_front(points, cost)} for cost in COSTS}
    return {run.name: [cost for cost in COSTS if (run.name, run.best.layer) in members[cost]] for run in runs}


def best_within(points: Sequence[Point], budget: Budget) -> Point:
    """Return the point with the highest score within a budget; ties go to the point with fewer parameters.

    Raises:
        OptionError: if no point is within the budget; the message names the nearest one.
    """
    priced = [point for point in points if all(cost in point.costs for cost in budget)]
    affordable = [point for point in priced if all(point.costs[cost] <= limit for cost, limit in budget.items())]
    if affordable:
        return max(affordable, key=lambda point: (point.score, -point.costs.get("parameters", 0.0), -point.layer))
    if not priced:
        unknown = " and ".join(COSTS[cost] for cost in budget)
        raise OptionError(
            f"The budget must limit costs that the runs recorded, but no run recorded {unknown}: run the sweeps again "
            "with this version; they resume from their saved results."
        )
    nearest = min(
        priced, key=lambda point: (max(point.costs[cost] / limit for cost, limit in budget.items()), -point.score)
    )
    raise OptionError(
        f"The budget must allow at least one encoder, but none is within {cost_text(budget)}: the nearest is "
        f"{nearest.run} at layer {nearest.layer}, {nearest.score:.1f} points, {cost_text(nearest.costs)}."
    )


def cost_text(costs: Mapping[Cost, float]) -> str:
    """Return the known costs of an encoder as text.

    Example:
        >>> cost_text({"parameters": 22_713_216, "milliseconds": 1.25})
        '22.7M parameters, 1.25 ms per text'
    """
    units = {**COSTS, "milliseconds": "ms per text"}
    return ", ".join(f"{amount(value)} {units[cost]}" for cost, value in costs.items())


def load_runs(path: object, remarks: list[str]) -> list[Run]:
    """Return the sweeps in a folder or below it; those below that cannot be compared become remarks."""
    check_path("runs", path)
    folder = expand_home(Path(os.fspath(path)))  # type: ignore[call-overload]
    if not folder.is_dir():
        raise OptionError(
            f"`runs` must be folders of sweeps, but {folder} does not exist: pass the --out of `midlayer sweep`."
        )
    if _is_sweep(folder):
        return _runs_of_sweep(folder)
    runs: list[Run] = []
    errors = []
    for subfolder in _sweeps_below(folder):
        try:
            runs += _runs_of_sweep(subfolder)
        except OptionError as error:
            errors.append(str(error))
    if not runs:
        empty = f"`runs` must be folders of sweeps, or contain some, but {folder} does not: pass the --out of a sweep."
        raise OptionError(errors[0] if errors else empty)
    remarks += [f"Left out: {error}" for error in errors]
    return runs


def _sweeps_below(folder: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the folders of sweeps below a folder, finished or not."""
    for subfolder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        if _is_sweep(subfolder):
            yield subfolder
        elif depth < _MAX_DEPTH:
            yield from _sweeps_below(subfolder, depth + 1)


def _is_sweep(folder: Path) -> bool:
    """Return True if a sweep was started in a folder."""
    has_files = (folder / LOCK).exists() or (folder / "sweep.json").exists()
    return has_files or sum((folder / name).is_dir() for name in _SWEEP_FOLDERS) > 1


def _runs_of_sweep(folder: Path) -> list[Run]:
    """Return the sweep in a folder under each of its recipes, or raise if it cannot be compared."""
    if not (folder / "sweep.json").exists() or not (folder / "frame.parquet").exists():
        raise OptionError(
            f"`runs` must be finished, but the sweep in {folder} is not: run the same command again to resume it."
        )
    result = SweepResult.load(folder)
    parts = result.parts or {result.recipe: result}
    runs = [Run(part, folder.resolve(), name) for name, part in parts.items()]
    if not all(run.tasks for run in runs):
        raise OptionError(
            f"`runs` must have scores, but {folder} has none, only metrics or failed tasks: sweep it with --tasks."
        )
    return runs
