"""The result of a sweep: the frame, the best layer, figures and the page, saved in a folder."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import polars as pl

from midlayer_encoders._types import LayerArgument
from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import (
    parse_json_object,
    read_artifact,
    read_text_file,
    sealed,
    shell_path,
    unsealed,
    write_file,
)
from midlayer_encoders.frame.gains import RESAMPLES_SCHEMA, Gain, paired_gain, read_resamples
from midlayer_encoders.frame.schema import read_frame
from midlayer_encoders.frame.summaries import Baselines, Curve, Summary, summary
from midlayer_encoders.recipes import PLAIN, removed_fields
from midlayer_encoders.report import plot_recipes, plot_scores, report_html
from midlayer_encoders.report.layer_charts import best_recipe
from midlayer_encoders.report.results import Result
from midlayer_encoders.tasks import task_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TIMED_TEXTS = 16  # before sweeps noted the number


@dataclass(frozen=True)
class Notes:
    """How a sweep was measured, what each layer costs, and what failed.

    ``seconds`` is the time until a pass over a batch reaches each layer; ``timing`` describes the batch and the device.
    ``dimensions`` is 0 in sweeps before 0.2. ``towers`` is the number of blocks of each tower of a joint model; its
    layers are those of the image tower. ``tokens`` is the mean number of tokens that the model reads for a text of each
    task whose layers were scored together.
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
    towers: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[int, float]:
        """Milliseconds per text up to each layer."""
        texts = self.timing.get("texts", _TIMED_TEXTS)
        return {layer: 1e3 * seconds / texts for layer, seconds in self.seconds.items()}


