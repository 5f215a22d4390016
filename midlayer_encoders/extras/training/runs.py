"""A training run: its folder, the scores of every layer before and after it, and its result."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import polars as pl
from sentence_transformers import SentenceTransformer

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.encoder.choosing import check_own
from midlayer_encoders.encoder.saving import check_export
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary, short_repr
from midlayer_encoders.extras.settings import RUN_FILE, TrainingSettings
from midlayer_encoders.extras.training.fitting import METRICS, TrainingRecord, read_record, train, write_record
from midlayer_encoders.extras.training.tuning_page import plot_tuning, tuning_sections, tuning_words
from midlayer_encoders.files import folder_lock, read_json, write_file
from midlayer_encoders.frame.schema import tidy_frame
from midlayer_encoders.frame.tidy_result import write_frame
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.report.pages import block, page_html
from midlayer_encoders.report.results import Result, versions
from midlayer_encoders.sweeping import SweepSettings, sweep
from midlayer_encoders.sweeping.sweep_result import task_labels
from midlayer_encoders.tasks.training_rows import TrainingRows

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import nn


@dataclass(frozen=True)
class TuneResult(Result):
    """A cut and trained encoder.

    Attributes:
        frame: tidy frame with the scores of every layer; ``revision`` is ``"before"``, ``"after"`` or ``"teacher"``.
        folder: output folder.
        encoder: the trained encoder.
        trained: losses and metrics of the callback by step.
        how: settings of the run.
        notes: caveats, such as tasks that failed.
    """

    folder: Path
    encoder: LayerEncoder
    trained: TrainingRecord
    how: Mapping[str, str]
    notes: Sequence[str] = ()

    trained_how: ClassVar[str] = "tuned"

    @property
    def model_folder(self) -> Path:
        """The encoder as a plain folder that any ``SentenceTransformer`` loads."""
        return self.folder / "model"

    def words(self) -> str:
        """Return a summary of the changes in one or two sentences."""
        return tuning_words(self.frame, self.trained.losses)

    def plots(self) -> dict[str, Figure]:
        """Return the figures by name: ``scores`` if there are tasks."""
        return {} if self.frame.is_empty() else {"scores": plot_tuning(self.frame)}

    def html(self) -> str:
        """Return the self-contained page."""
        encoder = self.encoder
        title = f"{encoder.name} cut at layer {encoder.layer} of {encoder.num_layers} and {self.trained_how}"
        folder = json.dumps(str(self.model_folder))
        code = f"from sentence_transformers import SentenceTransformer\nSentenceTransformer({folder})"
        sections = tuning_sections(self.frame, self.trained.losses, self.trained.metrics)
        sections = {"Use it": [block("code", {"": code})], **sections, "How it was made": [block("facts", self.how)]}
        return page_html(title, [self.words()], sections, notes=self.notes)

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the frames by file name."""
        return {**super().tables(), "losses.csv": self.trained.losses}


@dataclass(frozen=True)
class DistillResult(TuneResult):
    """A cut encoder that was trained on the vectors of a teacher; the fields are as in ``TuneResult``."""

    trained_how: ClassVar[str] = "distilled"


T = TypeVar("T", bound=TuneResult)

_RECORD_FILE = "trained.json"


