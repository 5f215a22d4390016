"""Metrics by layer while a model learns: one checkpoint after the other, each kept as soon as it is measured."""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import polars as pl

from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.comparing.checkpoints import Checkpoint, find_checkpoints
from midlayer_encoders.encoder.choosing import measure
from midlayer_encoders.encoder.options import EncoderKeywords, EncoderOptions, make_options
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import base_name
from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError, error_summary
from midlayer_encoders.files import check_links, folder_lock
from midlayer_encoders.frame import layer_changes, settled
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.metrics import TooFewTextsError
from midlayer_encoders.report import plot_steps_change, plot_steps_curves, plot_steps_heat
from midlayer_encoders.report.results import Result, kept_frame
from midlayer_encoders.report.training_page import steps_html, steps_words
from midlayer_encoders.report.versions import versions
from midlayer_encoders.validation import check_path, check_progress, check_seed, check_text, check_texts
from midlayer_encoders.views.text_views import augment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ProgressionResult", "progression"]


@dataclass(frozen=True)
class ProgressionResult(Result):
    """Metrics of every layer at every step.

    Attributes:
        frame: tidy; ``revision`` is ``"step512"``.
        folder: where everything was written; ``None`` where nothing was.
        how: how it was measured.
        failures: revisions that could not be measured, and why.
    """

    how: Mapping[str, str]
    failures: Mapping[str, str] = field(default_factory=dict)

    made_by: ClassVar[str] = "progression"

    def changes(self) -> pl.DataFrame:
        """Return how much each layer changes between successive steps; see :func:`layer_changes`."""
        return layer_changes(self.frame)

    def settled(self, *, within: float = 0.1) -> pl.DataFrame:
        """Return the step from which on each layer stays near its final value; see :func:`settled`."""
        return settled(self.frame, within=within)

    def words(self) -> list[str]:
        """Return what the history says of early, middle and late layers, in a sentence or two."""
        return steps_words(self.frame)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``curves``, ``heat`` and ``change``."""
        return {
            "curves": plot_steps_curves(self.frame),
            "heat": plot_steps_heat(self.frame),
            "change": plot_steps_change(self.frame),
        }

    def html(self) -> str:
        """Return the self-contained page."""
        notes = [f"{name} failed: {error}" for name, error in self.failures.items()]
        return steps_html(self.frame, title=f"{self.frame['model'][0]} learns", how=self.how, notes=notes)

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return frame (parquet and CSV), changes and settled steps by file name."""
        return {**super().tables(), "changes.csv": self.changes(), "settled.csv": self.settled()}


@dataclass(frozen=True)
class _Settings:
    """Everything that a checkpoint's numbers depend on, besides the checkpoint."""

    model: str
    metrics: str | tuple[str, ...]
    layers: str | tuple[Layer, ...]
    views: int
    seed: int
    dataset: str
    texts: str
    options: dict[str, Any]

    def key(self, checkpoint: Checkpoint) -> str:
        """Return twelve hexadecimal digits that differ whenever a setting, or the checkpoint's files, do."""
        parts = json.dumps([asdict(self), checkpoint.fingerprint], sort_keys=True)
        return hashlib.blake2b(parts.encode(), digest_size=6).hexdigest()


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
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> ProgressionResult:
    """Return the metrics of every layer at every step of a model's training, as the paper's Figures 4 and 11 show them.

    One model is in memory at a time. All steps see the same texts and the same views of them. With ``out``, each step's
    frame is written as soon as it is measured, so a run that was killed goes on where it stopped; another model,
    option, text or changed checkpoint is measured anew. A revision that fails is named in ``failures``, the others go
    on.

    Args:
        model: name on the hub, or a folder with sub-folders such as ``checkpoint-500`` or ``step500``.
        revisions: on the hub, such as ``["step1", "step512"]``; in a folder, names or steps of sub-folders, ``None``
            for all; or paths of folders.
        texts: what to pass through the model.
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or some.
        views: number of views of each text for LiDAR.
        seed: of the views.
        dataset: what the frame calls the texts.
        out: folder for steps as they are measured, frame, figures and page; ``None`` writes nothing.
        progress: called after each batch, with the revision as the stage and the texts of all revisions as steps.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``norm`` is ``"none"`` here, as in the paper.

    Raises:
        OptionError: fewer than two texts or revisions, a revision twice or not there, different numbers of blocks.
        MidlayerError: when every revision failed.
    """
    given = make_options(options, norm="none")
    if given.revision is not None:
        raise OptionError(f"`revision` must be left out, since `revisions` names them, but got {given.revision!r}.")
    texts, seed = check_texts("texts", texts, minimum=2), check_seed(seed)
    check_text("dataset", dataset)
    check_path("out", out)
    check_progress(progress)
    passes = num_passes(metrics, views=views)  # a wrong name is refused before anything is read
    checkpoints = find_checkpoints(model, revisions, trust_remote_code=given.trust_remote_code)
    settings = _Settings(
        model=base_name(model), metrics=metrics if isinstance(metrics, str) else tuple(metrics),
        layers=layers if isinstance(layers, str) else tuple(layers), views=views, seed=seed, dataset=dataset,
        texts=_digest(texts), options=given.recreating(),
    )  # fmt: skip
    made = augment(texts, views=passes - 1, seed=seed) if passes > 1 else []
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_links(folder, [folder / "steps"])
    run = _Run(settings, texts, made, folder, given, progress)
    with nullcontext() if folder is None else folder_lock(folder):
        frames, failures = run.frames(checkpoints)
        result = ProgressionResult(pl.concat(frames), folder, _how(settings, len(texts)), failures)
        if folder is not None:
            result.save()
    return result


