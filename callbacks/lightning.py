"""Callbacks for the Trainer of ``lightning.pytorch`` and ``pytorch_lightning``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from midlayer_encoders.errors import OptionError

from ._decline import DeclineRecorder
from ._measurement import MetricValues
from ._recorder import Recorder

# The two packages have unrelated `Callback` classes, but each Trainer accepts both.
try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

_SHARDED_STRATEGIES = ("FSDPStrategy", "XLAFSDPStrategy")


class LayerMetricsCallback(Recorder, Callback):
    """Logs every metric of every layer of a Lightning model during training, under the exact step.

    Values go to every logger as ``midlayer/<metric>/layer_07``, to ``history.parquet`` next to the run's logs, and into
    the checkpoints, so that a resumed run has a complete history. The callback draws curves over layers when
    training ends. In a distributed run the processes share the inputs.

    The options are as in :class:`~midlayer_encoders.callbacks._settings.CallbackSettings`::

        Trainer(callbacks=[LayerMetricsCallback(texts, tokenizer, every_n_steps=100)])
    """

    _fits = False  # False during validation, test and prediction

    def _begin(self) -> None:
        super()._begin()
        self._loss_sum: Tensor | float = 0.0
        self._num_losses = 0
        self._losses: dict[int, Any] = {}  # mean since the previous measurement, by step

    def setup(self, trainer: Any, _: nn.Module, stage: str) -> None:
        """Validate the run before training starts."""
        self._fits = stage == "fit"
        if not self._fits:
            return
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED_STRATEGIES:
            self._reject_sharding(strategy)
        previous = self._state() if trainer.global_step > 0 else {}
        self._begin()
        if previous:  # the same trainer continues: its history stays, including the last step
            self._restored = {**previous, "at_end": []}
        if not trainer.loggers and self.dirpath is None:
            raise OptionError(
                f"{type(self).__name__} has no logger to log to. Give the Trainer one (`logger=CSVLogger(...)`), or "
                "pass `dirpath` to keep the history in a file alone."
            )

    def on_fit_start(self, _: Any, pl_module: nn.Module) -> None:
        """Find the model, which the module may have created in ``setup`` or ``configure_model``."""
        self._prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure before the first step."""
        if self._is_due(trainer.global_step):
            self._visit(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any = None, *_: Any) -> None:
        """Measure if a measurement is due; batches that only accumulate gradients do not advance the step."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._loss_sum = self._loss_sum + loss.detach()  # reading it here would wait for the device
            self._num_losses += 1
        self._complete(wait=False)
        if self._is_due(trainer.global_step):
            self._visit(trainer, pl_module)

    def on_exception(self, *_: Any) -> None:
        """Record the last measurement of an interrupted run."""
        self._complete()

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure the trained model and draw the figures."""
        if not self._is_complete(trainer.global_step):
            self._visit(trainer, pl_module)
        self._complete()
        folder = self._folder(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self._draw(folder)

    @property
    def state_key(self) -> str:
        """Key of this callback's state in a checkpoint, which distinguishes several callbacks."""
        return f"{type(self).__qualname__}[{self.name}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for the checkpoint."""
        return self._state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the history of the resumed run."""
        if self._fits and state_dict:  # False in trainer.test(ckpt_path="best")
            self._restored = state_dict  # there is no model yet

    def _visit(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure the model, log the values and write the history."""
        step = trainer.global_step
        autocast = trainer.precision_plugin.forward_context()  # Lightning turns it off around hooks
        folder = self._folder(trainer)  # in every process, because Lightning broadcasts it
        if self._num_losses:
            self._losses[step] = self._loss_sum / self._num_losses
        self._loss_sum, self._num_losses = 0.0, 0
        self._measure(pl_module, step, autocast, partial(self._record, trainer, step, folder))

    def _record(self, trainer: Any, step: int, folder: Path, values: MetricValues | None) -> None:
        if values is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self._log_values(values), step=step)
            if not trainer.fast_dev_run:  # which must not write files
                self._write(folder)
            self._warn_of_collapse(self._losses)
        self._after_measurement(trainer, step)

    def _folder(self, trainer: Any) -> Path:
        return Path(self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / self.name)


class LastLayerDecline(DeclineRecorder, LayerMetricsCallback):
    """Warns, stops or saves if the last layer of a Lightning model declines while an earlier layer improves.

    The options are as in :class:`~midlayer_encoders.callbacks._decline.DeclineRecorder`::

        Trainer(callbacks=[LastLayerDecline(texts, tokenizer, labels=labels, on_decline="checkpoint")])
    """

    def _after_measurement(self, trainer: Any, step: int) -> None:
        if not self._warn_of_events(step):
            return
        if self.on_decline == "stop":
            trainer.should_stop = True
        elif self.on_decline == "checkpoint" and not trainer.fast_dev_run:
            trainer.save_checkpoint(self._folder(trainer) / f"decline-step{step}.ckpt")
