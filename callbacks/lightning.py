"""Callbacks for Lightning's Trainer, of ``lightning.pytorch`` and of ``pytorch_lightning``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from midlayer_encoders.callbacks._backbone import has_backbone
from midlayer_encoders.callbacks._recorder import Recorder
from midlayer_encoders.callbacks._watch import Watch
from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Two packages with unrelated classes of one name; each one's Trainer takes callbacks of either.
try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback  # type: ignore[assignment]

__all__ = ["LastLayerDecline", "LayerMetricsCallback"]

_SHARDED = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")


class LayerMetricsCallback(Recorder, Callback):
    """Logs every metric of every layer while a Lightning model trains, at the exact step.

    Values go to every logger as ``midlayer/<metric>/layer_07``, to ``history.parquet`` beside the run, and into its
    checkpoints, so that a resumed run has the history of one that was not stopped. Heat maps and curves are drawn when
    training ends. In a distributed run the processes share the inputs.

    The options are those of :class:`~midlayer_encoders.callbacks._settings.Settings`::

        Trainer(callbacks=[LayerMetricsCallback(texts, tokenizer, every_n_steps=100)])
    """

    _loaded_step: int | None = None
    _trained = False  # whether the history is of training, not of a validation alone

    # --- Lightning's hooks --------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Refuse what cannot work, before anything is trained."""
        self._loaded_step = None
        if stage not in ("fit", "validate") or (stage == "validate" and self._trained and self.history):
            return
        goes_on = self._trained and trainer.global_step > 0
        before = self._history.state() if self._history is not None and goes_on else None
        self._begin()
        self._trained = stage == "fit"
        if before is not None:  # a trainer that goes on: every step of its history stays, the last one too
            self._restored = {**before, "at_end": []}
        strategy = type(trainer.strategy).__name__
        if strategy in _SHARDED:
            self._refuse_shards(strategy)
        if not trainer.loggers and self._dirpath is None:
            raise OptionError(
                f"{type(self).__name__} has no logger to log to. Give the Trainer one (`logger=CSVLogger(...)`), or "
                "pass `dirpath` to keep the history in a file alone."
            )
        if has_backbone(pl_module) or self.settings.module != "auto" or not _makes_modules_later(pl_module):
            self._prepare(pl_module)

    def on_fit_start(self, _: Any, pl_module: nn.Module) -> None:
        """Find a model that was made in the module's own ``setup`` or ``configure_model``."""
        self._prepare(pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure before the first step."""
        if self._wants(trainer.global_step):
            self._visit(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any) -> None:
        """Measure when a step is due; batches that only accumulate gradients repeat the step before."""
        if self._wants(trainer.global_step):
            self._visit(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure the trained model, and draw."""
        if not self._has(trainer.global_step):
            self._visit(trainer, pl_module)
        folder = self._folder(trainer)
        if trainer.is_global_zero and not trainer.fast_dev_run:
            self._draw(
                folder,
                [
                    partial(_SHOWS[kind], logger, step=trainer.global_step)
                    for logger in trainer.loggers
                    if (kind := type(logger).__name__) in _SHOWS
                ],
            )

    def on_validation_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Measure once where the run is a validation alone."""
        if trainer.state.fn == "validate" and not self._trained:
            self._prepare(pl_module)
            step = trainer.global_step if self._loaded_step is None else self._loaded_step
            if not self._has(step):
                self._visit(trainer, pl_module, step)

    def on_load_checkpoint(self, trainer: Any, _: nn.Module, checkpoint: dict[str, Any]) -> None:
        """Remember the step of weights that are not trained further: the trainer does not count up to it."""
        self._loaded_step = None if trainer.state.fn == "fit" else checkpoint["global_step"]

    @property
    def state_key(self) -> str:
        """Tells two of these callbacks apart in a checkpoint."""
        return f"{type(self).__qualname__}[{self.name}]"

    def state_dict(self) -> dict[str, Any]:
        """Return the history, for the checkpoint."""
        return {} if self._history is None else self._history.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the history of the run that is resumed."""
        if self._loaded_step is not None and self._history is not None and self._history.steps:
            return  # of this run, which has gone further since: trainer.test(ckpt_path="best")
        if state_dict and self._history is None:
            self._restored = state_dict  # the model is made later
        elif state_dict:
            self._resume(state_dict)

    # --- ours ---------------------------------------------------------------------------------------------------------

    def _visit(self, trainer: Any, pl_module: nn.Module, step: int | None = None) -> None:
        """Measure the model, log the values, and write them beside the run."""
        step = trainer.global_step if step is None else step
        values = self._measure(pl_module, step, _autocast(trainer))
        folder = self._folder(trainer)  # asked in every process: Lightning broadcasts it
        if values is not None and trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.log_metrics(self._log_values(values), step=step)
            if not trainer.fast_dev_run:  # which promises to leave nothing behind
                self._write(folder)
        self._after_measurement(trainer, step)

    def _folder(self, trainer: Any) -> Path:
        beside = trainer.log_dir or trainer.default_root_dir
        return self._dirpath or Path(beside) / self.name


class LastLayerDecline(Watch, LayerMetricsCallback):
    """Warns, stops or saves when the last layer of a Lightning model declines while an earlier one improves.

    The options are those of :class:`~midlayer_encoders.callbacks._watch.Watch`::

        Trainer(callbacks=[LastLayerDecline(texts, tokenizer, labels=labels, on_decline="checkpoint")])
    """

    def _after_measurement(self, trainer: Any, step: int) -> None:
        if not self._judge(step):
            return
        if self.on_decline == "stop":
            trainer.should_stop = True
        elif self.on_decline == "checkpoint" and not trainer.fast_dev_run:
            trainer.save_checkpoint(self._folder(trainer) / f"decline-step{step}.ckpt")


def _autocast(trainer: Any) -> AbstractContextManager[object]:
    # Lightning turns autocast off around hooks.
    context: AbstractContextManager[object] = trainer.precision_plugin.forward_context()
    return context


def _makes_modules_later(pl_module: nn.Module) -> bool:
    """Return whether a LightningModule may make its layers after the callbacks' ``setup``."""
    theirs = ("lightning", "pytorch_lightning", "lightning_fabric")
    own = {name for cls in type(pl_module).__mro__ if cls.__module__.split(".")[0] not in theirs for name in vars(cls)}
    return "configure_model" in own or "setup" in own


def _to_tensorboard(logger: Any, name: str, figure: Figure, *, step: int) -> None:
    logger.experiment.add_figure(name, figure, global_step=step)


def _to_wandb(logger: Any, name: str, figure: Figure, *, step: int) -> None:
    logger.log_image(key=name, images=[figure], step=step)


def _to_mlflow(logger: Any, name: str, figure: Figure, *, step: int) -> None:  # noqa: ARG001
    logger.experiment.log_figure(logger.run_id, figure, f"{name}.png")


_SHOWS = {"TensorBoardLogger": _to_tensorboard, "WandbLogger": _to_wandb, "MLFlowLogger": _to_mlflow}
"""How a figure is handed to each logger that takes one."""
