"""Many sweeps beside each other: read from their folders, cut to the tasks that all of them share."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import LOCK, expand_home
from midlayer_encoders.frame import Summary, summary
from midlayer_encoders.frame.pareto import COSTS, Budget, Cost, Point, Run, best_within, fronts_by_run
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report.board_page import board_chart, board_html
from midlayer_encoders.report.drawing import draw
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.sweeping.sweep_result import RecipesResult, SweepResult, export_lines, task_labels
from midlayer_encoders.validation import check_list, check_number, check_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Board", "board"]

_MADE = ("together", "mteb", "recipes", "embeddings")  # what a sweep makes before it is done
_DEEPEST = 4  # folders below the one that is named
_BYTES = 4  # of a float32, as which vectors are returned


@dataclass(frozen=True)
class _Swept:
    """One sweep under one recipe, and the folder that its page is in."""

    result: SweepResult
    home: Path
    recipe: str

    @property
    def identity(self) -> str:
        """All that makes its vectors and its times what they are."""
        notes, frame = self.result.notes, self.result.frame
        how = [notes.how.get(name) for name in ("weights", "dtype", "device", "longest text")]
        options = {**notes.options, **notes.vectors, "recipe": self.recipe}
        return json.dumps([frame["model"][0], frame["revision"][0], how, options], sort_keys=True, default=str)

    @property
    def label(self) -> str:
        """Model, revision and recipe, as far as they are not the plain ones."""
        model, revision = self.result.frame["model"][0], self.result.frame["revision"][0]
        at = "" if revision == "default" else f"@{revision}"
        return f"{model}{at}" + ("" if self.recipe == PLAIN else f" with {self.recipe}")

    @property
    def tasks(self) -> set[tuple[str, str]]:
        """Name and measure of each task that a layer has a finite score on."""
        scores = self.result.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite())
        return set(scores.select("dataset", "name").unique().iter_rows())


@dataclass(frozen=True)
class Board:
    """Many runs on the tasks that they share, the best first.

    Attributes:
        runs: what each scores and costs.
        tasks: that all of them share, as they are labeled.
        left_out: tasks that are not shared, and the runs that lack each.
        budget: the most that ``parameters``, ``milliseconds`` (per text) and ``bytes`` (per vector) may be.
        remarks: sentences about what was left out, and what cannot be compared.
    """

    runs: tuple[Run, ...]
    tasks: tuple[str, ...]
    left_out: Mapping[str, tuple[str, ...]]
    budget: Budget
    remarks: tuple[str, ...]
    _swept: tuple[_Swept, ...]

    @property
    def points(self) -> list[Point]:
        """Every layer of every run."""
        return [point for run in self.runs for point in run.points]

    def chosen(self) -> Point:
        """Return the layer that scores most within the budget; an error names the nearest where there is none."""
        return best_within(self.points, self.budget)

    def lines(self, point: Point) -> dict[str, str]:
        """Return the lines that make the encoder of a layer of a run, by language."""
        swept = dict(zip((run.name for run in self.runs), self._swept, strict=True))
        return export_lines(swept[point.run].result.notes, point.layer)

    def to_frame(self) -> pl.DataFrame:
        """Return a row for each layer of each run: ``run, folder, layer, score, best`` and what it costs."""
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
        return draw(board_chart(self.runs, self._baselines(), self.budget))

    def html(self, folder: Path | str = ".") -> str:
        """Return the self-contained page; its links to the sweeps' own pages lead from ``folder``."""
        runs = [
            replace(run, page=_link(one.home, Path(folder))) for run, one in zip(self.runs, self._swept, strict=True)
        ]
        remarks, budget = list(self.remarks), self.budget
        try:
            best = self.chosen()
        except OptionError as error:  # the page is of all runs all the same
            remarks, budget = [str(error), *remarks], {}
            best = best_within(self.points, {})
        return board_html(
            runs, best=best, lines=self.lines(best), budget=budget, baselines=self._baselines(), notes=remarks,
            how=self._how(),
        )  # fmt: skip

    def to_html(self, path: Path | str) -> Path:
        """Write the page, and those of sweeps that have none yet, and return where it lies."""
        for one in self._swept:
            if not (one.home / "report.html").exists():
                with suppress(OSError):  # of someone else's folder: the run has no link then
                    SweepResult.load(one.home).to_html()
        return write_page(self.html(Path(path).parent), path)

    def to_dict(self) -> dict[str, Any]:
        """Return what the board says in values that JSON has."""
        fronts = fronts_by_run(self.runs)

        def encoder(point: Point) -> dict[str, Any]:
            return {**asdict(point), "costs": dict(point.costs), "lines": self.lines(point)}

        return {
            "tasks": list(self.tasks),
            "left_out": {task: list(lacking) for task, lacking in self.left_out.items()},
            "remarks": list(self.remarks),
            "budget": dict(self.budget),
            "runs": [
                {"folder": run.folder, **encoder(run.best), "gain": run.average.gain, "fronts": fronts[run.name]}
                for run in self.runs
            ],
        }

    def _baselines(self) -> dict[str, dict[str, float]]:
        """Return each baseline on the shared tasks, from the first run that has it."""
        names = {name for one in self._swept for name, _ in one.tasks}
        labels = task_labels(sorted(names))
        found: dict[str, dict[str, float]] = {}
        for one in self._swept:
            for name, scores in one.result.notes.baselines.items():
                known = {labels.get(task, task): score for task, score in scores.items()}
                found.setdefault(name, {task: known[task] for task in self.tasks if task in known})
        return {name: scores for name, scores in found.items() if len(scores) == len(self.tasks)}

    def _how(self) -> dict[str, str]:
        timed: dict[str, list[str]] = {}
        for run, one in zip(self.runs, self._swept, strict=True):
            how = one.result.notes.how.get("time per text", "how is not noted: swept before 0.2")
            timed.setdefault(how, []).append(run.name)
        apart = len(timed) > 1
        return {
            "Tasks": ", ".join(self.tasks),
            "Score": "mean of the tasks' main scores, of the layers that were scored on all of them",
            "Best layer": "picked by the scores that it is shown with: a fraction of a point may be luck",
            "Bytes": "of a vector of float32",
            **{f"Time per text{', ' + ', '.join(names) if apart else ''}": how for how, names in timed.items()},
        }


