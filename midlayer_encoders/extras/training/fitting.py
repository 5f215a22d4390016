"""Train an encoder with sentence-transformers' trainer: early stopping and resumable checkpoints."""

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import polars as pl
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, set_seed

from midlayer_encoders._types import MIN_MEASURED_TOKENS, POOLINGS, Stage
from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.extras.quantization import is_quantized
from midlayer_encoders.extras.settings import TrainingSettings, TuneSettings
from midlayer_encoders.extras.training import trainer_internals
from midlayer_encoders.files import (
    dump_with_checksum,
    file_checksums,
    make_folder,
    read_artifact,
    read_with_checksum,
    write_file,
)
from midlayer_encoders.frame.schema import tidy_frame
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.tasks.training_rows import TrainingRows

_CALLBACK_TEXTS = 64  # texts that the callback measures
_CALLBACK_CANDIDATES = 4096  # texts among which it takes the first that are long enough
METRICS = "metrics.parquet"
_LOSS_SCHEMA = {"step": pl.Int64, "loss": pl.Float64, "held_out": pl.Float64}


@dataclass(frozen=True)
class TrainingRecord:
    """The record of a training run.

    Attributes:
        losses: ``step, loss, held_out``, null at steps where they were not logged.
        metrics: the callback's frame.
        steps: number of steps that were run.
        best_step: step of the final weights.
        seconds: duration; of the last part if the run was resumed.
        words: the settings of the training, for the page.
    """

    losses: pl.DataFrame
    metrics: pl.DataFrame
    steps: int
    best_step: int
    seconds: float
    words: dict[str, str]


def write_record(record: TrainingRecord, path: Path) -> None:
    """Write the record of a run and the checksums of its other files, which exist already."""
    fields = {**vars(record), "losses": record.losses.to_dicts(), "files": _trained_files(path.parent)}
    del fields["metrics"]  # which have their own file
    write_file(path, dump_with_checksum(fields))


def read_record(path: Path) -> TrainingRecord | None:
    """Return the record of a run, with the metrics in the same folder, or ``None`` if it is absent or damaged.

    Raises:
        MidlayerError: the metrics or the model, in the same folder, were changed.
    """
    fields = read_artifact(path, read_with_checksum)
    if fields is None:
        return None
    actual = _trained_files(path.parent)
    for name, checksum in fields.pop("files").items():
        if actual.get(name) != checksum:
            raise MidlayerError(
                f"{path.parent / name} does not match its checksum: remove {path}, and run again to train once more."
            )
    losses = pl.DataFrame(fields.pop("losses"), schema=_LOSS_SCHEMA)
    return TrainingRecord(losses=losses, metrics=pl.read_parquet(path.with_name(METRICS)), **fields)


