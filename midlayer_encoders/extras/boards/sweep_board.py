"""Compare the sweeps in folders on the tasks that all of them share: scores, costs, Pareto fronts and a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.errors import OptionError, pluralize
from midlayer_encoders.files import expand_home
from midlayer_encoders.frame.summaries import Summary
from midlayer_encoders.frame.tidy_result import TidyResult
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import amount, format_signed, interval_words, number
from midlayer_encoders.report.pages import block, figure_html, page_html, write_page
from midlayer_encoders.report.style import LIGHT
from midlayer_encoders.sweeping.best_layer import BestLayer, export_lines
from midlayer_encoders.sweeping.compression import vector_bytes
from midlayer_encoders.sweeping.sweep_result import SweepResult, task_labels
from midlayer_encoders.validation import check_list, check_number, check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

#: The label of each cost on an axis.
COSTS = {
    "parameters": "parameters",
    "milliseconds": "ms per text",
    "tokens": "tokens per text",
    "bytes": "bytes per vector",
}

_MAX_DEPTH = 4  # of folders below the one that is named
_CHART_TEXT = (
    "In points (score × 100). Each curve is a run, each point a layer, the disc its best one. A layer is on the Pareto "
    "front if no layer of any run scores more at the same cost or less. The best layers are chosen by the same scores: "
    "differences of a fraction of a point may be chance."
)


@dataclass(frozen=True)
class Point:
    """The score of one layer of a run, in points, and its known costs."""

    run: str
    layer: int
    score: float
    costs: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """The sweep of one model at one revision under one recipe.

    Attributes:
        name: unique among the runs of a board.
        recipe: name of the recipe.
        result: of the sweep; in a board with the shared tasks only, under their labels.
    """

    name: str
    recipe: str
    result: SweepResult

    @property
    def tasks(self) -> set[tuple[str, str]]:
        """Name and metric of each task on which a layer has a finite score."""
        return set(self.result.scores.filter(pl.col("value").is_finite()).select("dataset", "name").iter_rows())


@dataclass(frozen=True, repr=False)
class Board(TidyResult):
    """Many runs on their shared tasks, the best first.

    Attributes:
        runs: scores and costs of each run.
        tasks: labels of the shared tasks.
        left_out: tasks that are not shared, with the runs that lack each.
        budget: maximum ``parameters``, ``milliseconds`` (per text) and ``bytes`` (per vector).
        remarks: sentences about what was left out.
    """

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]
    budget: Mapping[str, float]
    remarks: tuple[str, ...]

    @cached_property
    def frame(self) -> pl.DataFrame:
        """The tidy scores of every run on the shared tasks, with the column ``run``."""
        return pl.concat(run.result.scores.with_columns(run=pl.lit(run.name)) for run in self.runs)

    def to_frame(self, task: str | None = None) -> pl.DataFrame:
        """Return a row for each layer of each run: ``run, layer, score, best`` and its costs.

        Args:
            task: one of :attr:`tasks`; the mean over all of them by default.
        """
        rows: list[dict[str, Any]] = []
        for run in self.runs:
            notes, average = run.result.notes, _scores(run, task).average
            tokens = fmean(notes.tokens.values()) if notes.tokens else None
            shared = {"tokens": tokens, "bytes": vector_bytes(notes.dimensions, notes.precision) or None}
            for layer, score in average.points.items() if average else ():
                costs = {"parameters": notes.parameters.get(layer), "milliseconds": notes.milliseconds.get(layer)}
                is_best = average is not None and layer == average.best_layer
                rows.append({"run": run.name, "layer": layer, "score": score, "best": is_best} | costs | shared)
        return pl.DataFrame(rows, schema_overrides=dict.fromkeys(COSTS, pl.Float64))

    def chosen(self) -> Point:
        """Return the layer with the highest score within the budget; if there is none, an error names the nearest."""
        return best_within(self.to_frame(), self.budget)

    def best(self, task: str | None = None) -> BestLayer:
        """Return the layer with the highest score within the budget, its recipe, score and gain over its run's last.

        Args:
            task: one of :attr:`tasks`; the mean over all of them by default.
        """
        point = best_within(self.to_frame(task), self.budget)
        run = self._run(point)
        gain = run.result.gain(point.layer, task=task)
        return BestLayer.of(_scores(run, task), point.layer, recipe=run.recipe, gain=gain, notes=run.result.notes)

    def encoder(self, task: str | None = None, **options: Any) -> LayerEncoder:
        """Return the encoder of the best layer within the budget, from the model's files, with the options of its run.

        Args:
            task: as in :meth:`best`.
            options: ``device`` and others of :class:`~midlayer_encoders.EncoderOptions` that do not contradict these.
        """
        return self.best(task).encoder(**options)

    def lines(self, point: Point) -> dict[str, str]:
        """Return the lines that create the encoder of a layer, by language."""
        return export_lines(self._run(point).result.notes, point.layer)

    def summary(self) -> str:
        """Return sentences: the encoder of :meth:`chosen`, its gain over the last layer, and its costs."""
        return self._describe(self.chosen(), self.budget)

    def __str__(self) -> str:
        return self.summary()

    def __repr__(self) -> str:
        return f"<Board: {[run.name for run in self.runs]}, tasks={list(self.tasks)}>"

    def table(self) -> list[list[str]]:
        """Return headings, and a row of texts for the best layer of each run."""
        table = self.to_frame().filter("best").drop("best")
        texts = [pl.col("score").map_elements(number, pl.String)]
        texts += [pl.col(cost).map_elements(amount, pl.String).fill_null("–") for cost in COSTS]
        headings = {name: COSTS.get(name, name) for name in table.columns}
        return [[*headings.values()], *map(list, table.with_columns(texts).cast(pl.String).rows())]

    def plot(self) -> Figure:
        """Return the score of each layer of each run against each cost, with the best layers and the Pareto front."""
        points = self.to_frame()
        costs = [cost for cost in COSTS if points[cost].count()]
        figure, panels = drawing.panel_grid(len(costs), size=(4.8, 3.2))
        for axes, cost in zip(panels, costs, strict=True):
            front = pareto_front(points, cost)
            drawing.amount_axis(axes, COSTS[cost], points[cost].drop_nulls().to_list())
            x, y = [*front[cost], axes.get_xlim()[1]], [*front["score"], front["score"][-1]]
            options: Any = {"alpha": 0.3, "linewidth": 4, "label": "Pareto front", "gid": "front"}
            axes.step(x, y, where="post", color=LIGHT["best"], **options)
            for style, run in enumerate(self.runs):
                rows = points.filter(run=run.name).drop_nulls(cost)
                best = rows.filter("best")
                if rows[cost].n_unique() > 1:  # all layers may have the same cost
                    drawing.draw_points(axes, rows[cost].to_list(), rows["score"].to_list(), style=style)
                x, y = best[cost].to_list(), best["score"].to_list()
                drawing.draw_points(axes, x, y, "disc", label=run.name, style=style)
            drawing.set_title(axes, f"Score by {COSTS[cost]}")
        drawing.value_axis(*panels)
        return drawing.finish(figure, y_label="points (score × 100)")

    def html(self) -> str:
        """Return the self-contained page."""
        notes, budget = list(self.remarks), self.budget
        points = self.to_frame()
        try:
            best = best_within(points, budget)
        except OptionError as error:  # the page shows all runs nevertheless
            notes, budget, best = [str(error), *notes], {}, best_within(points, {})
        has_costs = any(points[cost].count() for cost in COSTS)
        sections: dict[str, list[str]] = {
            "Score against cost": [figure_html(self.plot()), _CHART_TEXT] if has_costs else [],
            "Use this encoder": [block("code", self.lines(best))],
            "Runs": [block("text_table", self.table(), f"Best layer of each run on {', '.join(self.tasks)}")],
        }
        return page_html(
            f"Board of {pluralize(len(self.runs), 'run')}", [self._describe(best, budget)], sections, notes=notes
        )

    def to_html(self, path: Path | str) -> Path:
        """Write the page, and return its path."""
        return write_page(self.html(), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the board as JSON values."""
        runs = self.to_frame().filter("best").drop("best").to_dicts()
        return {name: getattr(self, name) for name in ("tasks", "left_out", "remarks", "budget")} | {"runs": runs}

    def _run(self, point: Point) -> Run:
        return next(run for run in self.runs if run.name == point.run)

    def _describe(self, best: Point, budget: Mapping[str, float]) -> str:
        """Return sentences: the recommended encoder, its gain over its last layer, and its costs."""
        subject = self.tasks[0] if len(self.tasks) == 1 else f"average over {len(self.tasks)} tasks"
        scope = f"within {cost_text(budget)}" if budget else f"of {pluralize(len(self.runs), 'run')}"
        text = f"{best.run} at layer {best.layer} scores {number(best.score)} on {subject}, the highest {scope}."
        gain = self._run(best).result.gain(best.layer)
        if gain.points:
            text += f" It has {format_signed(gain.points)} points over its last layer ({interval_words(gain)})."
        return f"{text} Its costs: {cost_text(best.costs)}." if best.costs else text