def board(
    runs: str | Path | Sequence[str | Path],
    *,
    max_parameters: float | None = None,
    max_milliseconds: float | None = None,
    max_bytes: float | None = None,
) -> Board:
    """Return many sweeps side by side, on the tasks that all of them share.

    Args:
        runs: folders of sweeps (their ``out``), or folders that hold several. A sweep under several recipes is a run
            for each. In a folder that holds several, what cannot be shown is left out, which ``remarks`` say.
        max_parameters: of the encoder to use, :meth:`Board.chosen`, a layer of any run.
        max_milliseconds: of it, for a text.
        max_bytes: of a vector of it.

    Raises:
        OptionError: for a folder that is no sweep, or of one that is not finished, for two runs of the same thing, and
            for runs that share no task.
    """
    budget = _budget({"parameters": max_parameters, "milliseconds": max_milliseconds, "bytes": max_bytes})
    named = [runs] if isinstance(runs, str | Path) else check_list("runs", runs, "folders")
    remarks: list[str] = []
    found = [swept for one in named for swept in _found(one, remarks)]
    swept = list({(one.home, one.recipe): one for one in found}.values())  # a folder may be named twice
    _check_apart(swept)
    names = dict(zip(_names(swept), swept, strict=True))
    labels = task_labels(sorted({task for one in swept for task, _ in one.tasks}))
    shared = _shared(names, labels)
    made = [(_run(one, name, shared, labels), one) for name, one in names.items()]
    made.sort(key=lambda pair: -pair[0].best.score)
    shown = tuple(run for run, _ in made)
    left = {
        labels[task[0]]: tuple(name for name, one in names.items() if task not in one.tasks)
        for task in sorted(set().union(*(one.tasks for one in swept)) - shared)
    }
    return Board(
        shown,
        tuple(task.name for task in shown[0].summary.tasks),
        left,
        budget,
        (*_task_words(left), *remarks, *_cost_words(shown)),
        tuple(one for _, one in made),
    )


def _budget(asked: Mapping[Cost, float | None]) -> Budget:
    budget = {cost: check_number(f"max_{cost}", most) for cost, most in asked.items() if most is not None}
    for cost, most in budget.items():
        if most == 0:
            raise OptionError(f"`max_{cost}` must be above 0, but got 0.")
    return budget


# --- folders ----------------------------------------------------------------------------------------------------------


def _found(given: object, remarks: list[str]) -> list[_Swept]:
    """Return the sweeps at a path, or below it; of those below, one that cannot be shown becomes a remark."""
    check_path("runs", given)
    folder = expand_home(Path(os.fspath(given)))  # type: ignore[call-overload]
    if not folder.is_dir():
        raise OptionError(
            f"`runs` must be folders of sweeps, but there is none at {folder}: name the --out of `midlayer sweep`."
        )
    if _is_sweep(folder):
        return _parts(folder)
    found, reasons = [], []
    for one in _below(folder):
        try:
            found += _parts(one)
        except OptionError as error:
            reasons.append(str(error))
    if not found:
        none = f"`runs` must be folders of sweeps, or hold some, but {folder} holds none: name the --out of a sweep."
        raise OptionError(reasons[0] if reasons else none)
    remarks += [f"Left out: {reason}" for reason in reasons]
    return found


def _below(folder: Path, depth: int = 1) -> Iterator[Path]:
    """Yield the folders below one that are sweeps, finished or not."""
    for inner in sorted(one for one in folder.iterdir() if one.is_dir() and not one.name.startswith(".")):
        if _is_sweep(inner):
            yield inner
        elif depth < _DEEPEST:
            yield from _below(inner, depth + 1)


def _is_sweep(folder: Path) -> bool:
    """Return whether a sweep was begun in a folder."""
    begun = (folder / LOCK).exists() or sum((folder / name).is_dir() for name in _MADE) > 1
    return begun or (folder / "sweep.json").exists()