def _trained_files(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a complete run: its model, except the card, and the metrics."""
    model = {f"model/{name}": checksum for name, checksum in file_checksums(folder / "model").items()}
    model.pop("model/README.md", None)
    return {**model, **file_checksums(folder, METRICS)}


def train(
    encoder: LayerEncoder,
    rows: TrainingRows,
    make_loss: Callable[[LayerEncoder], nn.Module],
    settings: TrainingSettings,
    folder: Path,
    stage: Stage,
) -> TrainingRecord:
    """Tune an encoder in place and return the record of the run; an interrupted run resumes at its last checkpoint.

    Args:
        encoder: of texts.
        rows: to train on and to hold out.
        make_loss: returns the loss, once adapters are in place.
        settings: of the training.
        folder: for checkpoints and the callback's history.
        stage: of the steps.
    """
    from datasets import Dataset

    train_rows, held_out = rows.split(settings.held_out, settings.seed)
    loss_rows = train_rows.loss_rows(settings.seed)
    rank = settings.lora_rank
    set_seed(settings.seed)  # before adapters are initialized
    encoder.requires_grad_(True)  # merged PEFT adapters leave frozen weights
    if rank:
        trainer_internals.add_lora(encoder, rank)
    make_folder(folder / "checkpoints")
    last = _last_checkpoint(folder / "checkpoints")
    steps = settings.max_steps or math.ceil(math.ceil(len(loss_rows) / settings.batch_size) * settings.epochs)
    callback = _make_callback(encoder, [*(held_out.texts if held_out else ()), *train_rows.texts], settings, folder)
    args = _training_arguments(encoder, rows, loss_rows[0], settings, folder / "checkpoints", steps)
    args.eval_on_start = held_out is not None and last is None
    trainer = trainer_internals.WeightsTrainer(
        model=encoder,
        args=args,
        train_dataset=Dataset.from_list(loss_rows),
        eval_dataset=Dataset.from_list(held_out.loss_rows(settings.seed)) if held_out else None,
        loss=make_loss(encoder),
        callbacks=[_StepProgress(stage), *([_ResumablePatience(settings.patience)] if held_out else [])],
    )
    if callback is not None:
        callback.attach(trainer)
    trainer.remove_callback(PrinterCallback)
    num_trainable = sum(parameter.numel() for parameter in encoder.parameters() if parameter.requires_grad)
    seconds = 0.0
    if last is not None and trainer.is_complete(last, steps, settings.patience if held_out else None):
        trainer.restore_complete(last, callback)  # `train` would run another step
    else:
        with mock.patch.dict(vars(encoder.transformer.config)):  # to which the trainer copies special tokens
            seconds = float(trainer.train(resume_from_checkpoint=last).metrics["train_runtime"])
    trainer_internals.remove_autocast(encoder)
    if rank:
        trainer_internals.remove_lora(encoder)
    encoder.eval()
    if not all(bool(parameter.isfinite().all()) for parameter in encoder.parameters()):
        raise NotFiniteError(
            f"The weights of {encoder.name} became NaN or infinity in training with learning_rate="
            f"{settings.peak_learning_rate:g}. Pass a lower one, and another folder."
        )
    state = trainer.state
    best = Path(state.best_model_checkpoint).name.rpartition("-")[2] if state.best_model_checkpoint else ""
    words = {
        "Trained on": f"{len(loss_rows)} rows of {rows.kind}"
        + (f", {len(held_out.rows)} held out" if held_out else ""),
        "Loss": type(trainer.loss).__name__,
        "Trained parameters": f"{num_trainable:,}" + (f" (LoRA of rank {rank})" if rank else ""),
        "Batch size": str(settings.batch_size),
        "Learning rate": f"{settings.peak_learning_rate:g}",
        "Steps": f"{state.global_step} of at most {steps}",
        "Seed": str(settings.seed),
    }
    metrics = tidy_frame([]) if callback is None else callback.frame
    return TrainingRecord(_losses(state), metrics, state.global_step, int(best or state.global_step), seconds, words)


def check_training(
    encoder: LayerEncoder, settings: TrainingSettings, matryoshka: Sequence[int] = (), *, nested: bool = False
) -> None:
    """Raise if training could not begin; scoring every layer before it takes a while.

    Args:
        encoder: to train.
        settings: of the training.
        matryoshka: numbers of leading dimensions to train.
        nested: whether the loss can train them.
    """
    if is_quantized(encoder.transformer):
        raise OptionError(
            f"`quantization` must be None to tune {encoder.name}: quantized weights cannot be trained. Pass "
            "dtype='bfloat16' to save memory, or `lora`."
        )
    if settings.lora and encoder.layer == 0:
        raise OptionError(
            f"`lora` must be False for layer 0 of {encoder.name}: adapters change the linear layers of blocks, and "
            "it has none."
        )
    if encoder.truncate_dim is not None and encoder.truncate_dim not in matryoshka:
        cure = f"Pass matryoshka=[{encoder.truncate_dim}] too" if nested else "Pass it to the trained encoder instead"
        raise OptionError(
            f"`truncate_dim` must be left out: the loss is of whole vectors, not of {encoder.truncate_dim} of their "
            f"dimensions. {cure}."
        )
    if settings.lora:
        trainer_internals.check_lora(encoder)


def _make_callback(
    encoder: LayerEncoder, texts: list[str], settings: TrainingSettings, folder: Path
) -> LayerMetricsTrainerCallback | None:
    """Return the callback that measures every layer in training; ``None`` if the texts are too short."""
    if encoder.layer == 0:  # it has no block to read
        return None
    texts = texts[:_CALLBACK_CANDIDATES]
    counts = count_tokens(encoder, texts)
    long_texts = [text for text, count in zip(texts, counts, strict=True) if count >= MIN_MEASURED_TOKENS]
    if len(long_texts) < 2:
        return None
    metrics = ["prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "alignment"]
    if isinstance(settings, TuneSettings) and settings.objective == "pairs":
        # A language model's loss moves texts together, and a teacher's vectors may be closer than the student's.
        metrics.append("raw_uniformity")
    return LayerMetricsTrainerCallback(
        long_texts[:_CALLBACK_TEXTS],
        encoder.tokenizer,
        figures=False,
        dirpath=folder,
        pooling=encoder.pooling if encoder.pooling in POOLINGS else "mean",  # of several, the callback takes one
        metrics=metrics,
        seed=settings.seed,
        max_length=min(encoder.max_seq_length or 64, 64),
    )


def _training_arguments(
    encoder: LayerEncoder, rows: TrainingRows, row: dict[str, Any], settings: TrainingSettings, folder: Path, steps: int
) -> Any:
    is_cuda = encoder.device.type == "cuda"
    interval = max(steps // settings.checkpoints, 1) if settings.checkpoints else steps
    return SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=settings.batch_size,
        per_device_eval_batch_size=settings.batch_size,
        learning_rate=settings.peak_learning_rate,
        warmup_steps=steps // 10,
        batch_sampler=BatchSamplers.NO_DUPLICATES if rows.kind == "pairs" else BatchSamplers.BATCH_SAMPLER,
        prompts=_prompts(encoder, row),
        seed=settings.seed,
        bf16=is_cuda,
        use_cpu=encoder.device.type == "cpu",
        eval_strategy="steps" if settings.held_out else "no",
        eval_steps=interval,
        logging_steps=max(steps // 50, 1),
        save_strategy="steps" if settings.checkpoints else "no",
        save_steps=interval,
        load_best_model_at_end=bool(settings.held_out),
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=is_cuda,
    )


def _prompts(encoder: LayerEncoder, row: dict[str, Any]) -> dict[str, str] | None:
    """Return the prompt of each column: queries and documents may have different ones."""
    roles = {"anchor": "query", "positive": "document", "negative": "document"} if "label" not in row else {}
    prompts = {
        column: encoder.prompts.get(roles.get(column.partition("_")[0], "")) or encoder.default_prompt
        for column, cell in row.items()
        if isinstance(cell, str)
    }
    return prompts if any(prompts.values()) else None


def _last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint, and remove incomplete ones and those whose best checkpoint is missing.

    Raises:
        MidlayerError: a file of a checkpoint was changed.
    """
    complete = []
    for path in folder.glob("checkpoint-*"):
        checksums = read_artifact(path / trainer_internals.CHECKSUMS, read_with_checksum) or {"": ""}
        actual = file_checksums(path)
        if checksums.keys() - actual.keys():
            shutil.rmtree(path)
            continue
        if changed := [name for name, checksum in checksums.items() if actual[name] != checksum]:
            raise MidlayerError(
                f"{path / changed[0]} does not match its checksum: remove {folder}, and run again to train anew."
            )
        complete.append(path)
    names = {path.name for path in complete}
    for path in complete.copy():
        if trainer_internals.best_checkpoint(path) not in {None, *names}:
            shutil.rmtree(path)
            complete.remove(path)
    return str(max(complete, key=lambda path: int(path.name.rpartition("-")[2]))) if complete else None


def _losses(state: Any) -> pl.DataFrame:
    by_step: dict[int, dict[str, Any]] = {}
    for entry in state.log_history:
        for key, name in (("loss", "loss"), ("eval_loss", "held_out")):
            if key in entry:
                by_step.setdefault(entry["step"], {})[name] = float(entry[key])
    return pl.DataFrame([{"step": step, **values} for step, values in sorted(by_step.items())], schema=_LOSS_SCHEMA)


class _ResumablePatience(EarlyStoppingCallback):  # type: ignore[misc]
    """Early stopping that counts the evaluations before a resumed run too."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        super().on_train_begin(args, state, control, **keywords)
        self.early_stopping_patience_counter = trainer_internals.evaluations_since_best(state)


class _StepProgress(TrainerCallback):  # type: ignore[misc]
    """Reports each step."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.stage.expect(state.max_steps)
        self.stage.step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.stage.step()
