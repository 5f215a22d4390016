"""Cut a model at a layer, tune it on pairs, and score every layer before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Unpack, cast

import polars as pl
from sentence_transformers import SentenceTransformer

from midlayer_encoders._deprecated import take_deprecated
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary, short_repr
from midlayer_encoders.files import LOCK, expand_home, folder_lock, read_json, write_file
from midlayer_encoders.frame.schema import tidy_frame
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.report.results import Result, versions, write_frame
from midlayer_encoders.report.training_page import plot_tuning, tuning_html, tuning_words
from midlayer_encoders.sweeping import SweepSettings, sweep
from midlayer_encoders.sweeping.sweep_result import task_labels
from midlayer_encoders.tasks import task_sources
from midlayer_encoders.tuning.trainer_internals import check_packages
from midlayer_encoders.tuning.training import (
    METRICS,
    TrainingRecord,
    TuneSettings,
    check_training,
    read_record,
    train,
    write_record,
)
from midlayer_encoders.tuning.training_pairs import TrainingPairs, read_pairs
from midlayer_encoders.validation import check_path, check_progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from mteb.abstasks import AbsTask


@dataclass(frozen=True)
class TuneResult(Result):
    """A cut and tuned encoder.

    Attributes:
        frame: tidy frame with the scores of every layer; ``revision`` is ``"before"`` or ``"after"``.
        folder: output folder.
        encoder: the tuned encoder.
        trained: losses and metrics of the callback by step.
        how: settings of the run.
        notes: caveats, such as tasks that failed.
    """

    folder: Path
    encoder: LayerEncoder
    trained: TrainingRecord
    how: Mapping[str, str]
    notes: Sequence[str] = ()

    made_by: ClassVar[str] = "tune"

    @property
    def model_folder(self) -> Path:
        """The tuned encoder as a plain folder that any ``SentenceTransformer`` loads."""
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
        return tuning_html(
            self.frame,
            self.trained.losses,
            self.trained.metrics,
            how=self.how,
            notes=self.notes,
            title=f"{encoder.name} cut at layer {encoder.layer} of {encoder.num_layers} and tuned",
            folder=str(self.model_folder),
        )

    def tables(self) -> dict[str, pl.DataFrame]:
        """Return the frames by file name."""
        return {**super().tables(), "losses.csv": self.trained.losses}


_RUN_FILE = "tuning.json"
_RECORD_FILE = "trained.json"
_DEPRECATED = {field.name: f"settings.{field.name}" for field in fields(TuneSettings)}


def tune(
    model: str | LayerEncoder,
    layer: Layer | None,
    pairs: Path | str | Sequence[Mapping[str, Any]],
    *,
    out: Path | str,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = "builtin",
    settings: TuneSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> TuneResult:
    """Cut a model at a layer, tune it on pairs, and return the encoder with the scores of every layer before and after.

    Args:
        model: folder or name on the hub of a text model, ``"built-in"``, or an encoder, which is tuned in place.
        layer: layer to cut at, as in :class:`LayerEncoder`; later blocks are neither loaded nor trained. ``None`` for
            an encoder, which is already cut.
        pairs: a file (JSONL, CSV, TSV, parquet) or a list of dicts; the columns determine the loss. With ``anchor`` and
            ``positive`` (or ``query`` and ``positive``, ``sentence1`` and ``sentence2``), the other positives of a
            batch are the negatives, in addition to ``negative``, ``negative_2``, and so on. With a ``score``, or a
            ``label`` of 0 or 1, the loss is CoSENT. With ``text`` and ``label``, texts of the same label are paired,
            and only texts of other labels are negatives.
        out: output folder: ``model`` (plain sentence-transformers), ``report.html``, frames, and the sweeps ``before``
            and ``after``. An interrupted run resumes when it is called again with the same arguments.
        tasks: as in :func:`~midlayer_encoders.sweep`, scored before and after; ``()`` for none.
        settings: settings of the training.
        progress: called with the stage ``"training"`` (in steps) and with those of the sweeps, such as
            ``"before: scoring"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``dtype`` is ``"float32"`` by default. On a GPU,
            training uses autocast in bfloat16.

    Raises:
        OptionError: for invalid arguments, or if ``out`` holds other files.
        TaskFileError: for pairs that cannot be trained on.
    """
    replaced = take_deprecated(cast(dict[str, Any], options), _DEPRECATED)
    settings = replace(settings or TuneSettings(), **replaced.get("settings", {}))
    check_packages(lora=bool(settings.lora))
    check_progress(progress)
    folder = _checked_folder(out)
    for name in ("center", "whiten", "embed_filter"):
        if options.get(name):
            raise OptionError(
                f"`{name}` must be left out: it is fitted to vectors that tuning changes. Apply it after tuning."
            )
    # Too few rows and unknown tasks raise before the model is loaded.
    training_pairs = read_pairs(pairs)
    training_pairs.split(settings.held_out, settings.seed)
    scored_tasks = tasks if (not isinstance(tasks, tuple) or tasks) and task_sources(tasks) else None
    encoder = _cut_encoder(model, layer, options)
    check_training(encoder, training_pairs, settings)
    run = _run_identity(training_pairs, encoder, settings)
    with folder_lock(folder):
        _claim_folder(folder, run)
        before, failed_before = _scores(encoder, scored_tasks, folder, "before", progress)
        stage = Stage(progress, "training")
        record = _train_or_load(encoder, folder, lambda: train(encoder, training_pairs, settings, folder, stage))
        after, failed_after = _scores(encoder, scored_tasks, folder, "after", progress)
        num_parameters = sum(parameter.numel() for parameter in encoder.parameters())
        how = {
            "Pairs": f"{training_pairs.name}, {len(training_pairs.rows)} rows",
            **record.words,
            "Layer": f"{encoder.layer} of {encoder.num_layers}",
            "Parameters": f"{num_parameters / 1e6:.1f}M",
            **versions(),
        }
        result = TuneResult(pl.concat([before, after]), folder, encoder, record, how, (*failed_before, *failed_after))
        result.save()
    return result


def _scores(
    encoder: LayerEncoder, tasks: Any, folder: Path, when: str, progress: Progress | None
) -> tuple[pl.DataFrame, list[str]]:
    """Return the scores of every layer, and notes on the tasks that failed; both are empty without tasks."""
    if tasks is None:
        return tidy_frame([]), []
    report = None if progress is None else lambda stage, *done: progress(f"{when}: {stage}", *done)
    # One worker: mteb confirms little here, and starting processes would take longer.
    result = sweep(
        encoder, tasks, out=folder / when, baselines=False, progress=report, settings=SweepSettings(workers=1)
    )
    labels = task_labels(result.frame["dataset"].unique().to_list())
    frame = result.frame.filter(pl.col("kind") == "score").with_columns(
        pl.lit(when).alias("revision"), pl.col("dataset").replace(labels)
    )
    return frame, [f"{task} failed {when}: {error}" for task, error in result.failures.items()]


def _cut_encoder(model: str | LayerEncoder, layer: Layer | None, options: EncoderKeywords) -> LayerEncoder:
    """Return the cut encoder, in float32 by default: half precision would lose small steps."""
    if isinstance(model, LayerEncoder):
        encoder = model
        encoder.check_own(options)
        if layer is not None and resolve_layer(layer, encoder.num_layers, name=encoder.name) != encoder.layer:
            raise OptionError(f"`layer` must be None or {encoder.layer} for this encoder, but got {short_repr(layer)}.")
    elif layer is None:
        raise OptionError("`layer` must be given if `model` is a name or folder, but got None.")
    else:
        encoder = LayerEncoder(model, layer, **{"dtype": "float32", **options})  # type: ignore[arg-type]
    if encoder.media != ["text"] or encoder.mixture:
        content = "several layers" if encoder.mixture else " and ".join(encoder.media)
        raise OptionError(f"`model` must be a text-only model cut at one layer, but got {content}.")
    encoder.check_export()  # raises if the tuned encoder could not be saved
    return encoder


def _checked_folder(out: Path | str) -> Path:
    """Return the folder of a run, or raise if it holds anything else."""
    check_path("out", out)
    if out is None:
        raise OptionError("`out` must be a folder, but got None.")
    folder = expand_home(out)
    names = {path.name for path in folder.glob("[!.]*")} if folder.is_dir() else set()
    if names - {LOCK} and _RUN_FILE not in names:  # a run that is killed immediately leaves a lock and hidden files
        raise OptionError(
            f"`out` must be a new or empty folder, or that of an earlier run, but {folder} holds other files."
        )
    return folder


def _run_identity(pairs: TrainingPairs, encoder: LayerEncoder, settings: TuneSettings) -> dict[str, Any]:
    """Return what distinguishes runs: a folder belongs to one of them."""
    learning_rate = settings.peak_learning_rate
    return {"pairs": pairs.digest, "encoder": encoder.spec.digest, **asdict(settings), "learning_rate": learning_rate}


def _claim_folder(folder: Path, run: dict[str, Any]) -> None:
    """Write the settings of a run, or raise if the folder belongs to another run."""
    run = json.loads(json.dumps(run))  # tuples become lists, as in the file
    path = folder / _RUN_FILE
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
            f"`out` must be a new folder, or that of a run with the same arguments, but the run in {folder} had other "
            f"values of: {changed}. Choose another folder, or remove this one."
        )


def _train_or_load(encoder: LayerEncoder, folder: Path, train_encoder: Callable[[], TrainingRecord]) -> TrainingRecord:
    """Tune an encoder and save its plain folder, or load the weights and the record of a complete run."""
    model_folder = folder / "model"
    record = read_record(folder / _RECORD_FILE) if model_folder.is_dir() else None
    if record is not None:
        tuned = SentenceTransformer(str(model_folder), device="cpu", trust_remote_code=encoder.needs_trust())
        encoder.load_state_dict(tuned.state_dict())
    else:
        with isolated_random():
            record = train_encoder()
        encoder.save_pretrained(str(model_folder))
        write_frame(record.metrics, folder / METRICS)
        write_record(record, folder / _RECORD_FILE)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # each takes three times the disk space of the weights
    return record
