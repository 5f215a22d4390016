"""Train an encoder with sentence-transformers' trainer: losses, early stopping and resumable checkpoints."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from sentence_transformers import SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, set_seed

from midlayer_encoders._types import MIN_MEASURED_TOKENS, POOLINGS, Stage
from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from midlayer_encoders.errors import MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.files import file_checksums, make_folder, read_artifact, read_sealed, sealed, write_file
from midlayer_encoders.frame.schema import tidy_frame
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.tuning import trainer_internals
from midlayer_encoders.tuning.training_pairs import PairKind, TrainingPairs
from midlayer_encoders.validation import check_count, check_flag, check_list, check_number, check_seed

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


_SCALE = 20.0  # of a cosine, as in sentence-transformers' ranking loss


class LabelRankingLoss(nn.Module):
    """Rank the positive of each anchor above the positives of other labels in the batch.

    Unlike ``MultipleNegativesRankingLoss``, positives of the anchor's label are not negatives: with 77 labels and 32
    pairs per batch, four in ten anchors would have such a false negative.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        anchors, positives = (
            normalize(self.model(features)["sentence_embedding"], dim=-1) for features in sentence_features
        )
        diagonal = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        same_label = (labels[:, None] == labels[None]) & ~diagonal
        scores = (_SCALE * anchors @ positives.T).masked_fill(same_label, -torch.inf)
        return cross_entropy(scores, torch.arange(len(labels), device=labels.device))


_LOSSES: dict[PairKind, Callable[[Any], nn.Module]] = {
    "labels": LabelRankingLoss,
    "scored": losses.CoSENTLoss,
    "pairs": losses.MultipleNegativesRankingLoss,
}


def make_loss(encoder: LayerEncoder, kind: PairKind, settings: TuneSettings) -> nn.Module:
    """Return the loss: ranking among in-batch negatives, or the order of scores (CoSENT)."""
    mini_batch = settings.mini_batch
    adaptive = settings.adaptive
    if mini_batch is not None and (kind != "pairs" or adaptive):
        reason = "with `adaptive`" if adaptive else "for rows with scores or labels"
        raise OptionError(f"`mini_batch` must be None {reason}: it applies to in-batch negatives only.")
    loss: nn.Module
    if mini_batch is not None:
        loss = losses.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=check_count("mini_batch", mini_batch))
    else:
        loss = _LOSSES[kind](encoder)
    if settings.matryoshka is not None:
        loss = losses.MatryoshkaLoss(encoder, loss, _dimensions(settings.matryoshka, encoder))
    if adaptive:  # outermost, as in Matryoshka2dLoss
        if encoder.norm == "final" and encoder.anatomy.final:
            raise OptionError(
                f"`adaptive` must be False for {encoder.name} with norm='final': AdaptiveLayerLoss pools the raw "
                "states of earlier layers, but an encoder that is cut there applies the model's final norm "
                f"({', '.join(encoder.anatomy.final)}) to them. Pass norm='none', or tune each depth separately."
            )
        loss = losses.AdaptiveLayerLoss(encoder, loss)
    return loss


def _dimensions(matryoshka: Sequence[int], encoder: LayerEncoder) -> list[int]:
    """Return the numbers of dimensions to train, the whole width first."""
    width = encoder.get_embedding_dimension() or 0
    sizes = [check_count("matryoshka", size, "dimensions") for size in check_list("matryoshka", matryoshka, "numbers")]
    if max(sizes) > width:
        raise OptionError(f"`matryoshka` must be at most {width}, the width of {encoder.name}, but got {max(sizes)}.")
    return sorted({*sizes, width}, reverse=True)