def board(
    runs: str | Path | Sequence[str | Path],
    *,
    max_parameters: float | None = None,
    max_milliseconds: float | None = None,
    max_bytes: float | None = None,
) -> Board:
    """Compare many sweeps on the tasks that all of them share.

    Args:
        runs: folders of sweeps (their ``out``), or folders that contain several. Each recipe of a sweep is a run.
            Sweeps that are damaged or have no scores are left out, which ``remarks`` reports.
        max_parameters: maximum number of parameters of the encoder that :meth:`Board.chosen` returns.
        max_milliseconds: its maximum time per text.
        max_bytes: its maximum size of a vector.

    Raises:
        OptionError: a folder holds no finished sweep, or the runs share no task.
    """
    limits = {"parameters": max_parameters, "milliseconds": max_milliseconds, "bytes": max_bytes}
    budget = {
        cost: check_number(f"max_{cost}", limit, minimum=1e-9) for cost, limit in limits.items() if limit is not None
    }
    loaded, remarks = _load_runs([runs] if isinstance(runs, str | Path) else check_list("runs", runs, "folders"))
    tasks = set().union(*(run.tasks for run in loaded))
    shared = set.intersection(*(run.tasks for run in loaded))
    labels = task_labels(sorted({name for name, _ in tasks}))
    if not shared:
        each = "; ".join(f"{run.name}: {', '.join(sorted(labels[task] for task, _ in run.tasks))}" for run in loaded)
        raise OptionError(
            f"`runs` must share a task, but they share none ({each}). Sweep them on the same tasks: stored embeddings "
            "are reused."
        )
    left_out = {
        labels[task[0]]: tuple(run.name for run in loaded if task not in run.tasks) for task in sorted(tasks - shared)
    }
    remarks = [*(f"Left out: {task}, not in {', '.join(names)}." for task, names in left_out.items()), *remarks]
    names = {name: labels[name] for name, _ in sorted(shared)}
    comparable = [_share_tasks(run, shared, names) for run in loaded]
    ranked = sorted(comparable, key=lambda run: run.result.best().score, reverse=True)
    return Board(tuple(ranked), tuple(names.values()), left_out, budget, tuple(remarks))


