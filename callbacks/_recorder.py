"""The part of a callback that does not depend on the trainer: when to measure, the history, the figure and failures."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeAlias

import polars as pl
from torch import nn

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.files import shell_path
from midlayer_encoders.frame.schema import NamedSubject, read_parquet, tidy_frame, tidy_rows

from ._measurement import Measurement, MetricValues
from ._settings import CallbackSettings, is_due
from ._sharded import unsupported_sharding

_log = logging.getLogger("midlayer_encoders")

_DATASET = "probe"  # name of the callback's inputs in the frame
_METADATA_KEY = "midlayer_encoders"
# It rises to 0 if texts move to one point; `uniformity` subtracts the mean and does not see it.
_UNIFORMITY = "raw_uniformity"
_ROUNDING = 1e-5  # of the uniformity of equal texts

#: Called with the values of a measurement, or ``None`` if it failed.
_Record: TypeAlias = Callable[[MetricValues | None], None]


def read_state(path: Path) -> dict[str, Any]:
    """Return the state of the history that a callback wrote."""
    saved, fields = read_parquet(path)
    steps: dict[int, MetricValues] = {}
    for revision, name, layer, value in saved.select("revision", "name", "layer", "value").iter_rows():
        steps.setdefault(int(revision.removeprefix("step")), {}).setdefault(name, {})[layer] = value
    return {**json.loads(fields.get(_METADATA_KEY, "{}")), "steps": steps}


def complete_steps(steps: Mapping[int, MetricValues], name: str, layers: Sequence[int]) -> dict[int, list[float]]:
    """Return a metric's values by step, for the steps that have a value for every layer."""
    by_step = {step: [values.get(name, {}).get(layer, math.nan) for layer in layers] for step, values in steps.items()}
    return {step: values for step, values in by_step.items() if all(map(math.isfinite, values))}


def describe_lost_uniformity(
    uniformities: Mapping[int, float], losses: Mapping[int, float], *, patience: int = 2, share: float = 0.5
) -> str | None:
    """Return a description if texts move together while the training loss falls, otherwise ``None``.

    Since the step of the lowest uniformity, the uniformity rose above ``share`` of that value, toward 0, in each of the
    last ``patience`` measurements, while the last of two or more losses is below the first. Near 0, the uniformity is
    proportional to the mean squared distance of two texts, so a half of it is a half of that.

    Args:
        uniformities: ``raw_uniformity`` of the last layer by step.
        losses: training loss by step.
        patience: number of consecutive measurements, at least ``1``.
        share: share of the lowest uniformity, in (0, 1).

    Example:
        >>> losses = {2: 0.5, 4: 0.2, 8: 0.1}
        >>> describe_lost_uniformity({0: -2.0, 4: -0.8, 8: -0.2}, losses)
        'raw_uniformity rose from -2.000 at step 0 to -0.200 at step 8, while the loss fell from 0.5 to 0.1'
        >>> describe_lost_uniformity({0: -2.0, 4: -2.5, 8: -2.6}, losses)
    """
    lowest = min(uniformities, key=lambda step: (uniformities[step], step), default=0)
    recent = sorted(step for step in uniformities if step > lowest)[-patience:]
    if len(recent) < patience or any(uniformities[step] <= share * uniformities[lowest] for step in recent):
        return None
    if uniformities[lowest] > -_ROUNDING:
        return None
    since = [losses[step] for step in sorted(losses) if step > lowest and math.isfinite(losses[step])]
    if len(since) < 2 or not since[-1] < since[0]:
        return None
    return (
        f"{_UNIFORMITY} rose from {uniformities[lowest]:.3f} at step {lowest} to {uniformities[recent[-1]]:.3f} "
        f"at step {recent[-1]}, while the loss fell from {since[0]:.3g} to {since[-1]:.3g}"
    )


