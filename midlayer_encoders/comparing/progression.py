"""Measure every layer at every checkpoint of a model's training, and store each checkpoint at once."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from midlayer_encoders._types import Layer, Progress, Stage, content_digest
from midlayer_encoders.comparing.checkpoints import Checkpoint, find_checkpoints
from midlayer_encoders.encoder.choosing import complete_encoder
from midlayer_encoders.encoder.options import EncoderOptions, make_options
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import base_name
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import FATAL, MidlayerError, OptionError, error_summary
from midlayer_encoders.files import folder_lock
from midlayer_encoders.frame.steps import layer_changes, settled
from midlayer_encoders.frame.tidy_result import kept_frame
from midlayer_encoders.metrics import TooFewTextsError
from midlayer_encoders.metrics.feeding import extra_passes, num_passes
from midlayer_encoders.metrics.text_views import augment
from midlayer_encoders.report import plot_steps_curves
from midlayer_encoders.report.results import Result, versions
from midlayer_encoders.report.training_page import steps_html, steps_words
from midlayer_encoders.validation import check_path, check_progress, check_seed, check_text, check_texts

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class ProgressionResult(Result):
    """Metrics of every layer at every step.

    Attributes:
        frame: tidy; ``revision`` is ``"step512"``.
        folder: output folder; ``None`` if nothing was written.
        how: settings of the measurement.
        failures: revisions that could not be measured, and the error of each.
    """

    how: Mapping[str, str]
    failures: Mapping[str, str] = field(default_factory=dict)

    def changes(self) -> pl.DataFrame:
        """Return how much each layer changes between successive steps; see :func:`layer_changes`."""
        return layer_changes(self.frame)

    def settled(self, *, within: float = 0.1) -> pl.DataFrame:
        """Return the step after which each layer stays near its final value; see :func:`settled`."""
        return settled(self.frame, within=within)

    def words(self) -> list[str]:
        """Return a summary of early, middle and late layers in one or two sentences."""
        return steps_words(self.frame)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``curves``."""
        return {"curves": plot_steps_curves(self.frame)}

    def html(self) -> str:
        """Return the self-contained page."""
        notes = [f"{name} failed: {error}" for name, error in self.failures.items()]
        return steps_html(
            self.frame, title=f"{self.frame['model'][0].removeprefix('local/')} learns", how=self.how, notes=notes
        )

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return frame (parquet and CSV), changes and settled steps by file name."""
        return {**super().tables(), "changes.csv": self.changes(), "settled.csv": self.settled()}


def progression(
    model: str,
    revisions: Sequence[str] | None = None,
    *,
    texts: Sequence[str],
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    views: int = 16,
    seed: int = 0,
    dataset: str = "texts",
    out: Path | str | None = None,
    executor: Any = None,
    progress: Progress | None = None,
    **options: Any,
) -> ProgressionResult:
    """Return the metrics of every layer at every step of a model's training, as in the paper's Figures 4 and 11.

    One model is in memory at a time. All steps read the same texts and the same views of them. With ``out``, each
    step's frame is written as soon as it is measured, so an interrupted run resumes; another model, option, text or
    changed checkpoint is measured again. A revision that fails is listed in ``failures``, and the run continues.

    Args:
        model: name on the hub, or a folder with sub-folders such as ``checkpoint-500`` or ``step500``.
        revisions: on the hub, such as ``["step1", "step512"]``; in a folder, names or steps of sub-folders, ``None``
            for all; or paths of folders.
        texts: two or more texts.
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or a list.
        views: number of views of each text for LiDAR.
        seed: for the views.
        dataset: name of the texts in the frame.
        out: folder for the frame of each step, the whole frame, figures and page; ``None`` writes nothing.
        executor: where checkpoints are measured: anything with ``submit(function, *arguments)`` that returns something
            with ``result()`` (``docs/scale.md``); ``None`` for this process. ``out`` is then a folder that all
            machines share.
        progress: called after each batch, with the revision as the stage and the texts of all revisions as steps;
            with an executor, with the stage ``"units"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``norm`` is ``"none"`` by default, as in the paper.

    Raises:
        OptionError: fewer than two texts or revisions, a duplicate or missing revision, different numbers of blocks.
        MidlayerError: every revision failed.
    """
    encoder_options = make_options(options, norm="none")
    if encoder_options.revision is not None:
        raise OptionError(f"`revision` cannot be combined with `revisions`, but got {encoder_options.revision!r}.")
    texts = check_texts("texts", texts, minimum=2)
    check_text("dataset", dataset)
    check_path("out", out)
    check_progress(progress)
    if executor is not None and out is None:
        raise OptionError("`out` must be a folder with an executor: its processes write their steps there.")
    _, num_views = extra_passes(metrics, views=views)  # rejects an unknown metric before anything is loaded
    checkpoints = find_checkpoints(model, revisions, trust_remote_code=encoder_options.trust_remote_code)
    settings: dict[str, Any] = {
        "metrics": metrics if isinstance(metrics, str) else tuple(metrics),
        "layers": layers if isinstance(layers, str) else tuple(layers),
        "views": views,
        "seed": check_seed(seed),
        "dataset": dataset,
    }
    text_views = augment(texts, views=num_views, seed=settings["seed"]) if num_views else []
    folder = None if out is None else Path(out)
    common = base_name(model), settings, texts, text_views, encoder_options, folder and folder.absolute()
    steps = [_Step(checkpoint, *common) for checkpoint in checkpoints]
    how = {
        "texts": f"{len(texts)} ({dataset}, digest {_texts_digest(texts)})",
        "views": f"seed {seed}",
        "norm": "final",
        "pooling": "mean",
        **{name.replace("_", " "): str(value) for name, value in encoder_options.recreating().items()},
        **versions(),
    }
    with nullcontext() if folder is None else folder_lock(folder):
        frames, failures = _measure_steps(steps, executor, progress)
        if not frames:
            raise MidlayerError("No revision could be measured. " + "; ".join(f"{k}: {v}" for k, v in failures.items()))
        result = ProgressionResult(pl.concat(frames), folder, how, failures)
        if folder is not None:
            result.save()
    return result


@dataclass(frozen=True, eq=False)
class _Step:
    """A checkpoint to measure; a unit of work for an executor.

    Attributes:
        checkpoint: the model at this step.
        model: name of the model in the frame.
        settings: arguments of :func:`~midlayer_encoders.measure`.
        texts: all texts.
        views: views of the texts, if a metric needs some.
        options: of the encoder.
        folder: absolute, ``None`` if nothing is written.
    """

    checkpoint: Checkpoint
    model: str
    settings: Mapping[str, Any]
    texts: Sequence[str]
    views: Sequence[Sequence[str]]
    options: EncoderOptions
    folder: Path | None

    @property
    def label(self) -> str:
        """The name of the checkpoint."""
        return self.checkpoint.name

    @property
    def num_inputs(self) -> int:
        """The number of texts that the model reads, with their copies and views."""
        return num_passes(self.settings["metrics"], views=self.settings["views"]) * len(self.texts)

    @property
    def path(self) -> Path | None:
        """The file of the frame, named by everything that changes it; ``None`` if nothing is written."""
        if self.folder is None:
            return None
        texts, options = _texts_digest(self.texts), self.options.recreating()
        identity = {**self.settings, "model": self.model, "texts": texts, "options": options}
        key = content_digest(json.dumps([identity, self.checkpoint.fingerprint], sort_keys=True))
        return self.folder / "steps" / f"step{self.checkpoint.step}.{key}.parquet"

    @property
    def is_done(self) -> bool:
        """Whether the frame is written."""
        return self.path is not None and self.path.is_file()

    def run(self) -> None:
        """Measure the checkpoint and write its frame, in a process of an executor."""
        self.frame(Stage(None, self.label))

    def frame(self, stage: Stage) -> pl.DataFrame:
        """Return the frame, from its file if it is written; ``stage`` counts the texts of all passes."""
        measure_step = partial(self._measure, stage)
        return measure_step() if self.path is None else kept_frame(self.path, measure_step)

    def _measure(self, stage: Stage) -> pl.DataFrame:
        start = stage.done

        def report(name: str, tokens: int, all_tokens: int) -> None:
            if name == "measuring":
                stage.step(start + self.num_inputs * tokens // max(all_tokens, 1) - stage.done)

        gc.collect()  # an encoder and its model card refer to each other, so the previous one is still in memory
        options = {**self.options.non_defaults(), "revision": self.checkpoint.revision}
        encoder = complete_encoder(LayerEncoder, self.checkpoint.source, options)
        settings = {**self.settings, "views": self.views or self.settings["views"], "progress": report}
        frame = measure(encoder, self.texts, **settings)
        return frame.with_columns(model=pl.lit(self.model), revision=pl.lit(f"step{self.checkpoint.step}"))


def _texts_digest(texts: Sequence[str]) -> str:
    return content_digest(json.dumps(texts))


def _measure_steps(
    steps: Sequence[_Step], executor: Any, progress: Progress | None
) -> tuple[list[pl.DataFrame], dict[str, str]]:
    """Return the frames of checkpoints, and the error of each that failed, by name."""
    errors: dict[str, str] = {}
    if executor is not None:
        from midlayer_encoders.extras.scaling.units import run_units

        failed = run_units(steps, executor, stage=Stage(progress, "units"))
        errors = {step.label: str(failed[step]) for step in steps if step in failed}
        progress = None  # the frames are read from their files
    frames = []
    for position, step in enumerate(steps):
        stage = Stage(progress, step.label, step.num_inputs * len(steps), step.num_inputs * position)
        try:
            if step.label not in errors:
                frames.append(step.frame(stage))
                if (rest := step.num_inputs * (position + 1) - stage.done) > 0:  # the frame was read from its file
                    stage.step(rest)
        except (OptionError, TooFewTextsError, *FATAL):  # every step would fail alike
            raise
        except Exception as error:
            errors[step.label] = str(error) if isinstance(error, MidlayerError) else error_summary(error)
    return frames, errors