@dataclass(frozen=True)
class _Run:
    """One checkpoint after the other."""

    settings: _Settings
    texts: Sequence[str]
    views: Sequence[Sequence[str]]
    folder: Path | None
    options: EncoderOptions
    progress: Progress | None

    def frames(self, checkpoints: Sequence[Checkpoint]) -> tuple[list[pl.DataFrame], dict[str, str]]:
        """Return the frame of each checkpoint, and why others have none; raise where none has."""
        frames: list[pl.DataFrame] = []
        failures: dict[str, str] = {}
        passed = (1 + len(self.views)) * len(self.texts)
        for place, checkpoint in enumerate(checkpoints):
            stage = Stage(self.progress, checkpoint.name, passed * len(checkpoints), passed * place)
            try:
                frames.append(self._frame(checkpoint, stage))
            except (OptionError, TooFewTextsError, DiskFullError):  # the same at every step
                raise
            except Exception as error:
                failures[checkpoint.name] = error_summary(error)
        if not frames:
            raise MidlayerError("No revision could be measured. " + "; ".join(f"{k}: {v}" for k, v in failures.items()))
        return frames, failures

    def _frame(self, checkpoint: Checkpoint, stage: Stage) -> pl.DataFrame:
        """Return a checkpoint's frame: the one that was kept, or a new one that is kept at once."""
        if self.folder is None:
            return self._measured(checkpoint, stage)
        path = self.folder / "steps" / f"step{checkpoint.step}.{self.settings.key(checkpoint)}.parquet"
        end = stage.done + (1 + len(self.views)) * len(self.texts)
        frame = kept_frame(path, lambda: self._measured(checkpoint, stage))
        if stage.done < end:  # it was kept
            stage.step(end - stage.done)
        return frame

    def _measured(self, checkpoint: Checkpoint, stage: Stage) -> pl.DataFrame:
        how, before = self.settings, stage.done
        gc.collect()  # an encoder and its card hold each other, so the one before is still there
        encoder = LayerEncoder(checkpoint.source, -1, **{**self.options.changed(), "revision": checkpoint.revision})
        frame = measure(
            encoder, self.texts, metrics=how.metrics, layers=how.layers, views=self.views or how.views,
            dataset=how.dataset, progress=lambda _, done, __: stage.step(before + done - stage.done),
        )  # fmt: skip
        return frame.with_columns(model=pl.lit(how.model), revision=pl.lit(f"step{checkpoint.step}"))


def _digest(texts: Sequence[str]) -> str:
    return hashlib.blake2b(json.dumps(list(texts)).encode(), digest_size=6).hexdigest()


def _how(settings: _Settings, count: int) -> dict[str, str]:
    return {
        "texts": f"{count} ({settings.dataset}, digest {settings.texts})",
        "views": f"seed {settings.seed}",
        "norm": "final",
        "pooling": "mean",
        **{name.replace("_", " "): str(value) for name, value in settings.options.items()},
        **versions(),
    }