def pareto_front(points: pl.DataFrame, cost: str) -> pl.DataFrame:
    """Return the rows of :meth:`Board.to_frame` that no other row beats at the same or a lower cost, cheapest first.

    Example:
        >>> points = pl.DataFrame({"layer": [1, 2, 3], "score": [5.0, 4.0, 7.0], "bytes": [10, 20, 30]})
        >>> pareto_front(points, "bytes")["layer"].to_list()
        [1, 3]
    """
    by_cost = points.drop_nulls(cost).sort(cost, "score", descending=[False, True])
    return by_cost.filter(pl.col("score") > pl.col("score").cum_max().shift(1, fill_value=float("-inf")))


def best_within(points: pl.DataFrame, budget: Mapping[str, float]) -> Point:
    """Return the row with the highest score within a budget; ties go to the row with fewer parameters.

    Raises:
        OptionError: if no row is within the budget; the message names the nearest one.
    """
    priced = points.drop_nulls(list(budget)) if budget else points
    if priced.is_empty():
        unknown = " and ".join(COSTS[cost] for cost in budget)
        raise OptionError(
            f"The budget must limit costs that the runs recorded, but no run recorded {unknown}: run the sweeps again "
            "with this version; they resume from their saved results."
        )
    excess = pl.max_horizontal(pl.lit(1.0), *(pl.col(cost) / limit for cost, limit in budget.items()))
    ranked = priced.with_columns(excess=excess).sort("excess", -pl.col("score"), "parameters", "layer")
    row = ranked.row(0, named=True)
    costs = {cost: row[cost] for cost in COSTS if row[cost] is not None}
    if any(costs[cost] > limit for cost, limit in budget.items()):
        raise OptionError(
            f"The budget must allow at least one encoder, but none is within {cost_text(budget)}: the nearest is "
            f"{row['run']} at layer {row['layer']}, {row['score']:.1f} points, {cost_text(costs)}."
        )
    return Point(row["run"], row["layer"], row["score"], costs)