def _parts(folder: Path) -> list[_Swept]:
    """Return the sweep of a folder under each of its recipes, or raise why it cannot be on a board."""
    if not (folder / "sweep.json").exists() or not (folder / "frame.parquet").exists():
        raise OptionError(
            f"`runs` must be finished, but the sweep in {folder} is not: run the same command again, it goes on where "
            "it stopped."
        )
    result, home = SweepResult.load(folder), folder.resolve()
    if result.notes.site != "block":
        raise OptionError(
            f"`runs` must be of whole blocks, but {folder} is of what {result.notes.site} adds in each, of which there "
            "is no encoder: leave it out."
        )
    recipe = str(result.notes.options.get("recipe") or PLAIN)
    parts = result.parts if isinstance(result, RecipesResult) else {recipe: result}
    swept = [_Swept(part, home, name) for name, part in parts.items()]
    if not all(part.tasks for part in swept):
        raise OptionError(
            f"`runs` must have scores, but {folder} has none, only metrics or failed tasks: sweep it with --tasks."
        )
    return swept


def _link(home: Path, folder: Path) -> str:
    """Return the address of a sweep's page, if it has one, from the board's folder; no name in it is a scheme."""
    if not (home / "report.html").exists():
        return ""
    try:
        path = os.path.relpath(home / "report.html", folder.resolve())
    except ValueError:  # on another drive of Windows
        return (home / "report.html").as_uri()
    return "./" + quote(path.replace(os.sep, "/"), errors="surrogateescape")


# --- what is compared -------------------------------------------------------------------------------------------------


def _check_apart(swept: Sequence[_Swept]) -> None:
    known: dict[str, _Swept] = {}
    for one in swept:
        other = known.setdefault(one.identity, one)
        if other is not one:
            raise OptionError(
                f"`runs` must be of different things, but {other.home} and {one.home} both hold {one.label} with the "
                "same weights and options. Name one of them alone; a recipe of a sweep is in its folder recipes/NAME."
            )


def _shared(swept: Mapping[str, _Swept], labels: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return the tasks that all runs were scored on, by the same measure, or raise what each was scored on."""
    shared = set.intersection(*(one.tasks for one in swept.values()))
    if not shared:
        each = "; ".join(f"{name}: {', '.join(sorted(labels[t] for t, _ in one.tasks))}" for name, one in swept.items())
        raise OptionError(
            f"`runs` must share a task to be compared on, but they share none ({each}). Sweep them on the same tasks: "
            "what was embedded is kept."
        )
    return shared


def _names(swept: Sequence[_Swept]) -> list[str]:
    """Return a name for each: its label, and its folder where another has the same label."""
    labels = [one.label for one in swept]
    counts = Counter(labels)
    named = [
        label if counts[label] == 1 else f"{label} ({one.home.name})" for label, one in zip(labels, swept, strict=True)
    ]
    counts = Counter(named)
    return [
        name if counts[name] == 1 else f"{label} ({one.home})"
        for name, label, one in zip(named, labels, swept, strict=True)
    ]


def _run(one: _Swept, name: str, shared: set[tuple[str, str]], labels: Mapping[str, str]) -> Run:
    notes = one.result.notes
    return Run(
        name, one.home.name, _summary(one, shared, labels), notes.parameters, notes.milliseconds,
        _BYTES * notes.dimensions or None, str(notes.timing.get("device") or notes.how.get("device", "")),
    )  # fmt: skip


def _summary(one: _Swept, shared: set[tuple[str, str]], labels: Mapping[str, str]) -> Summary:
    tasks = pl.DataFrame(sorted(shared), schema=["dataset", "name"], orient="row")
    scores = tasks.join(
        one.result.frame.filter(pl.col("kind") == "score"), on=["dataset", "name"], maintain_order="left"
    )
    found = summary(scores.select(one.result.frame.columns).with_columns(pl.col("dataset").replace(labels)))
    if found.average is None:
        raise OptionError(
            f"`runs` must have a layer that was scored on every shared task, but {one.home} has none: sweep it again."
        )
    return found


def _task_words(left: Mapping[str, Sequence[str]]) -> list[str]:
    """Return which tasks are left out, together where the same runs lack them."""
    tasks: dict[tuple[str, ...], list[str]] = {}
    for task, lacking in left.items():
        tasks.setdefault(tuple(lacking), []).append(task)
    return [f"Left out: {', '.join(some)}, not in {', '.join(lacking)}." for lacking, some in tasks.items()]


def _cost_words(runs: Sequence[Run]) -> list[str]:
    """Return what about costs cannot be compared."""
    words = []
    devices = list(dict.fromkeys(run.device for run in runs if run.milliseconds))
    if len(devices) > 1:
        words.append(f"Times are of different devices ({'; '.join(devices)}): compare them within one.")
    for cost, what in COSTS.items():
        lacking = [run.name for run in runs if cost not in run.best.costs]
        if lacking and len(lacking) < len(runs):
            words.append(f"No {what} noted for {', '.join(lacking)}: sweep again with this version to have them.")
    return words
