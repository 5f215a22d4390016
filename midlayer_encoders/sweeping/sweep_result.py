"""The result of a sweep: the frame, the best layer, figures and the page, saved in a folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import dump_with_checksum, read_artifact, write_file
from midlayer_encoders.frame.schema import read_frame
from midlayer_encoders.frame.summaries import (
    RESAMPLES_SCHEMA,
    Gain,
    Summary,
    baseline_gains,
    paired_gain,
    read_resamples,
    summary,
)
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.report import plot_recipes, plot_scores, report_html
from midlayer_encoders.report.layer_charts import best_recipe
from midlayer_encoders.report.pages import notebook_html
from midlayer_encoders.report.results import Result
from midlayer_encoders.report.sweep_page import verdict
from midlayer_encoders.sweeping.best_layer import BestLayer, Notes, export_lines, read_notes, sample_words
from midlayer_encoders.tasks import task_label
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


@dataclass(frozen=True, repr=False)
class SweepResult(Result):
    """Scores and metrics of every layer; of several recipes, the summary and the page describe the best.

    Attributes:
        frame: tidy frame with ``model, revision, layer, depth, kind, dataset, name, value``; rows of the kind
            ``confirmed`` hold mteb's score of some layers that were scored together. A sweep over recipes adds the
            column ``recipe``, one over ``dims`` or ``precisions`` also these.
        folder: folder of the frame, mteb's result files, the embeddings and the page, with one folder per recipe.
        notes: how it was measured; the notes of the best recipe, with the baselines, which are scored once.
        parts: the result of each recipe by name, and of each compression: ``"plain, 64 dims, int8"``; empty if the
            sweep compared none.
        resamples: scores of each task and layer on resampled test items, for the intervals of :meth:`gain`.
        num_kept: number of scores that an earlier run had saved; it is not saved itself.
    """

    folder: Path
    notes: Notes
    parts: Mapping[str, SweepResult] = field(default_factory=dict)
    resamples: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=RESAMPLES_SCHEMA), kw_only=True)
    num_kept: int = field(default=0, kw_only=True, compare=False)

    @classmethod
    def of(cls, parts: Mapping[str, SweepResult], folder: Path) -> SweepResult:
        """Return the combined result of several recipes."""
        first = next(iter(parts.values()))
        columns = {name: {"recipe": name, **part.notes.compression} for name, part in parts.items()}
        frame = pl.concat(part.frame.with_columns(**_literals(columns[name])) for name, part in parts.items())
        summaries = _summaries(parts)
        best = parts[best_recipe(summaries)] if summaries else first
        notes = replace(best.notes, baselines=first.notes.baselines, resamples=first.notes.resamples)
        num_kept = sum(part.num_kept for part in parts.values())
        return cls(frame, folder, notes, parts, resamples=best.resamples, num_kept=num_kept)

    @property
    def recipe(self) -> str:
        """The recipe whose best layer has the highest mean score over the tasks; the only one if there is one."""
        return best_recipe(self.summaries()) if self.parts else str(self.notes.options.get("recipe") or PLAIN)

    @property
    def winner(self) -> SweepResult:
        """The result of that recipe."""
        return self.parts[self.recipe] if self.parts else self

    @property
    def failures(self) -> Mapping[str, str]:
        """Failed tasks, of several recipes with the recipe's name, and their errors."""
        if not self.parts:
            return self.notes.failures
        return {f"{task} ({name})": error for name, part in self.parts.items() for task, error in part.failures.items()}

    @property
    def curves(self) -> Summary:
        """Scores by layer of each task and of their mean, each with its best layer and its last, in points."""
        return summary(self.winner.frame)

    def summaries(self) -> dict[str, Summary]:
        """Return the summary of each recipe that has scores."""
        summaries = _summaries(self.parts or {self.recipe: self})
        if not summaries:
            raise OptionError("No layer of any recipe was scored on every task: see `failures`, or sweep again.")
        return summaries

    def gains(self) -> dict[str, tuple[Gain, Gain]]:
        """Return the gains of each recipe's best layer over the best and over the last layer of the plain text.

        Without a plain recipe, they are gains over the recipe's own layers.
        """
        summaries = self.summaries()
        parts = self.parts or {self.recipe: self}
        gains = {}
        for name in summaries:
            base = PLAIN if PLAIN in summaries else name
            average = summaries[base].average
            assert average is not None  # those without scores are left out
            part, other = parts[name], parts[base]
            gains[name] = part.gain(over=average.best_layer, other=other), part.gain(other=other)
        return gains

    def verdict(self) -> list[str]:
        """Return sentences: what scores most, the best layer and recipe, their gains, and what to try next."""
        if not (_summaries(self.parts) if self.parts else self.tasks):
            return []
        scores = summary(_with_labels(self.winner.frame, self._labels))
        if self.parts:
            recipes, gains = self._labeled_summaries(), self.gains()
            return verdict(scores, leads=self.baseline_gains(), recipes=recipes, recipe_gains=gains)
        has_best = scores.average is not None
        sentences = verdict(scores, self.gain(), leads=self.baseline_gains()) if has_best else verdict(scores)
        return [*sentences, *filter(None, [self.notes.hint])]

    def summary(self) -> str:
        """Return the title, the verdict, and what was sampled or failed, each in a line."""
        verdict = self.verdict() or [self._reasons()]
        return "\n".join([self.notes.title, *verdict, *self.sample_words(), *self._failure_lines()])

    @property
    def tasks(self) -> tuple[str, ...]:
        """Labels of the tasks that have scores."""
        return tuple(self._task_labels())

    def best(self, task: str | None = None) -> BestLayer:
        """Return the layer and recipe with the highest score, and its gain over the last layer of the plain text.

        Without a plain recipe, it is the gain over the recipe's own last layer.

        Args:
            task: one of :attr:`tasks`; the mean over all of them by default.
        """
        if not self.parts:
            return self._best(task, self.recipe)
        if task is None:
            candidates = self.summaries()
        else:
            task = self._task_name(task)
            parts = {name: part for name, part in self.parts.items() if task in part._task_labels().values()}
            candidates = {name: part._task_summary(task) for name, part in parts.items()}
        recipe = best_recipe(candidates)
        return self.parts[recipe]._best(task, recipe, self.parts[PLAIN if PLAIN in candidates else recipe])

    def encoder(self, task: str | None = None, **options: Any) -> LayerEncoder:
        """Return the encoder of the best layer, from the model's files, with the options that were scored.

        Args:
            task: as in :meth:`best`.
            options: ``device`` and others of :class:`~midlayer_encoders.EncoderOptions` that do not contradict these.
        """
        return self.best(task).encoder(**options)

    def gain(
        self,
        layer: int | None = None,
        *,
        over: int | None = None,
        other: SweepResult | None = None,
        task: str | None = None,
    ) -> Gain:
        """Return the points of a layer above another, with the 95 % interval of a paired bootstrap over test items.

        The interval does not cover the choice of the layer by the same scores.

        Args:
            layer: the best by default.
            over: the last by default.
            other: result on the same tasks, such as another recipe's, that has the layer ``over``.
            task: one of :attr:`tasks`; the mean over all of them by default.
        """
        pair = None if other is None else (other._task_summary(task), other.resamples)
        gain = paired_gain(self._task_summary(task), self.resamples, layer=layer, over=over, other=pair)
        return replace(gain, without=tuple(map(task_label, gain.without)))

    def baseline_gains(self) -> dict[str, Gain]:
        """Return the gain over the best layer of each baseline that was scored on every task, with its interval."""
        gains = baseline_gains(self.curves, self.resamples, self.notes.baselines, self.notes.resamples)
        return {name: replace(gain, without=tuple(map(task_label, gain.without))) for name, gain in gains.items()}

    def sample_words(self) -> list[str]:
        """Return sentences about the sample: what it saved, and the interval of the best score."""
        return sample_words(self.notes, self.curves, self.resamples)

    def _best(self, task: str | None, recipe: str, other: SweepResult | None = None) -> BestLayer:
        """Return the best layer under a recipe; its gain is that over the last layer of ``other``."""
        if self.scores.is_empty():
            raise OptionError(f"There is no score to choose a layer by. {self._reasons()}")
        scores = self._task_summary(task)
        if scores.average is None:
            raise OptionError("No layer was scored on every task, so none is the best: see `failures`, or sweep again.")
        gain = self.gain(task=task, other=other)
        return BestLayer.of(scores, scores.average.best_layer, recipe=recipe, gain=gain, notes=self.notes)

    @property
    def _labels(self) -> dict[str, str]:
        """The label of each dataset in the frame."""
        return task_labels(self.frame["dataset"].unique().to_list())

    def _task_labels(self) -> dict[str, str]:
        """Return the name of each task that has scores, by its label."""
        names = self.scores.filter(pl.col("value").is_finite())["dataset"].unique(maintain_order=True)
        return {label: name for name, label in task_labels(names.to_list()).items()}

    def _task_name(self, task: str) -> str:
        """Return the name of a task in the frame."""
        names = self._task_labels()
        return task if task in names.values() else names[check_choice("task", task, names)]

    def _task_summary(self, task: str | None) -> Summary:
        return self.curves if task is None else self.curves.only(self._task_name(task))

    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Return frame and resampled scores by file name."""
        return {**super().tables(), "resamples.parquet": self.resamples}

    def _reasons(self) -> str:
        """Return why there is no score."""
        failures = [f"{task}: {error}" for task, error in self.failures.items()]
        return " ".join([*failures, *self.notes.remarks]) or "The sweep had no tasks."

    def plot(self) -> Figure:
        """Return the figure of scores by depth, or of several recipes by layer."""
        if self.parts:
            return plot_recipes(self._labeled_summaries(), self._labeled_baselines())
        return plot_scores(_with_labels(self.frame, self._labels))

    def _repr_html_(self) -> str:
        """Return the best layer of each task and the figure, as a notebook shows them."""
        failures = self._failure_lines()
        if not self.tasks:
            return notebook_html(self.notes.title, notes=failures or [self._reasons()])
        last = "last layer of plain" if PLAIN in self.parts else "last layer"
        rows = [["task", "recipe", "best layer", "score", last, "gain (95 % interval)"]]
        figure = None
        with suppress(OptionError):  # no recipe has a layer that was scored on every task
            figure = self.plot()
        if len(self.tasks) > 1:
            with suppress(OptionError):
                rows.append(["average", *self.best().cells()])
        rows += [[task, *self.best(task).cells()] for task in self.tasks]
        return notebook_html(self.notes.title, rows, figure, failures)

    def __repr__(self) -> str:
        """Return the title, the best layer and the folder; the frame would fill the screen."""
        verdict = [sentence for sentence in self.verdict() if sentence != self.notes.hint]
        sentences = " ".join([f"{self.notes.title}.", *verdict])
        return f"<{type(self).__name__}: {sentences} tasks={list(self.tasks)}, folder={str(self.folder)!r}>"

    def __str__(self) -> str:
        return self.summary()

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores`` of the best recipe, after ``recipes`` if there are several."""
        return {"recipes": self.plot(), "scores": self.winner.plot()} if self.parts else {"scores": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        if self.frame.is_empty():
            raise OptionError(f"There is nothing to draw: no layer was scored or measured. {self._reasons()}")
        notes, has_best = self.notes, _average(self.winner) is not None
        return report_html(
            _with_labels(self.winner.frame, self._labels),
            title=notes.title,
            how=({"recipe": self.recipe} if self.parts else {}) | notes.how,
            parameters=notes.parameters or None,
            seconds={layer: time / 1e3 for layer, time in notes.milliseconds.items()} or None,
            export=export_lines(notes, self.best()) if has_best else None,
            notes=[*self.sample_words(), *notes.remarks, *self._failure_lines()],
            baselines=self._labeled_baselines(),
            recipes=self._labeled_summaries() if self.parts else None,
            sentences=self.verdict(),
            recipe_gains=self.gains() if self.parts else None,
        )

    def _failure_lines(self) -> list[str]:
        return [f"{task} failed: {error}" for task, error in self.failures.items()]

    def _labeled_summaries(self) -> dict[str, Summary]:
        return {name: summary(_with_labels(self.parts[name].frame, self._labels)) for name in self.summaries()}

    def _labeled_baselines(self) -> dict[str, dict[str, float]]:
        labels, baselines = self._labels, self.notes.baselines.items()
        return {name: {labels.get(task, task): score for task, score in scores.items()} for name, scores in baselines}

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the frame (parquet and CSV) and the notes into a folder, by default the result's, and return it."""
        home = self._write_tables(folder)
        folders = {name: os.path.relpath(part._home(), home) for name, part in self.parts.items()}
        notes = replace(self.notes, recipes=folders)
        content = json.loads(json.dumps(asdict(notes), default=str))  # layers become strings, as in the file
        write_file(home / "sweep.json", dump_with_checksum(content))
        return home

    @classmethod
    def load(cls, folder: Path | str) -> SweepResult:
        """Return the result that :meth:`save` wrote.

        Raises:
            OptionError: the result is absent or unreadable.
        """
        folder = Path(folder)
        notes = read_artifact(folder / "sweep.json", read_notes)
        if notes is not None and notes.recipes:
            parts = {name: SweepResult.load(folder / place) for name, place in notes.recipes.items()}
            return cls.of(parts, folder)
        frame = read_artifact(folder / "frame.parquet", read_frame)
        if frame is None or notes is None:
            raise OptionError(
                f"`folder` must be the --out of a sweep, but {folder} has no readable frame.parquet and sweep.json. "
                "Run the sweep again: it resumes."
            )
        resamples = read_artifact(folder / "resamples.parquet", read_resamples)
        return cls(frame, folder, notes) if resamples is None else cls(frame, folder, notes, resamples=resamples)


def _literals(cells: Mapping[str, Any]) -> dict[str, pl.Expr]:
    return {name: pl.lit(cell, dtype=pl.Int64 if name == "dims" else pl.String) for name, cell in cells.items()}


def _with_labels(frame: pl.DataFrame, labels: Mapping[str, str]) -> pl.DataFrame:
    return frame.with_columns(pl.col("dataset").replace(labels))


def _average(part: SweepResult) -> float | None:
    if part.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite()).is_empty():
        return None
    average = part.curves.average
    return None if average is None or math.isnan(average.best) else average.best


def _summaries(parts: Mapping[str, SweepResult]) -> dict[str, Summary]:
    return {name: part.curves for name, part in parts.items() if _average(part) is not None}


def task_labels(names: Sequence[str]) -> dict[str, str]:
    """Return the names of tasks without the digests of their data, if they stay distinct."""
    labels = {name: task_label(name) for name in names}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}
