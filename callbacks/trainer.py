"""Callbacks for Hugging Face's ``Trainer`` and sentence-transformers' ``SentenceTransformerTrainer``."""

from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import read_artifact, write_file

from ._decline import DeclineRecorder
from ._measurement import MetricValues
from ._recorder import Recorder, read_state


class LayerMetricsTrainerCallback(Recorder, TrainerCallback):  # type: ignore[misc]
    """Logs every metric of every layer during training with a Hugging Face Trainer, under the exact step.

    A ``TrainerCallback`` has no reference to its trainer: call :meth:`attach` to send values to the trainer's
    loggers (TensorBoard, W&B, MLflow). Without it they are only in ``state.log_history`` and in the output
    folder (``history.parquet`` and the figures). A resumed run continues the history from the checkpoint. The default
    tokenizer is the trainer's. With ``load_best_model_at_end`` the callback measures the last step before the trainer
    loads the best weights, and then the best weights under their own step.

    The options are as in :class:`~midlayer_encoders.callbacks._settings.CallbackSettings`::

        callback = LayerMetricsTrainerCallback(texts, every_n_steps=100)
        callback.attach(Trainer(model, args, train_dataset=dataset))
    """

    _trainer: Any = None
    _ended = False

    def attach(self, trainer: Any) -> None:
        """Log through ``trainer`` from now on, and add this callback to it if necessary."""
        self._trainer = trainer
        callbacks = trainer.callback_handler.callbacks
        if self not in callbacks:
            trainer.add_callback(self)
        if not any(isinstance(callback, _EndsFirst) and callback.recorder is self for callback in callbacks):
            first = next((index for index, callback in enumerate(callbacks) if _is_integration(callback)), 0)
            callbacks.insert(first, _EndsFirst(self))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Validate the run, load the history of a resumed run, and measure before the first step."""
        if args.output_dir is None and self.dirpath is None:
            raise OptionError("`dirpath` must be given where the trainer has no `output_dir`.")
        self._begin()
        self._ended = False
        self._prepare(kwargs["model"], kwargs.get("processing_class"))
        self._resume_from(self._folder(args) / "history.parquet", state.global_step)
        if self._is_due(state.global_step):
            self._visit(args, state, control, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if a measurement is due, or if the trainer loads other weights after this step."""
        last = args.load_best_model_at_end and state.global_step >= state.max_steps
        if self._is_due(state.global_step) or (last and not self._is_complete(state.global_step)):
            self._visit(args, state, control, kwargs["model"])
        self._complete(wait=control.should_save)  # before the trainer saves a checkpoint

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Record the last measurement before the trainer saves a checkpoint."""
        self._complete()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure the trained model and draw the figures."""
        if not self._ended:
            self._end(args, state, control, kwargs["model"])

    def _end(self, args: Any, state: Any, control: Any, model: nn.Module) -> None:
        self._ended = True
        loaded_state = _state_of_loaded_weights(args, state)
        if not self._is_complete(loaded_state.global_step):
            self._visit(args, loaded_state, control, model)
        self._complete()
        if state.is_world_process_zero:
            self._warn_of_collapse(_losses(state))  # the last loss is logged after the last measurement
            self._draw(self._folder(args))

    def _resume_from(self, path: Path, step: int) -> None:
        """Load the steps up to the checkpoint from the previous run's file; a new run starts a new file."""
        state = read_artifact(path, read_state) if step else None
        if state is None:
            return
        state["steps"] = {earlier: values for earlier, values in state["steps"].items() if earlier <= step}
        if not self._resume(state):
            # The next measurement overwrites the file.
            write_file(path.with_name(f"history-before-step{step}.parquet"), path.read_bytes())

    def _visit(self, args: Any, state: Any, control: Any, model: nn.Module) -> None:
        record = partial(self._record, args, copy(state), control)
        self._measure(model, state.global_step, _autocast(args, model), record)

    def _record(self, args: Any, state: Any, control: Any, values: MetricValues | None) -> None:
        if values is not None and state.is_world_process_zero:
            self._log(state, self._log_values(values))
            self._write(self._folder(args))
            self._warn_of_collapse(_losses(state))
        self._after_measurement(control, state.global_step)

    def _log(self, state: Any, values: dict[str, float]) -> None:
        state.log_history.append({**values, "step": state.global_step, "epoch": state.epoch})
        for logger in self._integrations():
            logger.on_log(self._trainer.args, state, self._trainer.control, logs=values, model=self._trainer.model)

    def _integrations(self) -> list[Any]:
        """Return the trainer's loggers, except for its printer, which hundreds of values would flood."""
        callbacks = [] if self._trainer is None else self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if _is_integration(callback)]

    def _folder(self, args: Any) -> Path:
        return Path(self.dirpath or Path(args.output_dir) / self.name)


class _EndsFirst(TrainerCallback):  # type: ignore[misc]
    """Ends a callback before the trainer's loggers end; later values would be lost or start a new run (MLflow)."""

    def __init__(self, recorder: LayerMetricsTrainerCallback) -> None:
        self.recorder = recorder

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.recorder._end(args, state, control, kwargs["model"])


class LastLayerDeclineTrainerCallback(DeclineRecorder, LayerMetricsTrainerCallback):
    """Warns, stops or saves if the last layer declines while an earlier layer improves, in a Hugging Face Trainer.

    The options are as in :class:`~midlayer_encoders.callbacks._decline.DeclineRecorder`.
    """

    def _after_measurement(self, control: Any, step: int) -> None:
        if not self._warn_of_events(step):
            return
        control.should_training_stop |= self.on_decline == "stop"
        control.should_save |= self.on_decline == "checkpoint"


def _losses(state: Any) -> dict[int, float]:
    """Return the training losses logged so far, by step."""
    return {log["step"]: log["loss"] for log in state.log_history if "loss" in log}


def _state_of_loaded_weights(args: Any, state: Any) -> Any:
    """Return ``state`` at the step of the final weights: the best weights if the trainer loads them.

    ``state.best_global_step`` may be a later step that was evaluated but not saved.
    """
    best = state.best_model_checkpoint
    if not args.load_best_model_at_end or best is None or not Path(best).is_dir():
        return state
    step = Path(best).name.removeprefix("checkpoint-")
    loaded_state = copy(state)
    loaded_state.global_step = int(step) if step.isdigit() else state.best_global_step
    loaded_state.epoch = state.epoch * loaded_state.global_step / state.global_step
    return loaded_state


def _is_integration(callback: Any) -> bool:
    return type(callback).__module__.startswith("transformers.integrations")


def _autocast(args: Any, model: nn.Module) -> AbstractContextManager[object]:
    """Return the autocast context of the trainer, which wraps only the outermost forward."""
    if not (args.bf16 or args.fp16):
        return nullcontext()
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype=torch.bfloat16 if args.bf16 else torch.float16)
