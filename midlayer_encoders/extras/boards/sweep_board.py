"""Compare the sweeps in folders on the tasks that all of them share: scores, costs, Pareto fronts and a page."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import LOCK, expand_home
from midlayer_encoders.frame.summaries import Gain, Summary, average_baseline, paired_gain, summary
from midlayer_encoders.frame.tidy_result import TidyResult
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import amount, interval_words, number, signed, with_interval
from midlayer_encoders.report.layer_charts import draw_average_levels
from midlayer_encoders.report.pages import block, figure_html, page_html, write_page
from midlayer_encoders.report.style import LIGHT
from midlayer_encoders.sweeping.best_layer import BestLayer, export_lines
from midlayer_encoders.sweeping.compression import vector_bytes
from midlayer_encoders.sweeping.sweep_result import SweepResult, task_labels
from midlayer_encoders.validation import check_list, check_number, check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

#: What an encoder costs.
Cost: TypeAlias = Literal["parameters", "milliseconds", "tokens", "bytes"]

#: The label of each cost on an axis.
COSTS: Mapping[Cost, str] = {
    "parameters": "parameters",
    "milliseconds": "ms per text",
    "tokens": "tokens per text",
    "bytes": "bytes per vector",
}

#: The maximum of each cost; a cost that is missing is not limited.
Budget: TypeAlias = Mapping[Cost, float]

_MAX_DEPTH = 4  # of folders below the one that is named


@dataclass(frozen=True)
class Point:
    """The score of one layer of a run, in points, and its known costs."""

    run: str
    layer: int
    score: float
    costs: Mapping[Cost, float]


@dataclass(frozen=True)
class Run:
    """The sweep of one model at one revision under one recipe.

    Attributes:
        result: of the sweep; in a board with the shared tasks only, under their labels.
        home: folder of the sweep.
        recipe: of the sweep.
        name: unique among the runs of a board.
    """

    result: SweepResult
    home: Path
    recipe: str
    name: str = ""

    @property
    def label(self) -> str:
        """Model, revision and recipe, without the defaults."""
        model, revision = self.result.frame["model"][0], self.result.frame["revision"][0]
        model = self.result.notes.name if model.startswith("local/") else model
        name = model if revision == "default" else f"{model}@{revision}"
        recipe = self.recipe.removeprefix(f"{PLAIN}, ")
        return name if recipe == PLAIN else f"{name} with {recipe}"

    @cached_property
    def tasks(self) -> set[tuple[str, str]]:
        """Name and metric of each task on which a layer has a finite score."""
        return set(self.result.scores.filter(pl.col("value").is_finite()).select("dataset", "name").iter_rows())

    @cached_property
    def summary(self) -> Summary:
        """The scores by layer."""
        scores = summary(self.result.scores)
        if scores.average is None:
            raise OptionError(
                f"`runs` must have a layer with a score on every shared task, but {self.home} has none: sweep it again."
            )
        return scores

    @property
    def gain(self) -> Gain:
        """The gain of the best layer over the last, with its interval."""
        return paired_gain(self.summary, self.result.resamples)

    @property
    def best(self) -> Point:
        """The point of the best layer."""
        return best_within(self.points, {})

    @property
    def points(self) -> list[Point]:
        """One point per layer."""
        return self.points_of(None)

    def points_of(self, task: str | None) -> list[Point]:
        """Return a point for each layer: its score on a task, or on average, and its costs."""
        notes = self.result.notes
        tokens = sum(notes.tokens.values()) / len(notes.tokens) if notes.tokens else None
        size = vector_bytes(notes.dimensions, notes.precision) or None
        curve = (self.summary if task is None else self.summary.only(task)).average
        points = []
        for layer, score in curve.points.items() if curve else ():
            values = (notes.parameters.get(layer), notes.milliseconds.get(layer), tokens, size)
            costs: Any = {cost: value for cost, value in zip(COSTS, values, strict=True) if value is not None}
            points.append(Point(self.name, layer, score, costs))
        return points


@dataclass(frozen=True, repr=False)
class Board(TidyResult):
    """Many runs on their shared tasks, the best first.

    Attributes:
        runs: scores and costs of each run.
        tasks: labels of the shared tasks.
        left_out: tasks that are not shared, with the runs that lack each.
        budget: maximum ``parameters``, ``milliseconds`` (per text) and ``bytes`` (per vector).
        remarks: sentences about what was left out, and what cannot be compared.
    """

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]
    budget: Budget
    remarks: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Board: {[run.name for run in self.runs]}, tasks={list(self.tasks)}>"

    @cached_property
    def frame(self) -> pl.DataFrame:
        """The tidy scores of every run on the shared tasks, with the column ``run``."""
        return pl.concat(run.result.scores.with_columns(run=pl.lit(run.name)) for run in self.runs)

    @property
    def points(self) -> list[Point]:
        """Every layer of every run."""
        return [point for run in self.runs for point in run.points]

    def chosen(self) -> Point:
        """Return the layer with the highest score within the budget; if there is none, an error names the nearest."""
        return best_within(self.points, self.budget)

    def best(self, task: str | None = None) -> BestLayer:
        """Return the layer with the highest score within the budget, its recipe, score and gain over its run's last.

        Args:
            task: one of :attr:`tasks`; the mean over all of them by default.
        """
        point = best_within([point for run in self.runs for point in run.points_of(task)], self.budget)
        run = self._run(point)
        scores = run.summary if task is None else run.summary.only(task)
        gain = paired_gain(scores, run.result.resamples, layer=point.layer)
        return BestLayer.of(scores, point.layer, recipe=run.recipe, gain=gain, notes=run.result.notes)

    def encoder(self, task: str | None = None, **options: Any) -> LayerEncoder:
        """Return the encoder of the best layer within the budget, from the model's files, with the options of its run.

        Args:
            task: as in :meth:`best`.
            options: ``device`` and others of :class:`~midlayer_encoders.EncoderOptions` that do not contradict these.
        """
        return self.best(task).encoder(**options)

    def summary(self) -> str:
        """Return sentences: baselines that score more, the encoder of :meth:`chosen`, its gain and its costs."""
        return " ".join(self._verdict(self.chosen(), self.budget))

    def __str__(self) -> str:
        return self.summary()

    def lines(self, point: Point) -> dict[str, str]:
        """Return the lines that create the encoder of a layer, by language."""
        return export_lines(self._run(point).result.notes, point.layer)

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each layer of each run: ``run, folder, layer, score, best`` and its costs."""
        best = {run.name: run.best.layer for run in self.runs}
        rows = [
            {
                "run": point.run,
                "folder": self._run(point).home.name,
                "layer": point.layer,
                "score": point.score,
                "best": point.layer == best[point.run],
                **{cost: point.costs.get(cost) for cost in COSTS},
            }
            for point in self.points
        ]
        return pl.DataFrame(rows, schema_overrides=dict.fromkeys(COSTS, pl.Float64))

    def plot(self) -> Figure:
        """Return the score of each layer of each run against each cost, with the best layers and the Pareto front."""
        points = self.points
        costs = [cost for cost in COSTS if any(cost in point.costs for point in points)]
        figure, panels = drawing.panel_grid(len(costs), size=(4.8, 3.2))
        for axes, cost in zip(panels, costs, strict=True):
            front = pareto_front(points, cost)
            drawing.amount_axis(axes, COSTS[cost], [point.costs[cost] for point in points if cost in point.costs])
            x = [*(point.costs[cost] for point in front), axes.get_xlim()[1]]
            y = [*(point.score for point in front), front[-1].score]
            options: Any = {"alpha": 0.3, "linewidth": 4, "label": "Pareto front", "gid": "front"}
            axes.step(x, y, where="post", color=LIGHT["best"], **options)
            draw_average_levels(axes, self.runs[0].summary, self._baselines)
            for style, run in enumerate(self.runs):
                for kind, layers in {"line": run.points, "disc": [run.best]}.items():
                    priced = [point for point in layers if cost in point.costs]
                    x, y = [point.costs[cost] for point in priced], [point.score for point in priced]
                    if kind == "disc" or len(set(x)) > 1:  # all layers may have the same cost
                        drawing.draw_points(axes, x, y, kind, label=run.name, style=style)  # type: ignore[arg-type]
            drawing.set_title(axes, f"Score by {COSTS[cost]}")
        drawing.value_axis(*panels)
        return drawing.finish(figure, y_label="points (score × 100)")

    def html(self) -> str:
        """Return the self-contained page."""
        notes, budget = list(self.remarks), self.budget
        try:
            best = self.chosen()
        except OptionError as error:  # the page shows all runs nevertheless
            notes, budget, best = [str(error), *notes], {}, best_within(self.points, {})
        text = (
            f"Mean of {', '.join(self.tasks)}, in points (score × 100). Each curve is a run, each point a layer, the "
            "disc its best one. A layer is on the Pareto front if no layer of any run scores more at the same cost or "
            "less. The best layers are chosen by the same scores: differences of a fraction of a point may be chance."
        )
        sections: dict[str, list[str]] = {
            "Score against cost": [figure_html(self.plot()), text] if any(run.best.costs for run in self.runs) else [],
            "Use this encoder": [block("code", self.lines(best))],
            "Runs": [block("text_table", self._table(), "Best layer of each run")],
        }
        title = f"Board of {len(self.runs)} run{'' if len(self.runs) == 1 else 's'}"
        return page_html(title, [" ".join(self._verdict(best, budget))], sections, notes=notes)

    def to_html(self, path: Path | str) -> Path:
        """Write the page, and return its path."""
        return write_page(self.html(), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the board as JSON values."""
        runs = [
            {
                "folder": run.home.name,
                **asdict(run.best),
                "lines": self.lines(run.best),
                "gain": run.gain.points,
                "interval": run.gain.interval,
            }
            for run in self.runs
        ]
        return {name: getattr(self, name) for name in ("tasks", "left_out", "remarks", "budget")} | {"runs": runs}

    def _run(self, point: Point) -> Run:
        return next(run for run in self.runs if run.name == point.run)

    @property
    def _baselines(self) -> dict[str, dict[str, float]]:
        """Each baseline that has a score on every shared task, from the first run that has it."""
        baselines: dict[str, dict[str, float]] = {}
        for run in self.runs:
            for name, scores in run.result.notes.baselines.items():
                if set(scores) >= set(self.tasks):
                    baselines.setdefault(name, dict(scores))
        return baselines

    def _verdict(self, best: Point, budget: Budget) -> list[str]:
        """Return sentences: baselines that score more, the recommended encoder, its gain over another and its costs."""
        subject = self.tasks[0] if len(self.tasks) == 1 else f"average over {len(self.tasks)} tasks"
        scope = f"within {cost_text(budget)}" if budget else f"of {len(self.runs)} runs"
        sentences = [
            f"{name} scores {number(mean)} on {subject}, {number(mean - best.score)} points more than the best encoder."
            for name, scores in self._baselines.items()
            if (mean := average_baseline(self.runs[0].summary, scores) or 0) - best.score >= 0.05
        ]
        sentences.append(
            f"{best.run} at layer {best.layer} scores {number(best.score)} on {subject}, the highest {scope}."
        )
        run, *others = sorted(self.runs, key=lambda run: run.name != best.run)
        compared = {"its last layer": (run, max(run.summary.average.points))}  # type: ignore[union-attr]
        if others and not budget:
            compared[f"{others[0].name} at layer {others[0].best.layer}"] = others[0], others[0].best.layer
        for name, (other, layer) in compared.items():
            pair = other.summary, other.result.resamples
            if (other.name, layer) != (run.name, best.layer):
                gain = paired_gain(run.summary, run.result.resamples, layer=best.layer, over=layer, other=pair)
                sentences.append(f"It has {signed(gain.points)} points over {name} ({interval_words(gain)}).")
        return [*sentences, f"Its costs: {cost_text(best.costs)}."] if best.costs else sentences

    def _table(self) -> list[list[str]]:
        """Return headings, a row for the best layer of each run, and one for each baseline."""
        rows = [["Run", "Folder", "Layer", "Score", "Over its last layer", *COSTS.values()]]
        for run in self.runs:
            best, gain = run.best, run.gain
            layer = f"{best.layer} of {run.summary.num_layers}"
            over = with_interval(gain.points, gain if gain.points else None)
            rows.append([run.name, run.home.name, layer, number(best.score), over, *cost_cells(best)])
        for name, scores in self._baselines.items():
            mean = average_baseline(self.runs[0].summary, scores)
            rows.append([name, "", "", number(mean or 0), *[""] * (1 + len(COSTS))])
        return rows


def board(
    runs: str | Path | Sequence[str | Path],
    *,
    max_parameters: float | None = None,
    max_milliseconds: float | None = None,
    max_bytes: float | None = None,
) -> Board:
    """Compare many sweeps on the tasks that all of them share.

    Args:
        runs: folders of sweeps (their ``out``), or folders that contain several. Each recipe of a sweep is a run. In a
            folder that contains several, sweeps that cannot be compared are left out, which ``remarks`` reports.
        max_parameters: maximum number of parameters of the encoder that :meth:`Board.chosen` returns.
        max_milliseconds: its maximum time per text.
        max_bytes: its maximum size of a vector.

    Raises:
        OptionError: a folder holds no finished sweep, or the runs share no task.
    """
    limits = {"parameters": max_parameters, "milliseconds": max_milliseconds, "bytes": max_bytes}
    budget: Any = {cost: check_number(f"max_{cost}", limit) for cost, limit in limits.items() if limit is not None}
    for cost, limit in budget.items():
        if limit == 0:
            raise OptionError(f"`max_{cost}` must be above 0, but got 0.")
    folders = [runs] if isinstance(runs, str | Path) else check_list("runs", runs, "folders")
    remarks: list[str] = []
    loaded = [run for folder in folders for run in _load_runs(folder, remarks)]
    named = _name_runs(list({(run.home, run.recipe): run for run in loaded}.values()))  # one may be passed twice
    tasks = set().union(*(run.tasks for run in named))
    labels = task_labels(sorted({name for name, _ in tasks}))
    shared = set.intersection(*(run.tasks for run in named))
    if not shared:
        each = "; ".join(f"{run.name}: {', '.join(sorted(labels[task] for task, _ in run.tasks))}" for run in named)
        raise OptionError(
            f"`runs` must share a task, but they share none ({each}). Sweep them on the same tasks: stored embeddings "
            "are reused."
        )
    ranked = sorted((_share_tasks(run, shared, labels) for run in named), key=lambda run: -run.best.score)
    left_out = {
        labels[task[0]]: tuple(run.name for run in named if task not in run.tasks) for task in sorted(tasks - shared)
    }
    by_runs: dict[tuple[str, ...], list[str]] = {}
    for task, lacking in left_out.items():
        by_runs.setdefault(lacking, []).append(task)
    omitted = [f"Left out: {', '.join(tasks)}, not in {', '.join(lacking)}." for lacking, tasks in by_runs.items()]
    names = tuple(task.name for task in ranked[0].summary.tasks)
    return Board(tuple(ranked), names, left_out, budget, (*omitted, *remarks, *_cost_remarks(ranked)))


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
    return ", ".join(f"{amount(value)} {COSTS[cost]}" for cost, value in costs.items())


def cost_cells(point: Point) -> list[str]:
    """Return each cost of a layer as text, a dash if it is unknown."""
    return [amount(point.costs[cost]) if cost in point.costs else "–" for cost in COSTS]


def _load_runs(path: object, remarks: list[str]) -> list[Run]:
    """Return the sweeps in a folder or below it; those below that cannot be compared become remarks."""
    check_path("runs", path)
    folder = expand_home(Path(os.fspath(path))).resolve()  # type: ignore[call-overload]
    if not folder.is_dir():
        raise OptionError(
            f"`runs` must be folders of sweeps, but {folder} does not exist: pass the --out of `midlayer sweep`."
        )
    runs: list[Run] = []
    errors: list[str] = []
    for home in _sweep_folders(folder):
        try:
            runs += _runs_of_sweep(home)
        except OptionError as error:
            errors.append(str(error))
    if not runs:
        empty = f"`runs` must be folders of sweeps, or contain some, but {folder} does not: pass the --out of a sweep."
        raise OptionError(errors[0] if errors else empty)
    remarks += [f"Left out: {error}" for error in errors]
    return runs


def _sweep_folders(folder: Path, depth: int = 0) -> Iterator[Path]:
    """Yield the folder itself or the folders below it in which a sweep was started."""
    if (folder / LOCK).exists() or (folder / "sweep.json").exists():
        yield folder
    elif depth < _MAX_DEPTH:
        for subfolder in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _sweep_folders(subfolder, depth + 1)


def _runs_of_sweep(folder: Path) -> list[Run]:
    """Return the sweep in a folder under each of its recipes, or raise if it cannot be compared."""
    if not (folder / "sweep.json").exists():
        raise OptionError(
            f"`runs` must be finished, but the sweep in {folder} is not: run the same command again to resume it."
        )
    result = SweepResult.load(folder)
    runs = [Run(part, folder, name) for name, part in (result.parts or {result.recipe: result}).items()]
    if not all(run.tasks for run in runs):
        raise OptionError(
            f"`runs` must have scores, but {folder} has none, only metrics or failed tasks: sweep it with --tasks."
        )
    return runs


def _name_runs(runs: Sequence[Run]) -> list[Run]:
    """Name each run by its label, with its folder's name, or path, if that is needed to distinguish them."""
    names = [run.label for run in runs]
    for places in ([run.home.name for run in runs], [str(run.home) for run in runs]):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else f"{run.label} ({place})"
            for name, run, place in zip(names, runs, places, strict=True)
        ]
    return [replace(run, name=name) for name, run in zip(names, runs, strict=True)]