class Recorder(CallbackSettings):
    """Measures every layer of a model in training at scheduled steps and stores the values.

    The run is bitwise identical with and without the callback, provided that torch repeats a run exactly
    (docs/callbacks.md): the inputs are fixed, there are no gradients, modes, buffers and random generators are
    restored, and compiled modules run eagerly.
    """

    _drawing: Thread | None = None
    #: The step of a measurement whose values a thread computes, the values, and the function that records them.
    _pending: tuple[int, Future[MetricValues], _Record] | None = None
    _measurement: Measurement | None = None
    _reacts = False  # True if the run must not continue before the values are known

    def __post_init__(self) -> None:
        super().__post_init__()
        self._begin()

    @property
    def history(self) -> list[dict[str, Any]]:
        """All values measured so far, as rows of the tidy frame."""
        return [] if self._measurement is None else self.frame.to_dicts()

    @property
    def frame(self) -> pl.DataFrame:
        """All values measured so far, as a tidy frame whose ``revision`` names the step like Pythia's: ``step512``."""
        self._complete()
        if self._measurement is None:
            raise OptionError("There is no frame before the first run: train first.")
        rows = []
        for step in sorted(self._steps):
            model = NamedSubject(self._measurement.model, f"step{step}", self._measurement.anatomy.num_layers)
            for name, values in self._steps[step].items():
                rows += tidy_rows(values, model, kind="metric", dataset=_DATASET, name=name)
        return tidy_frame(rows)

    def _begin(self) -> None:
        """Discard the state of the previous run: one callback may serve several runs."""
        self._complete()
        self._measurement = None
        self._steps: dict[int, MetricValues] = {}
        self._at_end: set[int] = set()  # steps that were measured only because a run ended there
        self._restored: dict[str, Any] | None = None
        self._warned = False
        self._collapse_warned = False
        if self._drawing is not None:
            self._drawing.join()  # otherwise it could overwrite this run's figures
            self._drawing = None

    def _reject_sharding(self, strategy: str) -> None:
        raise MidlayerError(
            f"{type(self).__name__} measures models that are whole in each process or sharded by FSDP2, but {strategy} "
            "splits the weights in another way. Train with DDP, with DeepSpeed ZeRO-2, or with FSDP2: `fully_shard` "
            'and `ModelParallelStrategy(tensor_parallel_size=1)` in Lightning, `fsdp_config={"version": 2}` in a '
            "Hugging Face trainer. Or measure the checkpoints afterward: midlayer progression."
        )

    def _prepare(self, root: nn.Module, tokenizer: Any = None) -> None:
        """Find the transformer and prepare the inputs, once per run."""
        if strategy := unsupported_sharding(root):
            self._reject_sharding(strategy)
        if self._measurement is None:
            self._measurement = Measurement(self, root, tokenizer)
            if self._restored is not None:
                self._resume(self._restored)

    def _state(self) -> dict[str, Any]:
        """Return the history as plain numbers and strings, for a checkpoint; empty before the first run."""
        self._complete()
        if self._measurement is None:
            return {}
        return {"steps": dict(self._steps), "settings": self._measurement.identity, "at_end": sorted(self._at_end)}

    def _resume(self, state: dict[str, Any]) -> bool:
        """Load the history of the previous run; return False, with a warning, if its settings were others.

        A measurement at the end of the previous run is dropped if none is due there.
        """
        previous = state.get("settings", {})
        settings = {} if self._measurement is None else self._measurement.identity
        if changed := [name for name, value in settings.items() if previous.get(name) != value]:
            begins = "a new history begins, because the previous run measured with other settings"
            _log.warning("%s: %s: %s.", self.name, begins, ", ".join(changed))
            return False
        dropped = {step for step in state.get("at_end", ()) if not is_due(self.every_n_steps, step)}
        self._steps = {step: values for step, values in state["steps"].items() if step not in dropped}
        return True

    def _is_due(self, step: int) -> bool:
        """Return True if a measurement is due after ``step`` steps and has not been made."""
        return is_due(self.every_n_steps, step) and not self._is_complete(step)

    def _is_complete(self, step: int) -> bool:
        """Return True if the layers were measured at ``step``."""
        return step in self._steps or (self._pending is not None and self._pending[0] == step)

    def _measure(self, root: nn.Module, step: int, autocast: AbstractContextManager[object], record: _Record) -> None:
        """Measure the model, store the values and pass them to ``record``, or ``None`` if that failed.

        A thread may compute the values while training continues; :meth:`_complete` then stores them.
        """
        self._complete()
        if self._measurement is None:
            return
        values: Future[MetricValues] = Future()
        try:
            values = self._measurement.measure(root, autocast)
        except Exception as error:
            values.set_exception(error)
        self._pending = step, values, record
        self._complete(wait=self.strict or self._reacts)

    def _complete(self, *, wait: bool = True) -> None:
        """Store and record the values of the last measurement, unless a thread still computes them."""
        if self._pending is None or not (wait or self._pending[1].done()):
            return
        (step, future, record), self._pending = self._pending, None
        values = None
        try:
            values = self._steps[step] = future.result()
            if not is_due(self.every_n_steps, step):
                self._at_end.add(step)
        except Exception as error:
            self._handle_failure(error, step)
        record(values)

    def _warn_of_collapse(self, losses: Mapping[int, float]) -> None:
        """Log a warning, once, if the texts of the last layer move together while the training loss falls."""
        if self._measurement is None or self._collapse_warned:
            return
        last = self._measurement.layers[-1]
        uniformities = {step: value for step, (value,) in complete_steps(self._steps, _UNIFORMITY, [last]).items()}
        if (description := describe_lost_uniformity(uniformities, losses)) is not None:
            self._collapse_warned = True
            _log.warning(
                f"The texts of the last layer ({last}) move to one point: {description}. Train with a loss that has "
                "negatives, larger batches or a lower learning rate."
            )

    def _after_measurement(self, run: Any, step: int) -> None:
        """React to the values through Lightning's trainer or the Hugging Face trainer's control."""

    def _handle_failure(self, error: Exception, step: int) -> None:
        if self.strict:
            raise error
        if not self._warned:
            advice = "training continues, and later failures are not logged. Pass strict=True to stop instead."
            _log.exception("%s failed at step %d; %s", type(self).__name__, step, advice)
        self._warned = True

    def _log_values(self, values: MetricValues) -> dict[str, float]:
        """Return the values under the names used in logs: ``midlayer/curvature/layer_07``."""
        return {
            f"{self.name}/{name}/layer_{layer:02d}": value
            for name, by_layer in values.items()
            for layer, value in by_layer.items()
            if not math.isnan(value)
        }

    def _write(self, folder: Path) -> None:
        """Write the history atomically: if the run is killed, the previous file remains."""
        from midlayer_encoders.frame.tidy_result import write_frame

        try:
            metadata = json.dumps({key: value for key, value in self._state().items() if key != "steps"})
            write_frame(self.frame, folder / "history.parquet", metadata={_METADATA_KEY: metadata})
        except Exception as error:
            self._handle_failure(error, max(self._steps))

    def _draw(self, folder: Path) -> None:
        """Draw the history in a thread, or immediately if an error must stop the run, and print where it is."""
        if not self._steps or not self.figures:
            return
        files = "history.parquet, curves.png, report.html"
        print(f"{type(self).__name__} wrote to {shell_path(folder)}: {files}")  # noqa: T201
        draw = partial(self._draw_frame, self.frame, folder, max(self._steps))
        if self.strict:
            draw()
            return
        # Drawing takes a second or more. The thread is not a daemon, so the interpreter waits for the files.
        self._drawing = Thread(target=draw, name=f"{self.name} figures", daemon=False)
        self._drawing.start()

    def _draw_frame(self, frame: pl.DataFrame, folder: Path, step: int) -> None:
        try:
            from midlayer_encoders.report import plot_steps_curves, write_figure
            from midlayer_encoders.report.pages import write_page
            from midlayer_encoders.report.results import versions
            from midlayer_encoders.report.training_page import steps_html

            write_figure(plot_steps_curves(frame), folder / "curves.png", dpi=110)
            how = {"Norm": self.norm, "Pooling": self.pooling, **versions()}
            write_page(steps_html(frame, title="Every layer while it learned", how=how), folder / "report.html")
        except Exception as error:
            self._handle_failure(error, step)
