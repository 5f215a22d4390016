"""What measures a model while it trains: the package's callback, timed, and the tasks with the held-out loss."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.pretraining.module import pl
from benchmarks.pretraining.tasks import Evaluation
from midlayer_encoders.callbacks import LayerMetricsCallback
from midlayer_encoders.metrics import PAPER_METRICS

METRICS = (*PAPER_METRICS, "first_token_share", "anisotropy")


def looks(steps: int, every: int = 256) -> list[int]:
    """Return the steps to measure at: spaced like Pythia's checkpoints, then at equal distances.

    Example:
        >>> looks(10, every=5)
        [0, 1, 2, 4, 5, 8, 10]
    """
    doubling = {0} | {2**k for k in range(steps.bit_length())}
    return sorted(step for step in doubling | set(range(0, steps, every)) | {steps} if step <= steps)


def stages(steps: int) -> list[int]:
    """Return when to run the tasks: at the start, at doubling steps from an eighth of the run back, and at its quarters."""
    return sorted({0, steps // 32, steps // 8, steps // 4, steps // 2, 3 * steps // 4, steps})


class TimedLook(LayerMetricsCallback):
    """The callback, with the seconds that it took, the device waited for."""

    seconds = 0.0

    def _visit(self, trainer: Any, pl_module: Any) -> None:
        _wait(pl_module)
        start = time.perf_counter()
        super()._visit(trainer, pl_module)
        _wait(pl_module)
        self.seconds += time.perf_counter() - start


class Stages(pl.Callback):
    """Runs the tasks and the held-out loss at some steps.

    Args:
        steps: at which.
        evaluation: of every layer.
        held: windows that were not trained on, ``None`` where there is no held-out loss.
    """

    def __init__(self, steps: Sequence[int], evaluation: Evaluation, held: Tensor | None = None) -> None:
        self.steps, self.evaluation, self.held = set(steps), evaluation, held
        self.scores: dict[int, dict[str, tuple[str, list[float]]]] = {}
        self.held_out: dict[int, float] = {}
        self.seconds = 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._visit(trainer, pl_module)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._visit(trainer, pl_module)

    def _visit(self, trainer: Any, pl_module: Any) -> None:
        step = trainer.global_step
        if step not in self.steps or step in self.scores:
            return
        _wait(pl_module)
        start = time.perf_counter()
        self.scores[step] = self.evaluation(pl_module.model.backbone)
        if self.held is not None:
            with trainer.precision_plugin.forward_context():
                self.held_out[step] = pl_module.held_out_loss(self.held)
        _wait(pl_module)
        self.seconds += time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """Return the scores as rows of the tidy frame."""
        return [
            {
                "model": "",
                "revision": f"step{step}",
                "layer": layer,
                "depth": layer / (len(values) - 1),
                "kind": "score",
                "dataset": task,
                "name": name,
                "value": value,
            }
            for step in sorted(self.scores)
            for task, (name, values) in self.scores[step].items()
            for layer, value in enumerate(values)
        ]


def _wait(module: Any) -> None:
    if module.device.type == "cuda":
        torch.cuda.synchronize()