def _share_tasks(run: Run, shared: set[tuple[str, str]], labels: Mapping[str, str]) -> Run:
    """Return a run with its scores, tokens and baselines on the shared tasks, under their labels."""
    tasks = pl.DataFrame(sorted(shared), schema=["dataset", "name"], orient="row")
    rename = pl.col("dataset").replace(labels)
    rows = tasks.join(run.result.scores, on=["dataset", "name"], maintain_order="left")
    notes = run.result.notes
    names = [task for task, _ in sorted(shared)]
    tokens = {labels[task]: notes.tokens[task] for task in names if task in notes.tokens}
    baselines = {
        name: {labels[task]: scores[task] for task in names if task in scores}
        for name, scores in notes.baselines.items()
    }
    result = replace(
        run.result,
        frame=rows.select(run.result.frame.columns).with_columns(rename),
        resamples=run.result.resamples.with_columns(rename),
        notes=replace(notes, tokens=tokens, baselines=baselines),
    )
    return replace(run, result=result)


def _cost_remarks(runs: Sequence[Run]) -> list[str]:
    """Return which costs cannot be compared."""
    notes = [run.result.notes for run in runs if run.result.notes.milliseconds]
    devices = list(dict.fromkeys(str(note.timing.get("device") or note.how.get("device", "")) for note in notes))
    remarks = []
    if len(devices) > 1:
        remarks.append(f"Times are from different devices ({'; '.join(devices)}): compare them within one.")
    for cost, name in COSTS.items():
        unknown = [run.name for run in runs if cost not in run.best.costs]
        if 0 < len(unknown) < len(runs):
            remarks.append(f"No {name} recorded for {', '.join(unknown)}: repeat the sweep to add them.")
    return remarks
