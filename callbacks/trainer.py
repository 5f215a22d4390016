"""The same callbacks for Hugging Face's ``Trainer`` and sentence-transformers' ``SentenceTransformerTrainer``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import TrainerCallback

from midlayer_encoders.callbacks._history import read_state
from midlayer_encoders.callbacks._recorder import Recorder
from midlayer_encoders.callbacks._watch import Watch
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import read_artifact, write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LastLayerDeclineTrainerCallback", "LayerMetricsTrainerCallback"]


class LayerMetricsTrainerCallback(Recorder, TrainerCallback):  # type: ignore[misc]
    """Logs every metric of every layer while a Hugging Face Trainer trains, at the exact step.

    A ``TrainerCallback`` does not know its trainer: call :meth:`attach` for values and figures to reach the trainer's
    own loggers (TensorBoard, W&B, MLflow). Without it they are in ``state.log_history``, in ``history.parquet`` in the
    output folder, and in its figures. A resumed run goes on with the history up to the checkpoint. The tokenizer is
    the trainer's where none is given. With ``load_best_model_at_end`` the last step is measured before the best weights
    are loaded, and those under their own step.

    The options are those of :class:`~midlayer_encoders.callbacks._settings.Settings`::

        callback = LayerMetricsTrainerCallback(texts, every_n_steps=100)
        callback.attach(Trainer(model, args, train_dataset=dataset))
    """

    _trainer: Any = None
    _ended = False  # whether the end of this run was seen already

    def attach(self, trainer: Any) -> None:
        """Log through ``trainer`` from now on; adds this callback to it where it is not there yet."""
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            trainer.add_callback(self)
        if not any(isinstance(each, _EndsFirst) and each.callback is self for each in callbacks):
            first = next((place for place, each in enumerate(callbacks) if _is_integration(each)), 0)
            callbacks.insert(first, _EndsFirst(self))

    # --- the trainer's events -----------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Refuse what cannot work, take over the history of a resumed run, and measure before the first step."""
        for option, strategy in (("fsdp", "FSDP"), ("deepspeed", "DeepSpeed")):
            if getattr(args, option, None):
                self._refuse_shards(strategy)
        if args.output_dir is None and self._dirpath is None:
            raise OptionError("`dirpath` must be given where the trainer has no `output_dir`.")
        self._begin()
        self._ended = False
        self._prepare(given["model"], given.get("processing_class"))
        self._resume_from(self._folder(args) / "history.parquet", state.global_step)
        if self._wants(state.global_step):
            self._visit(args, state, control, given["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure when a step is due, and the last where other weights are loaded after it."""
        last = args.load_best_model_at_end and state.global_step >= state.max_steps
        if self._wants(state.global_step) or (last and not self._has(state.global_step)):
            self._visit(args, state, control, given["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Measure the trained model, and draw."""
        if not self._ended:
            self._end(args, state, control, given["model"])

    # --- ours ---------------------------------------------------------------------------------------------------------

    def _end(self, args: Any, state: Any, control: Any, model: nn.Module) -> None:
        self._ended = True
        trained = _at_loaded_step(args, state)
        if not self._has(trained.global_step):
            self._visit(args, trained, control, model)
        if state.is_world_process_zero:
            self._draw(
                self._folder(args),
                [
                    partial(_SHOWS[kind], logger, step=state.global_step)
                    for logger in self._integrations()
                    if (kind := type(logger).__name__) in _SHOWS
                ],
            )

    def _resume_from(self, path: Path, step: int) -> None:
        """Take over the steps until the checkpoint from the file of the run before; a new run begins a new file."""
        state = read_artifact(path, read_state) if step else None
        if state is None:
            return
        state["steps"] = {seen: values for seen, values in state["steps"].items() if seen <= step}
        if self._resume(state):
            # The file is written anew.
            write_file(path.with_name(f"history-before-step{step}.parquet"), path.read_bytes())

    def _visit(self, args: Any, state: Any, control: Any, model: nn.Module) -> None:
        values = self._measure(model, state.global_step, _autocast(args, model))
        if values is not None and state.is_world_process_zero:
            self._log(state, self._log_values(values))
            self._write(self._folder(args))
        self._after_measurement(control, state.global_step)

    def _log(self, state: Any, values: dict[str, float]) -> None:
        state.log_history.append({**values, "step": state.global_step, "epoch": state.epoch})
        for logger in self._integrations():
            logger.on_log(self._trainer.args, state, self._trainer.control, logs=values, model=self._trainer.model)

    def _integrations(self) -> list[Any]:
        """Return the trainer's loggers; its own printer would bury the losses under hundreds of values."""
        callbacks = [] if self._trainer is None else self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if _is_integration(callback)]

    def _folder(self, args: Any) -> Path:
        return self._dirpath or Path(args.output_dir) / self.name


class _EndsFirst(TrainerCallback):  # type: ignore[misc]
    """Ends a callback before the trainer's loggers end: what is logged later is lost, or begins a new run (MLflow)."""

    def __init__(self, callback: LayerMetricsTrainerCallback) -> None:
        self.callback = callback

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.callback._end(args, state, control, given["model"])


class LastLayerDeclineTrainerCallback(Watch, LayerMetricsTrainerCallback):
    """Warns, stops or saves when the last layer declines while an earlier one improves, in a Hugging Face Trainer.

    The options are those of :class:`~midlayer_encoders.callbacks._watch.Watch`.
    """

    def _after_measurement(self, control: Any, step: int) -> None:
        if not self._judge(step):
            return
        control.should_training_stop |= self.on_decline == "stop"
        control.should_save |= self.on_decline == "checkpoint"


def _at_loaded_step(args: Any, state: Any) -> Any:
    """Return ``state`` as of the step of the weights that the trainer ends with: the best, where it loads them.

    ``state.best_global_step`` may be a later step, which was evaluated and not saved.
    """
    best = state.best_model_checkpoint
    if not args.load_best_model_at_end or best is None or not Path(best).is_dir():
        return state
    then, step = copy(state), Path(best).name.removeprefix("checkpoint-")
    then.global_step = int(step) if step.isdigit() else state.best_global_step
    then.epoch = state.epoch * then.global_step / state.global_step
    return then


def _is_integration(callback: Any) -> bool:
    return type(callback).__module__.startswith("transformers.integrations")


def _to_tensorboard(logger: Any, name: str, figure: Figure, *, step: int) -> None:
    logger.tb_writer.add_figure(name, figure, global_step=step)


def _to_wandb(_: Any, name: str, figure: Figure, *, step: int) -> None:
    import wandb

    wandb.log({name: wandb.Image(figure), "train/global_step": step})  # as the integration logs its values


def _to_mlflow(_: Any, name: str, figure: Figure, *, step: int) -> None:  # noqa: ARG001
    import mlflow

    mlflow.log_figure(figure, f"{name}.png")


_SHOWS = {"TensorBoardCallback": _to_tensorboard, "WandbCallback": _to_wandb, "MLflowCallback": _to_mlflow}
"""How a figure is handed to each integration that takes one."""


def _autocast(args: Any, model: nn.Module) -> AbstractContextManager[object]:
    """Return what the trainer's own forward passes run under; it wraps the outer forward alone."""
    if not (args.bf16 or args.fp16):
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=torch.bfloat16 if args.bf16 else torch.float16)