_CALLBACK_TEXTS = 64  # texts that the callback measures
_CALLBACK_CANDIDATES = 4096  # texts among which it takes the first that are long enough
METRICS = "metrics.parquet"
_LOSS_SCHEMA = {"step": pl.Int64, "loss": pl.Float64, "held_out": pl.Float64}


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of :func:`~midlayer_encoders.tune`.

    Attributes:
        lora: train adapters of this rank (``True``: 16) in every linear layer, merged into the weights at the end;
            otherwise all weights are trained.
        epochs: passes over the pairs.
        max_steps: number of steps instead of ``epochs``.
        batch_size: pairs per step; a larger batch has more in-batch negatives.
        learning_rate: at its peak, after a tenth of the steps; 5e-5, or 5e-4 with ``lora``, by default.
        held_out: share of the pairs to hold out. Their loss chooses the checkpoint and stops the run early.
        patience: evaluations without a lower loss after which the run stops.
        checkpoints: number of evaluations and checkpoints over the run; 0 for none.
        mini_batch: rows in memory at a time, for batches that do not fit (``CachedMultipleNegativesRankingLoss``).
        matryoshka: numbers of leading dimensions to train in addition to all of them (``MatryoshkaLoss``).
        adaptive: train earlier layers too (``AdaptiveLayerLoss``); rejected if it reads other states than a cut does.
        seed: for every random draw.
    """

    lora: bool | int = False
    epochs: float = 1.0
    max_steps: int | None = None
    batch_size: int = 32
    learning_rate: float | None = None
    held_out: float = 0.1
    patience: int = 3
    checkpoints: int = 10
    mini_batch: int | None = None
    matryoshka: Sequence[int] | None = None
    adaptive: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        checked = {
            "lora": self.lora if isinstance(self.lora, bool) else check_count("lora", self.lora),
            "epochs": check_number("epochs", self.epochs, minimum=1e-6),
            "max_steps": None if self.max_steps is None else check_count("max_steps", self.max_steps, "steps"),
            "batch_size": check_count("batch_size", self.batch_size, "pairs", minimum=2),
            "learning_rate": None if self.learning_rate is None else check_number("learning_rate", self.learning_rate),
            "held_out": check_number("held_out", self.held_out, maximum=0.5),
            "patience": check_count("patience", self.patience),
            "checkpoints": check_count("checkpoints", self.checkpoints, minimum=0),
            "adaptive": check_flag("adaptive", self.adaptive),
            "seed": check_seed(self.seed),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.held_out and not self.checkpoints:
            raise OptionError("`held_out` must be 0 with checkpoints=0: its loss chooses the best checkpoint.")

    @property
    def peak_learning_rate(self) -> float:
        """The learning rate after warmup."""
        if self.learning_rate is not None:
            return self.learning_rate
        return 5e-4 if self.lora else 5e-5


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

    def to_json(self) -> dict[str, Any]:
        """Return everything but the metrics, which have their own file."""
        fields = {**vars(self), "losses": self.losses.to_dicts()}
        del fields["metrics"]
        return fields


def write_record(record: TrainingRecord, path: Path) -> None:
    """Write the record of a run and the checksums of its other files, which exist already."""
    write_file(path, sealed({**record.to_json(), "files": _trained_files(path.parent)}))


def read_record(path: Path) -> TrainingRecord | None:
    """Return the record of a run, with the metrics in the same folder, or ``None`` if it is absent or damaged.

    Raises:
        MidlayerError: the metrics or the model, in the same folder, were changed.
    """
    fields = read_artifact(path, read_sealed)
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
    encoder: LayerEncoder, pairs: TrainingPairs, settings: TuneSettings, folder: Path, stage: Stage
) -> TrainingRecord:
    """Tune an encoder in place and return the record of the run; an interrupted run resumes at its last checkpoint.

    Args:
        encoder: of texts.
        pairs: to train on and to hold out.
        settings: of the training.
        folder: for checkpoints and the callback's history.
        stage: of the steps.
    """
    from datasets import Dataset

    train_pairs, held_out = pairs.split(settings.held_out, settings.seed)
    rows = train_pairs.loss_rows(settings.seed)
    rank = 16 if settings.lora is True else int(settings.lora)
    set_seed(settings.seed)  # before adapters are initialized
    encoder.requires_grad_(True)  # merged PEFT adapters leave frozen weights
    if rank:
        trainer_internals.add_lora(encoder, rank)
    make_folder(folder / "checkpoints")
    last = _last_checkpoint(folder / "checkpoints")
    steps = settings.max_steps or math.ceil(math.ceil(len(rows) / settings.batch_size) * settings.epochs)
    callback = _make_callback(encoder, [*(held_out.texts if held_out else ()), *train_pairs.texts], settings, folder)
    args = _training_arguments(encoder, pairs, rows[0], settings, folder / "checkpoints", steps)
    args.eval_on_start = held_out is not None and last is None
    trainer = trainer_internals.WeightsTrainer(
        model=encoder,
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(held_out.loss_rows(settings.seed)) if held_out else None,
        loss=make_loss(encoder, pairs.kind, settings),
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
        with trainer_internals.unchanged_config(encoder.transformer):
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
        "Trained on": f"{len(rows)} rows of {pairs.kind}" + (f", {len(held_out.rows)} held out" if held_out else ""),
        "Loss": type(trainer.loss).__name__,
        "Trained parameters": f"{num_trainable:,}" + (f" (LoRA of rank {rank})" if rank else ""),
        "Batch size": str(settings.batch_size),
        "Learning rate": f"{settings.peak_learning_rate:g}",
        "Steps": f"{state.global_step} of at most {steps}",
        "Seed": str(settings.seed),
    }
    metrics = tidy_frame([]) if callback is None else callback.frame
    return TrainingRecord(_losses(state), metrics, state.global_step, int(best or state.global_step), seconds, words)


def check_training(encoder: LayerEncoder, pairs: TrainingPairs, settings: TuneSettings) -> None:
    """Raise if training could not begin; scoring every layer before it takes a while."""
    if settings.lora and encoder.layer == 0:
        raise OptionError(
            f"`lora` must be False for layer 0 of {encoder.name}: adapters change the linear layers of blocks, and "
            "it has none."
        )
    if encoder.truncate_dim is not None and encoder.truncate_dim not in (settings.matryoshka or ()):
        raise OptionError(
            f"`truncate_dim` must be left out, or be in `matryoshka` too: the loss is of whole vectors, not of "
            f"{encoder.truncate_dim} of their dimensions. Pass matryoshka=[{encoder.truncate_dim}]."
        )
    make_loss(encoder, pairs.kind, settings)
    if settings.lora:
        trainer_internals.check_lora(encoder)


def _make_callback(
    encoder: LayerEncoder, texts: list[str], settings: TuneSettings, folder: Path
) -> LayerMetricsTrainerCallback | None:
    """Return the callback that measures every layer in training; ``None`` if the texts are too short."""
    texts = texts[:_CALLBACK_CANDIDATES]
    long_texts = [
        text for text, count in zip(texts, count_tokens(encoder, texts), strict=True) if count >= MIN_MEASURED_TOKENS
    ]
    if len(long_texts) < 2:
        return None
    return LayerMetricsTrainerCallback(
        long_texts[:_CALLBACK_TEXTS],
        encoder.tokenizer,
        figures=False,
        dirpath=folder,
        pooling=encoder.pooling if encoder.pooling in POOLINGS else "mean",  # of several, the callback takes one
        metrics=["prompt_entropy", "dataset_entropy", "effective_rank", "curvature"],
        seed=settings.seed,
        max_length=min(encoder.max_seq_length or 64, 64),
    )


def _training_arguments(
    encoder: LayerEncoder, pairs: TrainingPairs, row: dict[str, Any], settings: TuneSettings, folder: Path, steps: int
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
        batch_sampler=BatchSamplers.NO_DUPLICATES if pairs.kind == "pairs" else BatchSamplers.BATCH_SAMPLER,
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
        checksums = read_artifact(path / trainer_internals.CHECKSUMS, read_sealed) or {"": ""}
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
