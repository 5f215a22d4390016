"""What a sweep found: the frame, the best layer, figures, the page; kept in a folder and read back from it."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import polars as pl

from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import parse_json_object, read_artifact, read_text_file, write_file
from midlayer_encoders.frame import Baselines, Summary, read_frame, summary
from midlayer_encoders.report import plot_recipes, plot_scores, report_html
from midlayer_encoders.report.results import Result
from midlayer_encoders.report.score_charts import best_recipe
from midlayer_encoders.tasks import task_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Notes", "RecipesResult", "SweepResult", "export_lines", "read_notes", "scored_alone", "task_labels"]

_TEXTS_ONCE = 16  # timed at once before sweeps noted how many


@dataclass(frozen=True)
class Notes:
    """What stands beside the frame: how it was measured, what each layer costs, and what went wrong.

    ``seconds`` are those after which a pass over a batch has reached a layer, and ``timing`` says of what batch and
    where; ``dimensions`` are those of a vector, 0 where they were not noted (before 0.2).
    """

    title: str
    model: str
    how: dict[str, str]
    parameters: dict[int, int] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    scoring: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)
    recipes: dict[str, str] = field(default_factory=dict)
    site: str = "block"
    dimensions: int = 0
    timing: dict[str, Any] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[int, float]:
        """Of a text, by layer, where they were timed."""
        texts = self.timing.get("texts", _TEXTS_ONCE)
        return {layer: 1e3 * seconds / texts for layer, seconds in self.seconds.items()}


@dataclass(frozen=True)
class SweepResult(Result):
    """Scores and metrics of every layer.

    Attributes:
        frame: tidy: ``model, revision, layer, depth, kind, dataset, name, value``; beside ``score`` and ``metric`` rows
            of the kind ``confirmed`` hold mteb's own score of some layers that were scored together.
        folder: where the frame, mteb's result files, the embeddings and the page lie.
        notes: how it was measured.
    """

    folder: Path
    notes: Notes

    made_by: ClassVar[str] = "sweep"

    @property
    def failures(self) -> Mapping[str, str]:
        """Tasks that failed, and why."""
        return self.notes.failures

    def summary(self) -> Summary:
        """Return mean scores by layer, the best layer, the last, and the gain between them."""
        return summary(self.frame)

    def best(self) -> int:
        """Return the layer with the highest mean score over the tasks."""
        if self.frame.filter(pl.col("kind") == "score").is_empty():
            raise OptionError(f"There is no score to choose a layer by. {self._reasons()}")
        average = self.summary().average
        if average is None:
            raise OptionError("No layer was scored on every task, so none is the best: see `failures`, or sweep again.")
        return int(average.best_layer)

    def _reasons(self) -> str:
        """Return why there is no score."""
        failed = [f"{task}: {error}" for task, error in self.failures.items()]
        return " ".join([*failed, *self.notes.remarks]) or "No task was asked for."

    def plot(self) -> Figure:
        """Return the figure of scores by depth."""
        return plot_scores(self.frame)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores``."""
        return {"scores": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        notes = self.notes
        if self.frame.is_empty():
            raise OptionError(f"There is nothing to draw: no layer was scored or measured. {self._reasons()}")
        chosen = _average(self) is not None and notes.site == "block"
        labels = task_labels(self.frame["dataset"].unique().to_list())
        return report_html(
            self.frame.with_columns(pl.col("dataset").replace(labels)),
            title=notes.title,
            how=notes.how,
            parameters=notes.parameters or None,
            seconds={layer: time / 1e3 for layer, time in notes.milliseconds.items()} or None,
            export=export_lines(notes, self.best()) if chosen else None,
            notes=[*notes.missing, *notes.remarks, *_failed(self.failures)],
            baselines=_labeled(notes.baselines, labels),
        )

    def save(self, folder: Path | str | None = None) -> Path:
        """Write frame (parquet and CSV) and notes into a folder, by default the result's own, and return it."""
        home = self._write_tables(folder)
        write_file(home / "sweep.json", json.dumps(asdict(self.notes), indent=2).encode())
        return home

    @classmethod
    def load(cls, folder: Path | str) -> SweepResult:
        """Return the result that :meth:`save` wrote into a folder, of several recipes where it is one.

        Raises:
            OptionError: there is none that can be read; the sweep, called again, writes it from what it kept.
        """
        folder = Path(folder)
        notes = read_artifact(folder / "sweep.json", read_notes)
        if notes is not None and notes.recipes:
            parts = {name: SweepResult.load(folder / place) for name, place in notes.recipes.items()}
            return RecipesResult.of(parts, folder)
        frame = read_artifact(folder / "frame.parquet", read_frame)
        if frame is None or notes is None:
            raise OptionError(
                f"`folder` must be the --out of a sweep, but {folder} holds no frame.parquet and sweep.json that can "
                "be read. Run the sweep again: it goes on from what it kept."
            )
        return cls(frame, folder, notes)


@dataclass(frozen=True)
class RecipesResult(SweepResult):
    """Scores and metrics of every layer under every recipe; what it says of one is about the best recipe.

    Attributes:
        frame: as of a :class:`SweepResult`, with the column ``recipe``.
        folder: where all of it lies; each recipe has a folder of its own in it.
        notes: those of the best recipe, with the baselines, which are scored once.
        parts: the result of each recipe by its name.
    """

    parts: Mapping[str, SweepResult]

    @classmethod
    def of(cls, parts: Mapping[str, SweepResult], folder: Path) -> RecipesResult:
        """Return the result of several, by the names of their recipes."""
        frame = pl.concat(
            part.frame.select(pl.lit(name).alias("recipe"), pl.all()) for name, part in parts.items()
        ).select(*next(iter(parts.values())).frame.columns, "recipe")
        scored = {name: part for name, part in parts.items() if _average(part) is not None}
        best = best_recipe({name: part.summary() for name, part in scored.items()}) if scored else next(iter(parts))
        first = next(iter(parts.values())).notes
        notes = replace(parts[best].notes, baselines=first.baselines, missing=first.missing)
        return cls(frame, folder, notes, parts)

    @property
    def recipe(self) -> str:
        """The recipe whose best layer has the highest mean score over the tasks."""
        return best_recipe(self.summaries())

    @property
    def winner(self) -> SweepResult:
        """The result of that recipe."""
        return self.parts[self.recipe]

    @property
    def failures(self) -> Mapping[str, str]:
        """Tasks that failed, and why, under the recipe's name."""
        return {f"{task} ({name})": error for name, part in self.parts.items() for task, error in part.failures.items()}

    def summaries(self) -> dict[str, Summary]:
        """Return what the scores of each recipe say."""
        found = {name: part.summary() for name, part in self.parts.items() if _average(part) is not None}
        if not found:
            raise OptionError("No layer of any recipe was scored on every task: see `failures`, or sweep again.")
        return found

    def summary(self) -> Summary:
        """Return mean scores by layer of the best recipe, its best layer, the last, and the gain between them."""
        return self.winner.summary()

    def best(self) -> int:
        """Return the layer with the highest mean score over the tasks, under the best recipe."""
        return self.winner.best()

    def plot(self) -> Figure:
        """Return the figure of scores by layer and recipe."""
        return plot_recipes(self.summaries(), self.notes.baselines)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``recipes`` and ``scores``, which are the best recipe's."""
        return {"recipes": self.plot(), "scores": self.winner.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        found, winner = self.summaries(), self.winner
        labels = task_labels(self.frame["dataset"].unique().to_list())

        def labeled(frame: pl.DataFrame) -> pl.DataFrame:
            return frame.with_columns(pl.col("dataset").replace(labels))

        notes = winner.notes
        return report_html(
            labeled(winner.frame),
            title=notes.title,
            how={"recipe": self.recipe, **notes.how},
            parameters=notes.parameters or None,
            seconds={layer: time / 1e3 for layer, time in notes.milliseconds.items()} or None,
            export=export_lines(notes, winner.best()),
            notes=[*self.notes.missing, *notes.remarks, *_failed(self.failures)],
            baselines=_labeled(self.notes.baselines, labels),
            recipes={name: summary(labeled(self.parts[name].frame)) for name in found},
        )

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the frame of all recipes and where each lies into a folder, by default the result's own."""
        home = self._write_tables(folder)
        places = {name: os.path.relpath(part._home(), home) for name, part in self.parts.items()}
        write_file(home / "sweep.json", json.dumps(asdict(self.notes) | {"recipes": places}, indent=2).encode())
        return home


def _average(part: SweepResult) -> float | None:
    if part.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite()).is_empty():
        return None
    average = part.summary().average
    return None if average is None or math.isnan(average.best) else average.best


def _failed(failures: Mapping[str, str]) -> list[str]:
    return [f"{task} failed: {error}" for task, error in failures.items()]


def _labeled(baselines: Baselines, labels: Mapping[str, str]) -> dict[str, dict[str, float]]:
    return {
        name: {labels.get(task, task): score for task, score in scores.items()} for name, scores in baselines.items()
    }


def scored_alone(baselines: Baselines) -> dict[str, dict[str, float]]:
    """Return the scores of baselines without those that are NaN, as a layer without a score is not in the frame.

    Example:
        >>> scored_alone({"TF-IDF": {"A": 0.5, "B": float("nan")}, "BM25": {"B": float("nan")}})
        {'TF-IDF': {'A': 0.5}}
    """
    found = {name: {task: one for task, one in of.items() if not math.isnan(one)} for name, of in baselines.items()}
    return {name: of for name, of in found.items() if of}


def read_notes(path: Path) -> Notes:
    """Return the notes of a sweep from its ``sweep.json``."""
    kept = parse_json_object(read_text_file(path, OptionError), str(path), OptionError)
    for name in ("parameters", "seconds"):
        kept[name] = {int(layer): value for layer, value in kept[name].items()}
    if "export_options" in kept:  # written by 0.1, as flags
        flags = re.findall(r"--(\S+) (\S+)", kept.pop("export_options"))
        kept["options"] = {name.replace("-", "_"): value for name, value in flags}
    baselines = kept.get("baselines", {})
    if isinstance(baselines, dict) and any(isinstance(score, float | int) for score in baselines.values()):
        kept["baselines"] = {"TF-IDF": baselines}  # as it was written while there was one
    for one in fields(Notes):
        kind = {"dimensions": int, "missing": list, "model": str, "remarks": list, "site": str, "title": str}.get(
            one.name, dict
        )
        if not isinstance(kept.get(one.name, kind()), kind):
            raise TypeError(f"{one.name} is not a {kind.__name__}")
    kept["baselines"] = scored_alone(kept.get("baselines", {}))
    return Notes(**kept)


def task_labels(names: Sequence[str]) -> dict[str, str]:
    """Return names of tasks without the digest of their data, where that leaves them apart."""
    labels = {name: task_label(name) for name in names}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def export_lines(notes: Notes, layer: int) -> dict[str, str]:
    """Return the lines that make the encoder of a layer."""
    done = dict(notes.vectors)
    center = done.pop("center", "")
    options, out = EncoderOptions(**notes.options, **done), f"layer-{layer}"
    python, shell = python_line(notes.model, layer, options), shell_line(notes.model, layer, options, out=out)
    if center:
        python = f"{python.removesuffix(')')}, center=read_texts({center!r}))"
        shell, _, name = shell.rpartition(" --out ")  # the last: a template may hold such words
        shell = f"{shell} --center {shlex.quote(center)} --out {name}"
    return {"Python": f'{python}.save_pretrained("{out}")', "shell": shell}
