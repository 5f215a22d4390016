"""The run itself: sentence-transformers' trainer with early stopping, checkpoints to go on from, and our callback."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
from torch import nn
from transformers import EarlyStoppingCallback, PrinterCallback, TrainerCallback, set_seed

from midlayer_encoders._types import MIN_MEASURED_TOKENS, Stage
from midlayer_encoders.callbacks import LayerMetricsTrainerCallback
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.frame import tidy_frame
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.tuning.losses import batch_sampler, make_loss
from midlayer_encoders.tuning.trainer_internals import (
    WEIGHTS,
    WeightsTrainer,
    add_lora,
    check_lora,
    merge_lora,
    since_best,
    without_autocast,
)
from midlayer_encoders.tuning.training_pairs import Pairs
from midlayer_encoders.validation import check_count, check_flag, check_number, check_seed

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["METRICS", "Trained", "Training", "check_training", "read_trained", "train"]

_MEASURED = 64  # texts that the callback reads
_COUNTED = 4096  # texts of which these are the first that are long enough
METRICS = "metrics.parquet"
_LOSSES = {"step": pl.Int64, "loss": pl.Float64, "held_out": pl.Float64}
_RATES = {False: 5e-5, True: 5e-4}  # by whether adapters are trained


@dataclass(kw_only=True)
class Training:
    """The arguments of :func:`~midlayer_encoders.tuning.tune` that change what is learned, checked."""

    lora: bool | int
    epochs: float
    max_steps: int | None
    batch_size: int
    learning_rate: float | None
    held_out: float
    patience: int
    checkpoints: int
    mini_batch: int | None
    matryoshka: Sequence[int] | None
    adaptive: bool
    seed: int

    def __post_init__(self) -> None:
        self.batch_size = check_count("batch_size", self.batch_size, "pairs", minimum=2)
        self.patience, self.seed = check_count("patience", self.patience), check_seed(self.seed)
        self.checkpoints = check_count("checkpoints", self.checkpoints, minimum=0)
        self.held_out = check_number("held_out", self.held_out, maximum=0.5)
        self.epochs = check_number("epochs", self.epochs, minimum=1e-6)
        self.adaptive = check_flag("adaptive", self.adaptive)
        if self.max_steps is not None:
            self.max_steps = check_count("max_steps", self.max_steps, "steps")
        if not isinstance(self.lora, bool):
            self.lora = check_count("lora", self.lora)
        if self.learning_rate is None:
            self.learning_rate = _RATES[bool(self.lora)]
        self.learning_rate = check_number("learning_rate", self.learning_rate)
        if self.held_out and not self.checkpoints:
            raise OptionError(
                "`held_out` must be 0 with checkpoints=0: the best checkpoint is chosen by what it holds."
            )


@dataclass(frozen=True)
class Trained:
    """What a run left beside the weights.

    Attributes:
        losses: ``step, loss, held_out``, either of them null where it was not taken at a step.
        metrics: the callback's frame.
        steps: that were run.
        best_step: whose weights are kept.
        seconds: that it took, of the last part where it was resumed.
        words: what was trained.
    """

    losses: pl.DataFrame
    metrics: pl.DataFrame
    steps: int
    best_step: int
    seconds: float
    words: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Return everything but the metrics, which are a frame of their own."""
        known = {"steps": self.steps, "best_step": self.best_step, "seconds": self.seconds, "words": self.words}
        return known | {"losses": self.losses.to_dicts()}


def read_trained(path: Path) -> Trained:
    """Return what :meth:`Trained.to_json` gave, with the metrics that lie beside it."""
    kept = json.loads(path.read_text(encoding="utf8"))
    losses = pl.DataFrame(kept.pop("losses"), schema=_LOSSES)
    return Trained(losses=losses, metrics=pl.read_parquet(path.with_name(METRICS)), **kept)