@dataclass(frozen=True)
class SweepResult(Result):
    """Scores and metrics of every layer.

    Attributes:
        frame: tidy frame with ``model, revision, layer, depth, kind, dataset, name, value``; rows of the kind
            ``confirmed`` hold mteb's score of some layers that were scored together.
        folder: folder of the frame, mteb's result files, the embeddings and the page.
        notes: how it was measured.
        resamples: scores of each task and layer on resampled test items, for the intervals of :meth:`gain`.
    """

    folder: Path
    notes: Notes
    resamples: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=RESAMPLES_SCHEMA), kw_only=True)

    made_by: ClassVar[str] = "sweep"

    @property
    def failures(self) -> Mapping[str, str]:
        """Failed tasks and their errors."""
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

    def gain(self, layer: int | None = None, *, over: int | None = None, other: SweepResult | None = None) -> Gain:
        """Return the points of a layer above another, with the 95 % interval of a paired bootstrap over test items.

        The interval does not cover the choice of the layer by the same scores.

        Args:
            layer: the best by default.
            over: the last by default.
            other: result on the same tasks, such as another recipe's, that has the layer ``over``.
        """
        pair = None if other is None else (other.summary(), other.resamples)
        gain = paired_gain(self.summary(), self.resamples, layer=layer, over=over, other=pair)
        return replace(gain, without=tuple(map(task_label, gain.without)))

    def tables(self) -> Mapping[str, pl.DataFrame]:
        """Return frame and resampled scores by file name."""
        return {**super().tables(), "resamples.parquet": self.resamples}

    def _reasons(self) -> str:
        """Return why there is no score."""
        failures = [f"{task}: {error}" for task, error in self.failures.items()]
        return " ".join([*failures, *self.notes.remarks]) or "The sweep had no tasks."

    def plot(self) -> Figure:
        """Return the figure of scores by depth."""
        return plot_scores(self.frame)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores``."""
        return {"scores": self.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        if self.frame.is_empty():
            raise OptionError(f"There is nothing to draw: no layer was scored or measured. {self._reasons()}")
        return self._page(self.failures)

    def _page(self, failures: Mapping[str, str], whole: RecipesResult | None = None) -> str:
        """Return the page of this result, as the best of several recipes if ``whole`` holds them."""
        notes = self.notes
        baselines_from = whole.notes if whole is not None else notes  # they are scored once
        labels = task_labels(self.frame["dataset"].unique().to_list())

        def labeled(frame: pl.DataFrame) -> pl.DataFrame:
            return frame.with_columns(pl.col("dataset").replace(labels))

        recipe = {"recipe": whole.recipe} if whole is not None else {}
        recipes = {name: summary(labeled(whole.parts[name].frame)) for name in whole.summaries()} if whole else None
        can_export = _average(self) is not None and notes.site == "block"
        return report_html(
            labeled(self.frame),
            title=notes.title,
            how=recipe | notes.how,
            parameters=notes.parameters or None,
            seconds={layer: time / 1e3 for layer, time in notes.milliseconds.items()} or None,
            export=export_lines(notes, self.best()) if can_export else None,
            notes=[
                *baselines_from.missing,
                *notes.remarks,
                *(f"{task} failed: {error}" for task, error in failures.items()),
            ],
            baselines={
                name: {labels.get(task, task): score for task, score in scores.items()}
                for name, scores in baselines_from.baselines.items()
            },
            recipes=recipes,
            gain=None if self.summary().average is None else self.gain(),
            recipe_gains=whole.gains() if whole else None,
        )

    def save(self, folder: Path | str | None = None) -> Path:
        """Write the frame (parquet and CSV) and the notes into a folder, by default the result's, and return it."""
        home = self._write_tables(folder)
        notes = replace(self.notes, recipes=self._recipe_folders(home))
        content = json.loads(json.dumps(asdict(notes), default=str))  # layers become strings, as in the file
        write_file(home / "sweep.json", sealed(content))
        return home

    def _recipe_folders(self, home: Path) -> dict[str, str]:  # noqa: ARG002
        """Return the folder of each recipe, relative to the result's."""
        return {}

    @classmethod
    def load(cls, folder: Path | str) -> SweepResult:
        """Return the result that :meth:`save` wrote; a ``RecipesResult`` if the sweep had several recipes.

        Raises:
            OptionError: the result is absent or unreadable.
        """
        folder = Path(folder)
        notes = read_artifact(folder / "sweep.json", read_notes)
        if notes is not None and notes.recipes:
            parts = {name: SweepResult.load(folder / place) for name, place in notes.recipes.items()}
            return RecipesResult.of(parts, folder)
        frame = read_artifact(folder / "frame.parquet", read_frame)
        if frame is None or notes is None:
            raise OptionError(
                f"`folder` must be the --out of a sweep, but {folder} has no readable frame.parquet and sweep.json. "
                "Run the sweep again: it resumes."
            )
        resamples = read_artifact(folder / "resamples.parquet", read_resamples)
        return cls(frame, folder, notes, **({} if resamples is None else {"resamples": resamples}))


@dataclass(frozen=True)
class RecipesResult(SweepResult):
    """Scores and metrics of every layer under every recipe; its summary and page are those of the best recipe.

    Attributes:
        frame: as in :class:`SweepResult`, with the column ``recipe``.
        folder: folder of all results, with one folder per recipe.
        notes: notes of the best recipe, with the baselines, which are scored once.
        parts: the result of each recipe by name.
    """

    parts: Mapping[str, SweepResult]

    @classmethod
    def of(cls, parts: Mapping[str, SweepResult], folder: Path) -> RecipesResult:
        """Return the combined result of several recipes."""
        first = next(iter(parts.values()))
        frame = pl.concat(part.frame.with_columns(recipe=pl.lit(name)) for name, part in parts.items())
        summaries = _summaries(parts)
        best = parts[best_recipe(summaries)] if summaries else first
        notes = replace(best.notes, baselines=first.notes.baselines, missing=first.notes.missing)
        return cls(frame, folder, notes, parts, resamples=best.resamples)

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
        """Failed tasks, with the recipe's name, and their errors."""
        return {f"{task} ({name})": error for name, part in self.parts.items() for task, error in part.failures.items()}

    def summaries(self) -> dict[str, Summary]:
        """Return the summary of each recipe that has scores."""
        summaries = _summaries(self.parts)
        if not summaries:
            raise OptionError("No layer of any recipe was scored on every task: see `failures`, or sweep again.")
        return summaries

    def gains(self) -> dict[str, tuple[Gain, Gain]]:
        """Return the gains of each recipe's best layer over the best and over the last layer of the plain text.

        Without a plain recipe, they are gains over the recipe's own layers.
        """
        summaries = self.summaries()
        gains = {}
        for name in summaries:
            base = PLAIN if PLAIN in summaries else name
            best = cast(Curve, summaries[base].average).best_layer
            part, other = self.parts[name], self.parts[base]
            gains[name] = part.gain(over=best, other=other), part.gain(other=other)
        return gains

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
        """Return the figures by name: ``recipes``, and ``scores`` of the best recipe."""
        return {"recipes": self.plot(), "scores": self.winner.plot()}

    def html(self) -> str:
        """Return the self-contained page."""
        return self.winner._page(self.failures, self)

    def _recipe_folders(self, home: Path) -> dict[str, str]:
        return {name: os.path.relpath(part._home(), home) for name, part in self.parts.items()}


