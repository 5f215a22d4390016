"""Read many sweeps from their folders and compare them on the tasks that all of them share."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack
from urllib.parse import quote

import polars as pl

from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.boards.board_page import board_html, board_verdict, plot_board
from midlayer_encoders.extras.boards.runs import (
    COSTS,
    Budget,
    Point,
    Run,
    best_within,
    cost_text,
    fronts_by_run,
    load_runs,
)
from midlayer_encoders.frame.summaries import Gain, paired_gain
from midlayer_encoders.frame.tidy_result import TidyResult
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.sweeping.best_layer import BestLayer, export_lines
from midlayer_encoders.sweeping.sweep_result import SweepResult, task_labels
from midlayer_encoders.validation import check_list, check_number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


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
        return pl.concat(run.scores.with_columns(run=pl.lit(run.name)) for run in self.runs)

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
        summaries = {run.name: run.summary if task is None else run.summary.only(task) for run in self.runs}
        curves = {run.name: summaries[run.name].average or run.average for run in self.runs}
        point = best_within([point for run in self.runs for point in run.points_of(curves[run.name])], self.budget)
        scores, run = summaries[point.run], self._run(point)
        gain = paired_gain(scores, run.resamples, layer=point.layer)
        return BestLayer.of(scores, point.layer, recipe=run.recipe, gain=gain, notes=run.result.notes)

    def encoder(self, task: str | None = None, **options: Unpack[EncoderKeywords]) -> LayerEncoder:
        """Return the encoder of the best layer within the budget, from the model's files, with the options of its run.

        Args:
            task: as in :meth:`best`.
            options: ``device`` and others of :class:`~midlayer_encoders.EncoderOptions` that do not contradict these.
        """
        return self.best(task).encoder(**options)

    def summary(self) -> str:
        """Return sentences about the encoder of :meth:`chosen`: its score, its gains and its costs."""
        best = self.chosen()
        verdict = board_verdict(self.runs, best, gains=self._gains(best), budget=self.budget, baselines=self._baselines)
        return " ".join([*verdict, f"Its costs: {cost_text(best.costs)}."] if best.costs else verdict)

    def __str__(self) -> str:
        return self.summary()

    def _gains(self, best: Point) -> dict[str, Gain]:
        """Return the gain of a layer over the last one of its run, and over the best layer of the best other run."""
        run, *others = sorted(self.runs, key=lambda run: run.name != best.run)
        compared = {"its last layer": (run, run.average.last_layer)} if best.layer != run.average.last_layer else {}
        if others and not self.budget:
            compared[f"{others[0].name} at layer {others[0].best.layer}"] = others[0], others[0].best.layer
        return {
            name: paired_gain(
                run.summary, run.resamples, layer=best.layer, over=layer, other=(other.summary, other.resamples)
            )
            for name, (other, layer) in compared.items()
        }

    def _run(self, point: Point) -> Run:
        return next(run for run in self.runs if run.name == point.run)

    def lines(self, point: Point) -> dict[str, str]:
        """Return the lines that create the encoder of a layer, by language."""
        return export_lines(self._run(point).result.notes, point.layer)

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each layer of each run: ``run, folder, layer, score, best`` and its costs."""
        rows = [
            {
                "run": run.name,
                "folder": run.home.name,
                "layer": point.layer,
                "score": point.score,
                "best": point.layer == run.best.layer,
                **{cost: point.costs.get(cost) for cost in COSTS},
            }
            for run in self.runs
            for point in run.points
        ]
        return pl.DataFrame(rows, schema_overrides=dict.fromkeys(COSTS, pl.Float64))

    def plot(self) -> Figure:
        """Return the figure of scores against costs."""
        return plot_board(self.runs, self._baselines, self.budget)

    def html(self, folder: Path | str = ".") -> str:
        """Return the self-contained page; its links to the pages of the sweeps are relative to ``folder``."""
        runs = [replace(run, page=_link(run.home, Path(folder))) for run in self.runs]
        remarks, budget = list(self.remarks), self.budget
        try:
            best = self.chosen()
        except OptionError as error:  # the page shows all runs nevertheless
            remarks, budget = [str(error), *remarks], {}
            best = best_within(self.points, {})
        return board_html(
            runs,
            best,
            lines=self.lines(best),
            gains=self._gains(best),
            budget=budget,
            baselines=self._baselines,
            notes=remarks,
            how=self._how(),
        )

    def to_html(self, path: Path | str) -> Path:
        """Write the page, and the missing pages of sweeps, and return its path."""
        for run in self.runs:
            if not (run.home / "report.html").exists():
                with suppress(OSError):  # a read-only folder: the run has no link then
                    SweepResult.load(run.home).to_html()
        return write_page(self.html(Path(path).parent), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the board as JSON values."""
        fronts = fronts_by_run(self.runs)
        runs = [
            {
                "folder": run.home.name,
                **asdict(run.best),
                "lines": self.lines(run.best),
                "gain": run.average.gain,
                "interval": run.gain.interval,
                "fronts": fronts[run.name],
            }
            for run in self.runs
        ]
        shared = {name: getattr(self, name) for name in ("tasks", "left_out", "remarks", "budget")}
        return {**shared, "runs": runs}

    @property
    def _baselines(self) -> dict[str, dict[str, float]]:
        """Return each baseline that has a score on every shared task, from the first run that has it."""
        baselines: dict[str, dict[str, float]] = {}
        for run in self.runs:
            for name, scores in run.result.notes.baselines.items():
                by_label = {run.labels.get(task, task): score for task, score in scores.items()}
                baselines.setdefault(name, {task: by_label[task] for task in self.tasks if task in by_label})
        return {name: scores for name, scores in baselines.items() if len(scores) == len(self.tasks)}

    def _how(self) -> dict[str, str]:
        runs_by_timing: dict[str, list[str]] = {}
        for run in self.runs:
            runs_by_timing.setdefault(run.result.notes.how.get("time per text", "not noted"), []).append(run.name)
        how = {
            "Tasks": ", ".join(self.tasks),
            "Score": "mean of the tasks' main scores, for layers with a score on all of them",
            "Best layer": "chosen by the same scores: differences of a fraction of a point may be chance",
            "Over its last layer": "with the 95 % interval of a paired bootstrap over test items",
            "Tokens": "of a text with its prompt, mean over the texts of each task, then over the tasks",
            "Bytes": "of a vector, float32 unless its run says int8 or binary",
        }
        for timing, names in runs_by_timing.items():
            suffix = f", {', '.join(names)}" if len(runs_by_timing) > 1 else ""
            how[f"Time per text{suffix}"] = timing
        return how


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
        OptionError: a folder holds no finished sweep, two runs are the same, or the runs share no task.
    """
    limits = {"parameters": max_parameters, "milliseconds": max_milliseconds, "bytes": max_bytes}
    budget: Any = {cost: check_number(f"max_{cost}", limit) for cost, limit in limits.items() if limit is not None}
    for cost, limit in budget.items():
        if limit == 0:
            raise OptionError(f"`max_{cost}` must be above 0, but got 0.")
    folders = [runs] if isinstance(runs, str | Path) else check_list("runs", runs, "folders")
    remarks: list[str] = []
    loaded = [run for folder in folders for run in load_runs(folder, remarks)]
    distinct = list({(run.home, run.recipe): run for run in loaded}.values())  # a folder may be named twice
    _check_distinct(distinct)
    tasks = set().union(*(run.tasks for run in distinct))
    labels = task_labels(sorted({name for name, _ in tasks}))
    named = [replace(run, name=name, labels=labels) for name, run in zip(_names(distinct), distinct, strict=True)]
    shared = _shared_tasks(named)
    ranked = sorted((replace(run, shared=shared) for run in named), key=lambda run: -run.best.score)
    left_out = {
        labels[task[0]]: tuple(run.name for run in named if task not in run.tasks) for task in sorted(tasks - shared)
    }
    task_names = tuple(task.name for task in ranked[0].summary.tasks)
    return Board(
        tuple(ranked), task_names, left_out, budget, (*_task_remarks(left_out), *remarks, *_cost_remarks(ranked))
    )


def _link(home: Path, folder: Path) -> str:
    """Return the relative link to a sweep's page; empty if there is none. The prefix rules out a URL scheme."""
    if not (home / "report.html").exists():
        return ""
    try:
        path = os.path.relpath(home / "report.html", folder.resolve())
    except ValueError:  # another drive on Windows
        return (home / "report.html").as_uri()
    return "./" + quote(path.replace(os.sep, "/"), errors="surrogateescape")


def _check_distinct(runs: Sequence[Run]) -> None:
    by_identity: dict[str, Run] = {}
    for run in runs:
        other = by_identity.setdefault(run.identity, run)
        if other is not run:
            raise OptionError(
                f"`runs` must be distinct, but {other.home} and {run.home} both hold {run.label} with the same "
                "weights and options. Pass only one of them; a recipe of a sweep is in its folder recipes/NAME."
            )


def _shared_tasks(runs: Sequence[Run]) -> frozenset[tuple[str, str]]:
    """Return the tasks on which all runs have scores by the same metric."""
    shared = set.intersection(*(run.tasks for run in runs))
    if not shared:
        each = "; ".join(f"{run.name}: {', '.join(sorted(run.labels[task] for task, _ in run.tasks))}" for run in runs)
        raise OptionError(
            f"`runs` must share a task, but they share none ({each}). Sweep them on the same tasks: stored embeddings "
            "are reused."
        )
    return frozenset(shared)


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the label of each run, with its folder's name, or path, if that is needed to distinguish them."""
    names = [run.label for run in runs]
    for places in ([run.home.name for run in runs], [str(run.home) for run in runs]):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else f"{run.label} ({place})"
            for name, run, place in zip(names, runs, places, strict=True)
        ]
    return names


def _task_remarks(left_out: Mapping[str, Sequence[str]]) -> list[str]:
    """Return which tasks are left out, grouped by the runs that lack them."""
    tasks_by_runs: dict[tuple[str, ...], list[str]] = {}
    for task, runs in left_out.items():
        tasks_by_runs.setdefault(tuple(runs), []).append(task)
    return [f"Left out: {', '.join(tasks)}, not in {', '.join(runs)}." for runs, tasks in tasks_by_runs.items()]


def _cost_remarks(runs: Sequence[Run]) -> list[str]:
    """Return which costs cannot be compared."""
    remarks = []
    devices = list(dict.fromkeys(run.device for run in runs if run.result.notes.milliseconds))
    if len(devices) > 1:
        remarks.append(f"Times are from different devices ({'; '.join(devices)}): compare them within one.")
    for cost, name in COSTS.items():
        unknown = [run.name for run in runs if cost not in run.best.costs]
        if 0 < len(unknown) < len(runs):
            remarks.append(f"No {name} recorded for {', '.join(unknown)}: repeat the sweep to add them.")
    return remarks