def train(encoder: LayerEncoder, pairs: Pairs, training: Training, folder: Path, stage: Stage) -> Trained:
    """Tune an encoder in place, and return how that went; a run that was killed goes on from its last checkpoint.

    Args:
        encoder: of texts.
        pairs: that it is tuned on; a part of them is held out.
        training: how.
        folder: of checkpoints and of the callback's history.
        stage: of the steps.
    """
    kept, held_out = pairs.split(training.held_out, training.seed)
    data = kept.trained_on(training.seed)
    rank = 16 if training.lora is True else int(training.lora)
    set_seed(training.seed)  # before adapters are drawn
    encoder.requires_grad_(True)  # what PEFT merged adapters into it left frozen
    if rank:
        add_lora(encoder, rank)
    last = _last_checkpoint(folder / "checkpoints")
    steps = training.max_steps or math.ceil(math.ceil(len(data) / training.batch_size) * training.epochs)
    callback = _callback(encoder, [*(held_out.texts if held_out else ()), *kept.texts], training, folder)
    arguments = _arguments(encoder, data, training, folder / "checkpoints", steps)
    arguments.eval_on_start = held_out is not None and last is None
    trainer = WeightsTrainer(
        model=encoder,
        args=arguments,
        train_dataset=_dataset(data),
        eval_dataset=_dataset(held_out.trained_on(training.seed)) if held_out else None,
        loss=_loss(encoder, pairs, training),
        callbacks=[_Steps(stage), *([_Patience(training.patience)] if held_out else [])],
    )  # fmt: skip
    if callback is not None:
        callback.attach(trainer)
    trainer.remove_callback(PrinterCallback)
    trainable = sum(one.numel() for one in encoder.parameters() if one.requires_grad)
    seconds = 0.0
    if last is not None and trainer.had_ended(last, steps, training.patience if held_out else None):
        trainer.end_again(last, callback)  # it would train a step more
    else:
        seconds = float(trainer.train(resume_from_checkpoint=last).metrics["train_runtime"])
    without_autocast(encoder)
    if rank:
        merge_lora(encoder)
    encoder.eval()
    if not all(bool(one.isfinite().all()) for one in encoder.parameters()):
        raise NotFiniteError(
            f"The weights of {encoder.name} became NaN or infinity in training with learning_rate="
            f"{training.learning_rate:g}. Pass a lower one, and another folder."
        )
    state = trainer.state
    best = Path(state.best_model_checkpoint).name.rpartition("-")[2] if state.best_model_checkpoint else ""
    words = {
        "Trained on": f"{len(data)} rows of {pairs.kind}" + (f", {len(held_out.rows)} held out" if held_out else ""),
        "Loss": type(trainer.loss).__name__,
        "Trained parameters": f"{trainable:,}" + (f" (LoRA of rank {rank})" if rank else ""),
        "Batch size": str(training.batch_size),
        "Learning rate": f"{training.learning_rate:g}",
        "Steps": f"{state.global_step} of at most {steps}",
        "Seed": str(training.seed),
    }
    metrics = tidy_frame([]) if callback is None else callback.frame
    return Trained(_losses(state), metrics, state.global_step, int(best or state.global_step), seconds, words)


def check_training(encoder: LayerEncoder, pairs: Pairs, training: Training) -> None:
    """Raise where a run could not begin: before every layer is scored, which takes a while."""
    if training.lora and encoder.layer == 0:
        raise OptionError(
            f"`lora` must be False for layer 0 of {encoder.name}: adapters change the linear layers of blocks, and "
            "it has none."
        )
    if encoder.truncate_dim is not None and encoder.truncate_dim not in (training.matryoshka or ()):
        raise OptionError(
            f"`truncate_dim` must be left out, or be in `matryoshka` too: the loss is of whole vectors, and "
            f"{encoder.truncate_dim} of their dimensions would be used. Pass matryoshka=[{encoder.truncate_dim}]."
        )
    _loss(encoder, pairs, training)
    if training.lora:
        check_lora(encoder)