@dataclass
class Run:
    """A training run and its folder.

    Attributes:
        encoder: to train.
        rows: to train on.
        settings: of the training.
        folder: output folder.
        tasks: scored before and after; ``None`` for none.
        progress: called with the stages.
        frames: scores so far.
        notes: on tasks that failed.
    """

    encoder: LayerEncoder
    rows: TrainingRows
    settings: TrainingSettings
    folder: Path
    tasks: Any
    progress: Progress | None
    frames: list[pl.DataFrame] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def claim(self, **identity: str) -> Iterator[None]:
        """Lock the folder, and raise if it belongs to a run with another identity."""
        with folder_lock(self.folder):
            _claim_folder(self.folder, {**self.identity, **identity})
            yield

    @property
    def identity(self) -> dict[str, Any]:
        """The fields that distinguish runs: a folder belongs to one of them."""
        learning_rate = self.settings.peak_learning_rate
        encoder = self.encoder.spec.digest
        return {"rows": self.rows.digest, "encoder": encoder, **asdict(self.settings), "learning_rate": learning_rate}

    def score(self, when: str, encoder: LayerEncoder, layers: Sequence[int] | str = "all") -> None:
        """Score layers of an encoder on the tasks, if there are any."""
        progress = self.progress
        if self.tasks is None:
            return
        report = None if progress is None else lambda stage, *done: progress(f"{when}: {stage}", *done)
        # One worker: mteb confirms little here, and starting processes would take longer.
        settings = SweepSettings(workers=1)
        out = self.folder / when
        result = sweep(encoder, self.tasks, layers=layers, out=out, baselines=False, progress=report, settings=settings)
        labels = task_labels(result.frame["dataset"].unique().to_list())
        self.frames.append(result.scores.with_columns(pl.col("dataset").replace(labels), revision=pl.lit(when)))
        self.notes.extend(f"{task} failed {when}: {error}" for task, error in result.failures.items())

    def train(self, make_loss: Callable[[LayerEncoder], nn.Module], how: Mapping[str, str], made: type[T]) -> T:
        """Train, score every layer before and after, and save the result, of the class ``made``."""
        encoder = self.encoder
        self.score("before", encoder)
        record = self._train_or_load(make_loss)
        self.score("after", encoder)
        num_parameters = sum(parameter.numel() for parameter in encoder.parameters())
        how = {
            **how,
            **record.words,
            "Layer": f"{encoder.layer} of {encoder.num_layers}",
            "Parameters": f"{num_parameters / 1e6:.1f}M",
            **versions(),
        }
        frame = pl.concat(self.frames) if self.frames else tidy_frame([])
        result = made(frame, self.folder, encoder, record, how, tuple(self.notes))
        result.save()
        return result

    def _train_or_load(self, make_loss: Callable[[LayerEncoder], nn.Module]) -> TrainingRecord:
        """Train the encoder and save its plain folder, or load the weights and the record of a complete run."""
        encoder = self.encoder
        folder = self.folder
        model_folder = folder / "model"
        record = read_record(folder / _RECORD_FILE) if model_folder.is_dir() else None
        if record is not None:
            trained = SentenceTransformer(str(model_folder), device="cpu", trust_remote_code=encoder.needs_trust())
            encoder.load_state_dict(trained.state_dict())
        else:
            stage = Stage(self.progress, "training")
            with isolated_random():
                record = train(encoder, self.rows, make_loss, self.settings, folder, stage)
            encoder.save_pretrained(str(model_folder))
            write_frame(record.metrics, folder / METRICS)
            write_record(record, folder / _RECORD_FILE)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # each takes three times the space of the weights
        return record


def cut_encoder(model: str | LayerEncoder, layer: Layer | None, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the cut encoder, in float32 by default: half precision would lose small steps."""
    if options.get("center"):
        raise OptionError(
            "`center` must be left out: it is fitted to vectors that training changes. Apply it after training."
        )
    if isinstance(model, LayerEncoder):
        encoder = model
        check_own(encoder, options)
        if layer is not None and resolve_layer(layer, encoder.num_layers, name=encoder.name) != encoder.layer:
            raise OptionError(f"`layer` must be None or {encoder.layer} for this encoder, but got {short_repr(layer)}.")
    elif layer is None:
        raise OptionError("`layer` must be given if `model` is a name or folder, but got None.")
    else:
        encoder = LayerEncoder(model, layer, **{"dtype": "float32", **options})
    if encoder.media != ["text"]:
        raise OptionError(f"`model` must be a text-only model, but got {' and '.join(encoder.media)}.")
    check_export(encoder)  # raises if the tuned encoder could not be saved
    return encoder


def _claim_folder(folder: Path, run: dict[str, Any]) -> None:
    """Write the settings of a run, or raise if the folder belongs to another run."""
    run = json.loads(json.dumps(run))  # tuples become lists, as in the file
    path = folder / RUN_FILE
    if not path.exists():
        write_file(path, json.dumps(run, indent=2).encode())
        return
    try:
        previous = dict(read_json(path))
    except (ValueError, TypeError, RecursionError) as error:  # the checkpoints may belong to any run
        raise MidlayerError(
            f"{path} cannot be read ({error_summary(error)}): remove {folder}, or choose another folder."
        ) from error
    if previous != run:
        changed = ", ".join(name for name in run if previous.get(name) != run[name])
        raise OptionError(
            f"`out` must be a new folder, or hold a run with the same arguments, but the run in {folder} had other "
            f"values of: {changed}. Choose another folder, or remove this one."
        )