def _average(part: SweepResult) -> float | None:
    if part.frame.filter(pl.col("kind") == "score", pl.col("value").is_finite()).is_empty():
        return None
    average = part.summary().average
    return None if average is None or math.isnan(average.best) else average.best


def _summaries(parts: Mapping[str, SweepResult]) -> dict[str, Summary]:
    return {name: part.summary() for name, part in parts.items() if _average(part) is not None}


def without_nan(baselines: Baselines) -> dict[str, dict[str, float]]:
    """Return the scores of baselines without NaN, as the frame has no row for a layer without a score.

    Example:
        >>> without_nan({"TF-IDF": {"A": 0.5, "B": float("nan")}, "BM25": {"B": float("nan")}})
        {'TF-IDF': {'A': 0.5}}
    """
    finite = {
        name: {task: score for task, score in scores.items() if not math.isnan(score)}
        for name, scores in baselines.items()
    }
    return {name: scores for name, scores in finite.items() if scores}


def read_notes(path: Path) -> Notes:
    """Return the notes of a sweep from its ``sweep.json``."""
    values = parse_json_object(read_text_file(path, OptionError), str(path), OptionError)
    if "checksum" in values:  # since 0.3
        values = unsealed(values)
    for name in ("parameters", "seconds"):
        values[name] = {int(layer): value for layer, value in values[name].items()}
    types = {"dimensions": int, "missing": list, "model": str, "remarks": list, "site": str, "title": str}
    for name in (each.name for each in fields(Notes)):
        expected = types.get(name, dict)
        if not isinstance(values.get(name, expected()), expected):
            raise TypeError(f"{name} is not a {expected.__name__}")
    values["baselines"] = without_nan(values.get("baselines", {}))
    options = values.get("options", {})
    if removed := removed_fields(str(options.get("recipe"))):  # swept with 0.2
        values["options"] = {**removed, **{name: value for name, value in options.items() if name != "recipe"}}
    return Notes(**values)


def task_labels(names: Sequence[str]) -> dict[str, str]:
    """Return the names of tasks without the digests of their data, if they stay distinct."""
    labels = {name: task_label(name) for name in names}
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


def export_lines(notes: Notes, layer: int | list[int]) -> dict[str, str]:
    """Return the lines that create the encoder of a layer, or of several, in Python and in a shell."""
    requested: LayerArgument = layer
    if notes.towers and isinstance(layer, int):
        from midlayer_encoders.models.anatomy import paired_layers  # it imports torch, which a board does not need

        requested = dict(paired_layers(layer, notes.towers))
    transforms = dict(notes.vectors)
    center = transforms.pop("center", "")
    options = EncoderOptions(**notes.options, **transforms)
    out = "layer-" + str(layer).strip("[]").replace(", ", "-")
    python = python_line(notes.model, requested, options)
    shell = shell_line(notes.model, requested, options, out=out)
    if center:
        python = f"{python.removesuffix(')')}, center=read_texts({center!r}))"
        shell, _, name = shell.rpartition(" --out ")  # a template may contain it too
        shell = f"{shell} --center {shell_path(center)} --out {name}"
    return {"Python": f'{python}.save_pretrained("{out}")', "shell": shell}