def _callback(
    encoder: LayerEncoder, texts: list[str], training: Training, folder: Path
) -> LayerMetricsTrainerCallback | None:
    """Return what measures every layer while it learns; ``None`` where the texts are too short for that."""
    some = texts[:_COUNTED]
    measured = [
        text for text, count in zip(some, count_tokens(encoder, some), strict=True) if count >= MIN_MEASURED_TOKENS
    ]
    if len(measured) < 2:
        return None
    return LayerMetricsTrainerCallback(
        measured[:_MEASURED], encoder.tokenizer, figures=False, dirpath=folder, pooling=encoder.pooling,
        metrics=["prompt_entropy", "dataset_entropy", "effective_rank", "curvature"], seed=training.seed,
        max_length=min(encoder.max_seq_length or 64, 64),
    )  # fmt: skip


def _loss(encoder: LayerEncoder, pairs: Pairs, training: Training) -> nn.Module:
    how = {"mini_batch": training.mini_batch, "matryoshka": training.matryoshka, "adaptive": training.adaptive}
    return make_loss(encoder, pairs.kind, **how)  # type: ignore[arg-type]


def _arguments(encoder: LayerEncoder, data: list[Any], training: Training, folder: Path, steps: int) -> Any:
    from sentence_transformers import SentenceTransformerTrainingArguments

    cuda = encoder.device.type == "cuda"
    often = max(steps // training.checkpoints, 1) if training.checkpoints else steps
    return SentenceTransformerTrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=training.batch_size,
        per_device_eval_batch_size=training.batch_size, learning_rate=training.learning_rate, warmup_steps=steps // 10,
        batch_sampler=batch_sampler("labels" if "label" in data[0] else "scored" if "score" in data[0] else "pairs"),
        prompts=_prompts(encoder, data[0]), seed=training.seed, bf16=cuda, use_cpu=encoder.device.type == "cpu",
        eval_strategy="steps" if training.held_out else "no", eval_steps=often, logging_steps=max(steps // 50, 1),
        save_strategy="steps" if training.checkpoints else "no", save_steps=often, save_total_limit=2,
        load_best_model_at_end=bool(training.held_out), metric_for_best_model="eval_loss", greater_is_better=False,
        report_to="none", disable_tqdm=True, dataloader_pin_memory=cuda,
    )  # fmt: skip


def _prompts(encoder: LayerEncoder, row: dict[str, Any]) -> dict[str, str] | None:
    """Return what is put before the texts of each column, as when they are encoded: queries may have their own."""
    kinds = {"anchor": "query", "positive": "document", "negative": "document"} if "label" not in row else {}
    found = {
        column: encoder.prompts.get(kinds.get(column.partition("_")[0], "")) or encoder.default_prompt
        for column, cell in row.items()
        if isinstance(cell, str)
    }
    return found if any(found.values()) else None


def _dataset(rows: list[dict[str, Any]]) -> Any:
    from datasets import Dataset

    return Dataset.from_list(rows)


def _last_checkpoint(folder: Path) -> str | None:
    """Return the last checkpoint that is whole, and remove later ones, which a killed run was writing."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda one: int(one.name.rpartition("-")[2]), reverse=True)
    for one in found:
        try:
            json.loads((one / "trainer_state.json").read_text(encoding="utf8"))  # it is written last
            if (one / WEIGHTS).is_file():
                return str(one)
        except (OSError, ValueError):
            pass
        shutil.rmtree(one)
    return None


def _losses(state: Any) -> pl.DataFrame:
    by_step: dict[int, dict[str, Any]] = {}
    for entry in state.log_history:
        for key, name in (("loss", "loss"), ("eval_loss", "held_out")):
            if key in entry:
                by_step.setdefault(entry["step"], {})[name] = float(entry[key])
    return pl.DataFrame([{"step": step, **values} for step, values in sorted(by_step.items())], schema=_LOSSES)


class _Patience(EarlyStoppingCallback):  # type: ignore[misc]
    """Counts on, in a resumed run, from the evaluations that came before."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        super().on_train_begin(args, state, control, **given)
        self.early_stopping_patience_counter = since_best(state)


class _Steps(TrainerCallback):  # type: ignore[misc]
    """Reports each step."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.stage.expect(state.max_steps)
        self.stage.step(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        self.stage.step()
