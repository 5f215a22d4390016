"""Measure every layer at every checkpoint of a model's training, and store each checkpoint at once."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
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


@dataclass(frozen=True)
class _StepIdentity:
    """The settings that a step's file name is hashed from; renaming a field would orphan the files of 0.2."""

    model: str
    metrics: str | tuple[str, ...]
    layers: str | tuple[Layer, ...]
    views: int
    seed: int
    dataset: str
    texts: str  # digest
    options: dict[str, Any]

    def key(self, checkpoint: Checkpoint) -> str:
        """Return twelve hexadecimal digits that depend on every setting and on the checkpoint's files."""
        return content_digest(json.dumps([asdict(self), checkpoint.fingerprint], sort_keys=True))


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
    changed checkpoint is measured anew. A revision that fails is listed in ``failures``, and the run continues.

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
        raise OptionError(
            f"`revision` must be left out, because `revisions` names them, but got {encoder_options.revision!r}."
        )
    texts = check_texts("texts", texts, minimum=2)
    seed = check_seed(seed)
    check_text("dataset", dataset)
    check_path("out", out)
    check_progress(progress)
    if executor is not None and out is None:
        raise OptionError("`out` must be a folder with an executor: its processes write their steps there.")
    _, num_views = extra_passes(metrics, views=views)  # rejects an unknown metric before anything is loaded
    checkpoints = find_checkpoints(model, revisions, trust_remote_code=encoder_options.trust_remote_code)
    identity = _StepIdentity(
        model=base_name(model),
        metrics=metrics if isinstance(metrics, str) else tuple(metrics),
        layers=layers if isinstance(layers, str) else tuple(layers),
        views=views,
        seed=seed,
        dataset=dataset,
        texts=content_digest(json.dumps(texts)),
        options=encoder_options.recreating(),
    )
    text_views = augment(texts, views=num_views, seed=seed) if num_views else []
    folder = Path(out) if out is not None else None
    absolute = None if folder is None else folder.absolute()  # for jobs
    measurer = _CheckpointMeasurer(identity, texts, text_views, absolute, encoder_options)
    how = {
        "texts": f"{len(texts)} ({dataset}, digest {identity.texts})",
        "views": f"seed {seed}",
        "norm": "final",
        "pooling": "mean",
        **{name.replace("_", " "): str(value) for name, value in identity.options.items()},
        **versions(),
    }
    names = [checkpoint.name for checkpoint in checkpoints]
    with nullcontext() if folder is None else folder_lock(folder):
        errors: dict[str, str] = {}
        if executor is not None and folder is not None:
            from midlayer_encoders.extras.scaling.units import run_units

            units = [_CheckpointUnit(measurer, checkpoint) for checkpoint in checkpoints]
            failed = run_units(units, executor, stage=Stage(progress, "units"))
            errors = {unit.label: str(error) for unit, error in failed.items()}
            checkpoints = [checkpoint for checkpoint in checkpoints if checkpoint.name not in errors]
            progress = None  # the steps are read from their files
        frames, new_errors = measurer.measure(checkpoints, progress)
        errors |= new_errors
        failures = {name: errors[name] for name in names if name in errors}
        if not frames:
            raise MidlayerError("No revision could be measured. " + "; ".join(f"{k}: {v}" for k, v in failures.items()))
        frame = pl.concat([frames[name] for name in names if name in frames])
        result = ProgressionResult(frame, folder, how, failures)
        if folder is not None:
            result.save()
    return result


@dataclass(frozen=True)
class _CheckpointMeasurer:
    """Measures one checkpoint after the other."""

    identity: _StepIdentity
    texts: Sequence[str]
    views: Sequence[Sequence[str]]
    folder: Path | None
    options: EncoderOptions

    def measure(
        self, checkpoints: Sequence[Checkpoint], progress: Progress | None
    ) -> tuple[dict[str, pl.DataFrame], dict[str, str]]:
        """Return the frames of the checkpoints by name, and the errors of those that failed."""
        frames: dict[str, pl.DataFrame] = {}
        failures: dict[str, str] = {}
        count = num_passes(self.identity.metrics, views=self.identity.views) * len(self.texts)
        for position, checkpoint in enumerate(checkpoints):
            stage = Stage(progress, checkpoint.name, count * len(checkpoints), count * position)
            try:
                make = partial(self._measure, checkpoint, stage, count)
                path = self.path(checkpoint)
                frames[checkpoint.name] = make() if path is None else kept_frame(path, make)
                if (rest := count * (position + 1) - stage.done) > 0:  # the frame was read from its file
                    stage.step(rest)
            except (OptionError, TooFewTextsError, *FATAL):  # every step would fail alike
                raise
            except Exception as error:
                failures[checkpoint.name] = error_summary(error)
        return frames, failures

    def path(self, checkpoint: Checkpoint) -> Path | None:
        """Return the file of a checkpoint's frame; ``None`` if nothing is written."""
        if self.folder is None:
            return None
        return self.folder / "steps" / f"step{checkpoint.step}.{self.identity.key(checkpoint)}.parquet"

    def _measure(self, checkpoint: Checkpoint, stage: Stage, count: int) -> pl.DataFrame:
        start = stage.done

        def report(name: str, tokens: int, all_tokens: int) -> None:
            if name == "measuring":
                stage.step(start + count * tokens // max(all_tokens, 1) - stage.done)

        gc.collect()  # an encoder and its model card refer to each other, so the previous one is still in memory
        options = {**self.options.changed(), "revision": checkpoint.revision}
        encoder = complete_encoder(LayerEncoder, checkpoint.source, options)
        frame = measure(
            encoder,
            self.texts,
            metrics=self.identity.metrics,
            layers=self.identity.layers,
            views=self.views or self.identity.views,
            seed=self.identity.seed,
            dataset=self.identity.dataset,
            progress=report,
        )
        return frame.with_columns(model=pl.lit(self.identity.model), revision=pl.lit(f"step{checkpoint.step}"))


@dataclass(frozen=True, eq=False)
class _CheckpointUnit:
    """Measures one checkpoint and writes its step, in a process of an executor."""

    measurer: _CheckpointMeasurer
    checkpoint: Checkpoint

    @property
    def label(self) -> str:
        """The name of the checkpoint."""
        return self.checkpoint.name

    @property
    def is_done(self) -> bool:
        """Whether the step is written."""
        path = self.measurer.path(self.checkpoint)
        return path is not None and path.is_file()

    def run(self) -> None:
        """Measure the checkpoint."""
        _, failures = self.measurer.measure([self.checkpoint], None)
        for error in failures.values():
            raise MidlayerError(error)
