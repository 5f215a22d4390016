"""What the callbacks of every trainer share: when to measure, the history, and what happens when it fails."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from torch import nn

from midlayer_encoders.callbacks._cadence import make_cadence
from midlayer_encoders.callbacks._history import History
from midlayer_encoders.callbacks._measurement import Values, make_measurement
from midlayer_encoders.callbacks._settings import Settings, takes_settings
from midlayer_encoders.errors import MidlayerError, OptionError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.figure import Figure

__all__ = ["Recorder"]

_log = logging.getLogger("midlayer_encoders")


class Recorder:
    """Measures every layer of a model in training at chosen steps, and keeps the values.

    The run is bit for bit the same with and without it, where torch repeats a run so (docs/callbacks.md): fixed inputs,
    no gradients, modes, buffers and random generators restored, compiled modules run as written.

    The arguments are the fields of :class:`~midlayer_encoders.callbacks._settings.Settings`.
    """

    _drawing: Thread | None = None

    @takes_settings(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        self.cadence = make_cadence(settings.every_n_steps)
        self._dirpath = None if settings.dirpath is None else Path(settings.dirpath)
        self._begin()

    @property
    def name(self) -> str:
        """Prefix of what is logged."""
        return self.settings.name

    @property
    def history(self) -> list[dict[str, Any]]:
        """What was measured so far, as rows of the tidy frame."""
        return [] if self._history is None else self.frame.to_dicts()

    @property
    def frame(self) -> pl.DataFrame:
        """What was measured so far: the tidy frame, its ``revision`` naming the step."""
        if self._history is None:
            raise OptionError("There is no frame before the run began: train first.")
        return self._history.frame()

    # --- before the run -----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Forget the run before: a callback may serve several."""
        self._history: History | None = None
        self._restored: dict[str, Any] | None = None
        self._warned = False
        if self._drawing is not None:
            self._drawing.join()  # or it could write over what this run draws
            self._drawing = None

    def _refuse_shards(self, strategy: str) -> None:
        raise MidlayerError(
            f"{type(self).__name__} needs the whole model in each process, but {strategy} shards its weights. "
            "Train with DDP, or measure its checkpoints afterwards: midlayer progression."
        )

    def _prepare(self, root: nn.Module, tokenizer: Any = None) -> None:
        """Find the transformer and make the inputs, once for each run."""
        if self._history is not None:
            return
        self._history = History(make_measurement(self.settings, root, tokenizer))
        if self._restored is not None:
            self._resume(self._restored)

    def _resume(self, state: dict[str, Any]) -> bool:
        """Take over the history of the run before; return whether some was measured in another way and is left out."""
        if self._history is None:
            return False
        others = self._history.resume(state, due=self.cadence.due)
        if others:
            _log.warning(
                "%s: the history of the run before is resumed without what was measured in another way: %s.",
                self.name,
                "; ".join(others),
            )
        return bool(others)

    # --- during the run -----------------------------------------------------------------------------------------------

    def _wants(self, step: int) -> bool:
        """Return whether to measure after ``step`` steps: it is due, and was not measured before."""
        return self.cadence.due(step) and not self._has(step)

    def _has(self, step: int) -> bool:
        return self._history is not None and self._history.has(step)

    def _measure(self, root: nn.Module, step: int, autocast: AbstractContextManager[object]) -> Values | None:
        """Measure the model as it is now and keep the values; return ``None`` where that failed."""
        if self._history is None:
            return None
        try:
            values = self._history.measurement.measure(root, autocast)
        except Exception as error:
            self._failed(error, step)
            return None
        self._history.add(step, values, due=self.cadence.due(step))
        return values

    def _after_measurement(self, run: Any, step: int) -> None:
        """Act on the values, through Lightning's trainer or the Hugging Face trainer's control: nothing here."""

    def _failed(self, error: Exception, step: int) -> None:
        if self.settings.strict:
            raise error
        if not self._warned:
            _log.exception(
                "%s failed at step %d; the run goes on, and later failures are not logged. "
                "Pass strict=True to stop instead.",
                type(self).__name__,
                step,
            )
        self._warned = True

    def _log_values(self, values: Values) -> dict[str, float]:
        """Return values by the names under which they are logged: ``midlayer/curvature/layer_07``."""
        return {
            f"{self.name}/{name}/layer_{layer:02d}": value
            for name, by_layer in values.items()
            for layer, value in by_layer.items()
            if not math.isnan(value)
        }

    # --- files --------------------------------------------------------------------------------------------------------

    def _write(self, folder: Path) -> None:
        if self._history is not None and self._history.steps:
            try:
                self._history.write(folder / "history.parquet")
            except Exception as error:
                self._failed(error, max(self._history.steps))

    def _draw(self, folder: Path, show: Sequence[Callable[[str, Figure], None]]) -> None:
        """Draw the history; the run does not wait for it, unless a logger does or an error must stop the run.

        Args:
            folder: of the files.
            show: what hands a figure and its name to a logger that takes one.
        """
        if not self.settings.figures or self._history is None or not self._history.steps:
            return
        draw = partial(self._draw_frame, self._history.frame(), folder, show, max(self._history.steps))
        if show or self.settings.strict:
            draw()
            return
        # Drawing takes matplotlib a second or more. No daemon: the interpreter waits for the files before it ends.
        self._drawing = Thread(target=draw, name=f"{self.name} figures", daemon=False)
        self._drawing.start()

    def _draw_frame(
        self, frame: pl.DataFrame, folder: Path, show: Sequence[Callable[[str, Figure], None]], step: int
    ) -> None:
        try:
            from midlayer_encoders.report import plot_steps_curves, plot_steps_heat, write_figure

            for name, plot in (("heat", plot_steps_heat), ("curves", plot_steps_curves)):
                figure = plot(frame)
                write_figure(figure, folder / f"{name}.png", dpi=110)
                for logger in show:
                    logger(f"{self.name}/{name}", figure)
        except Exception as error:
            self._failed(error, step)