def cost_text(costs: Mapping[str, float]) -> str:
    """Return the known costs of an encoder as text.

    Example:
        >>> cost_text({"parameters": 22_713_216, "milliseconds": 1.25})
        '22.7M parameters, 1.25 ms per text'
    """
    return ", ".join(f"{amount(value)} {COSTS[cost]}" for cost, value in costs.items())


def _load_runs(folders: Sequence[Any]) -> tuple[list[Run], list[str]]:
    """Return the sweeps in folders or below them, each once, and remarks on the ones that cannot be compared."""
    runs: dict[str, Run] = {}
    remarks: list[str] = []
    for home in dict.fromkeys(home for folder in folders for home in _find_sweeps(folder)):
        try:
            result = SweepResult.load(home)
        except OptionError as error:
            remarks.append(f"Left out: {error}")
            continue
        for recipe, part in (result.parts or {result.recipe: result}).items():
            model, revision = part.frame["model"][0], part.frame["revision"][0]
            name = part.notes.name if model.startswith("local/") else model
            name += "" if revision == "default" else f"@{revision}"
            name += "" if recipe == PLAIN else f" with {recipe.removeprefix(f'{PLAIN}, ')}"
            run = Run(f"{name} ({home})" if name in runs else name, recipe, part)
            if run.tasks:
                runs[run.name] = run
            else:
                remarks.append(f"Left out: {home} has no scores, only metrics or failed tasks. Sweep it with --tasks.")
    if not runs:
        raise OptionError(f"`runs` must hold sweeps with scores, but got none. {' '.join(remarks)}")
    return list(runs.values()), remarks


def _find_sweeps(path: Any) -> list[Path]:
    """Return the finished sweeps in a folder or at most four folders below it, without the parts of a sweep."""
    check_path("runs", path)
    folder = expand_home(Path(path)).resolve()
    homes: list[Path] = []
    for depth in range(_MAX_DEPTH + 1):
        files = sorted(folder.glob("[!.]*/" * depth + "sweep.json"))
        homes += [file.parent for file in files if not any(home in file.parents for home in homes)]
    if not homes:
        raise OptionError(
            f"`runs` must be folders of finished sweeps, but {folder} holds none: pass the --out of `midlayer sweep`. "
            "The same command again resumes an unfinished one."
        )
    return sorted(homes)


def _share_tasks(run: Run, shared: set[tuple[str, str]], labels: Mapping[str, str]) -> Run:
    """Return a run with its scores and tokens on the shared tasks, under their labels."""
    tasks = pl.DataFrame(sorted(shared), schema=["dataset", "name"], orient="row")
    label = pl.col("dataset").replace(labels)
    result = run.result
    rows = tasks.join(result.scores, on=["dataset", "name"], maintain_order="left").select(result.frame.columns)
    tokens = {labels[task]: result.notes.tokens[task] for task in labels if task in result.notes.tokens}
    notes = replace(result.notes, tokens=tokens)
    resamples = result.resamples.with_columns(label)
    return replace(run, result=replace(result, frame=rows.with_columns(label), resamples=resamples, notes=notes))


def _scores(run: Run, task: str | None) -> Summary:
    return run.result.curves if task is None else run.result.curves.only(task)
