"""Read many sweeps from their folders and compare them on the tasks that all of them share."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
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
from midlayer_encoders.files import LOCK, expand_home
from midlayer_encoders.frame.pareto import COSTS, Budget, Point, Run, best_within, cost_text, fronts_by_run
from midlayer_encoders.frame.summaries import Gain, paired_gain, summary
from midlayer_encoders.frame.tidy_result import TidyResult
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.sweeping.best_layer import BestLayer, export_lines
from midlayer_encoders.sweeping.compression import vector_bytes
from midlayer_encoders.sweeping.sweep_result import SweepResult, task_labels
from midlayer_encoders.validation import check_list, check_number, check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

_SWEEP_FOLDERS = ("together", "mteb", "recipes", "embeddings")  # created before a sweep is finished
_MAX_DEPTH = 4  # of folders below the one that is named


@dataclass(frozen=True)
class _Sweep:
    """A sweep under one recipe, and the folder of its page."""

    result: SweepResult
    home: Path
    recipe: str

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

    @cached_property
    def tasks(self) -> set[tuple[str, str]]:
        """Name and metric of each task on which a layer has a finite score."""
        scores = self.result.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite())
        return set(scores.select("dataset", "name").unique().iter_rows())

    def run(self, name: str, tasks: set[tuple[str, str]], labels: Mapping[str, str]) -> Run:
        """Return the scores on some tasks and the costs."""
        notes = self.result.notes
        scores = summary(self.scores(tasks, labels))
        if scores.average is None:
            raise OptionError(
                f"`runs` must have a layer with a score on every shared task, but {self.home} has none: sweep it again."
            )
        tokens = [notes.tokens[task] for task, _ in tasks if task in notes.tokens]
        device = str(notes.timing.get("device") or notes.how.get("device", ""))
        gain = paired_gain(scores, self.resamples(labels))
        return Run(
            name,
            self.home.name,
            scores,
            notes.parameters,
            notes.milliseconds,
            sum(tokens) / len(tokens) if tokens else None,
            vector_bytes(notes.dimensions, notes.precision) or None,
            device,
            gain=gain,
        )

    def scores(self, tasks: set[tuple[str, str]], labels: Mapping[str, str]) -> pl.DataFrame:
        """Return the tidy scores on some tasks, with their labels."""
        selected = pl.DataFrame(sorted(tasks), schema=["dataset", "name"], orient="row")
        rows = selected.join(self.result.scores, on=["dataset", "name"], maintain_order="left")
        return rows.select(self.result.frame.columns).with_columns(pl.col("dataset").replace(labels))

    def resamples(self, labels: Mapping[str, str]) -> pl.DataFrame:
        """Return the scores on resampled test items, with the labels of the tasks."""
        return self.result.resamples.with_columns(pl.col("dataset").replace(labels))


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
    _sweeps: Mapping[str, _Sweep]

    def __repr__(self) -> str:
        return f"<Board: {[run.name for run in self.runs]}, tasks={list(self.tasks)}>"

    @cached_property
    def frame(self) -> pl.DataFrame:
        """The tidy scores of every run on the shared tasks, with the column ``run``."""
        shared = set.intersection(*(sweep.tasks for sweep in self._sweeps.values()))
        frames = {name: sweep.scores(shared, self._labels) for name, sweep in self._sweeps.items()}
        return pl.concat(frame.with_columns(run=pl.lit(name)) for name, frame in frames.items())

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
        points = [point for run in self.runs for point in replace(run, summary=summaries[run.name]).points]
        point = best_within(points, self.budget)
        scores, sweep = summaries[point.run], self._sweeps[point.run]
        gain = paired_gain(scores, sweep.resamples(self._labels), layer=point.layer)
        return BestLayer.of(scores, point.layer, recipe=sweep.recipe, gain=gain, notes=sweep.result.notes)

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
        samples = {each.name: self._sweeps[each.name].resamples(self._labels) for each in (run, *others[:1])}
        return {
            name: paired_gain(
                run.summary, samples[run.name], layer=best.layer, over=layer, other=(other.summary, samples[other.name])
            )
            for name, (other, layer) in compared.items()
        }

    def lines(self, point: Point) -> dict[str, str]:
        """Return the lines that create the encoder of a layer, by language."""
        return export_lines(self._sweeps[point.run].result.notes, point.layer)

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each layer of each run: ``run, folder, layer, score, best`` and its costs."""
        rows = [
            {
                "run": run.name,
                "folder": run.folder,
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
        runs = [replace(run, page=_link(self._sweeps[run.name].home, Path(folder))) for run in self.runs]
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
        for sweep in self._sweeps.values():
            if not (sweep.home / "report.html").exists():
                with suppress(OSError):  # a read-only folder: the run has no link then
                    SweepResult.load(sweep.home).to_html()
        return write_page(self.html(Path(path).parent), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the board as JSON values."""
        fronts = fronts_by_run(self.runs)
        runs = [
            {
                "folder": run.folder,
                **asdict(run.best),
                "lines": self.lines(run.best),
                "gain": run.average.gain,
                "interval": run.gain.interval if run.gain else None,
                "fronts": fronts[run.name],
            }
            for run in self.runs
        ]
        shared = {name: getattr(self, name) for name in ("tasks", "left_out", "remarks", "budget")}
        return {**shared, "runs": runs}

    @cached_property
    def _labels(self) -> dict[str, str]:
        """The label of every task of any run."""
        return task_labels(sorted({name for sweep in self._sweeps.values() for name, _ in sweep.tasks}))

    @property
    def _baselines(self) -> dict[str, dict[str, float]]:
        """Return each baseline that has a score on every shared task, from the first run that has it."""
        baselines: dict[str, dict[str, float]] = {}
        for sweep in self._sweeps.values():
            for name, scores in sweep.result.notes.baselines.items():
                by_label = {self._labels.get(task, task): score for task, score in scores.items()}
                baselines.setdefault(name, {task: by_label[task] for task in self.tasks if task in by_label})
        return {name: scores for name, scores in baselines.items() if len(scores) == len(self.tasks)}

    def _how(self) -> dict[str, str]:
        runs_by_timing: dict[str, list[str]] = {}
        for name, sweep in self._sweeps.items():
            timing = sweep.result.notes.how.get("time per text", "not noted")
            runs_by_timing.setdefault(timing, []).append(name)
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
    loaded = [sweep for folder in folders for sweep in _load_sweeps(folder, remarks)]
    sweeps = list({(sweep.home, sweep.recipe): sweep for sweep in loaded}.values())  # a folder may be named twice
    _check_distinct(sweeps)
    by_name = dict(zip(_names(sweeps), sweeps, strict=True))
    tasks = set().union(*(sweep.tasks for sweep in sweeps))
    labels = task_labels(sorted({name for name, _ in tasks}))
    shared = _shared_tasks(by_name, labels)
    ranked = [sweep.run(name, shared, labels) for name, sweep in by_name.items()]
    ranked.sort(key=lambda run: -run.best.score)
    left_out = {
        labels[task[0]]: tuple(name for name, sweep in by_name.items() if task not in sweep.tasks)
        for task in sorted(tasks - shared)
    }
    task_names = tuple(task.name for task in ranked[0].summary.tasks)
    all_remarks = (*_task_remarks(left_out), *remarks, *_cost_remarks(ranked))
    ranked_sweeps = {run.name: by_name[run.name] for run in ranked}
    return Board(tuple(ranked), task_names, left_out, budget, all_remarks, ranked_sweeps)


def _load_sweeps(path: object, remarks: list[str]) -> list[_Sweep]:
    """Return the sweeps in a folder or below it; those below that cannot be compared become remarks."""
    check_path("runs", path)
    folder = expand_home(Path(os.fspath(path)))  # type: ignore[call-overload]
    if not folder.is_dir():
        raise OptionError(
            f"`runs` must be folders of sweeps, but {folder} does not exist: pass the --out of `midlayer sweep`."
        )
    if _is_sweep(folder):
        return _recipes_of_sweep(folder)
    sweeps: list[_Sweep] = []
    errors = []
    for subfolder in _sweeps_below(folder):
        try:
            sweeps += _recipes_of_sweep(subfolder)
        except OptionError as error:
            errors.append(str(error))
    if not sweeps:
        empty = f"`runs` must be folders of sweeps, or contain some, but {folder} does not: pass the --out of a sweep."
        raise OptionError(errors[0] if errors else empty)
    remarks += [f"Left out: {error}" for error in errors]
    return sweeps


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


def _recipes_of_sweep(folder: Path) -> list[_Sweep]:
    """Return the sweep in a folder under each of its recipes, or raise if it cannot be compared."""
    if not (folder / "sweep.json").exists() or not (folder / "frame.parquet").exists():
        raise OptionError(
            f"`runs` must be finished, but the sweep in {folder} is not: run the same command again to resume it."
        )
    result = SweepResult.load(folder)
    recipe = str(result.notes.options.get("recipe") or PLAIN)
    parts = result.parts or {recipe: result}
    sweeps = [_Sweep(part, folder.resolve(), name) for name, part in parts.items()]
    if not all(sweep.tasks for sweep in sweeps):
        raise OptionError(
            f"`runs` must have scores, but {folder} has none, only metrics or failed tasks: sweep it with --tasks."
        )
    return sweeps


def _link(home: Path, folder: Path) -> str:
    """Return the relative link to a sweep's page; empty if there is none. The prefix rules out a URL scheme."""
    if not (home / "report.html").exists():
        return ""
    try:
        path = os.path.relpath(home / "report.html", folder.resolve())
    except ValueError:  # another drive on Windows
        return (home / "report.html").as_uri()
    return "./" + quote(path.replace(os.sep, "/"), errors="surrogateescape")


def _check_distinct(sweeps: Sequence[_Sweep]) -> None:
    by_identity: dict[str, _Sweep] = {}
    for sweep in sweeps:
        other = by_identity.setdefault(sweep.identity, sweep)
        if other is not sweep:
            raise OptionError(
                f"`runs` must be distinct, but {other.home} and {sweep.home} both hold {sweep.label} with the same "
                "weights and options. Pass only one of them; a recipe of a sweep is in its folder recipes/NAME."
            )


def _shared_tasks(sweeps: Mapping[str, _Sweep], labels: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return the tasks on which all runs have scores by the same metric."""
    shared = set.intersection(*(sweep.tasks for sweep in sweeps.values()))
    if not shared:
        tasks = {name: ", ".join(sorted(labels[task] for task, _ in sweep.tasks)) for name, sweep in sweeps.items()}
        each = "; ".join(f"{name}: {names}" for name, names in tasks.items())
        raise OptionError(
            f"`runs` must share a task, but they share none ({each}). Sweep them on the same tasks: stored embeddings "
            "are reused."
        )
    return shared


def _names(sweeps: Sequence[_Sweep]) -> list[str]:
    """Return the label of each sweep, with its folder's name, or path, if that is needed to distinguish them."""
    labels = [sweep.label for sweep in sweeps]
    names = labels
    for places in ([sweep.home.name for sweep in sweeps], [str(sweep.home) for sweep in sweeps]):
        counts = Counter(names)
        names = [
            name if counts[name] == 1 else f"{label} ({place})"
            for name, label, place in zip(names, labels, places, strict=True)
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
    devices = list(dict.fromkeys(run.device for run in runs if run.milliseconds))
    if len(devices) > 1:
        remarks.append(f"Times are from different devices ({'; '.join(devices)}): compare them within one.")
    for cost, name in COSTS.items():
        unknown = [run.name for run in runs if cost not in run.best.costs]
        if 0 < len(unknown) < len(runs):
            remarks.append(f"No {name} recorded for {', '.join(unknown)}: repeat the sweep to add them.")
    return remarks
