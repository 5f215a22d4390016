"""The probe: fixed inputs passed through a model as it is now, every metric of every layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch import distributed as dist

from midlayer_encoders._types import Norm, Pooling
from midlayer_encoders.callbacks._backbone import accepted_inputs
from midlayer_encoders.callbacks._inputs import Batch, Passes
from midlayer_encoders.callbacks._undisturbed import undisturbed
from midlayer_encoders.errors import MidlayerError, NotFiniteError
from midlayer_encoders.measuring import make_for_views
from midlayer_encoders.metrics import LayerMetric
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import capture
from midlayer_encoders.reading.pooling import pool, real_tokens
from midlayer_encoders.selection.ridge import ridge_correct

__all__ = ["LABEL_ACCURACY", "OtherProcessError", "Probe", "Values"]

Values = dict[str, list[float]]
"""The value of each layer, in the order of the probe's layers, by metric."""

LABEL_ACCURACY = "label_accuracy"
"""Name of the cross-validated accuracy of a ridge classifier on a layer's vectors."""


class OtherProcessError(MidlayerError, RuntimeError):
    """The probe failed in another process of a distributed run."""


@dataclass(frozen=True)
class Probe:
    """Inputs that stay the same, and what to measure of them.

    Attributes:
        passes: batches of the inputs themselves, then of each view.
        anatomy: of the model.
        layers: which layers, ascending.
        metrics: names of the metrics; may be none where there are labels.
        views: number of views of each input that LiDAR takes.
        norm: of the pooled vectors.
        pooling: how token states become one vector.
        labels: class of each input, shape ``(N,)``, ``None`` where there are none.
        seed: of the folds of the labels.
    """

    passes: Passes
    anatomy: Anatomy
    layers: Sequence[int]
    metrics: Sequence[str] | str
    views: int = 0
    norm: Norm = "none"
    pooling: Pooling = "mean"
    labels: Tensor | None = None
    seed: int = 0

    def measure(self, model: nn.Module, autocast: AbstractContextManager[object]) -> Values:
        """Return every metric of every layer of ``model`` as it is now, and leave it as it was.

        In a distributed run every process must call it: each passes its share of the batches, all get the same values.

        Args:
            model: the transformer.
            autocast: what the run's own forward passes run under.
        """
        device = next(model.parameters()).device
        made = make_for_views(self.metrics, self.layers, self.views) if self.metrics else {}
        vectors: dict[int, Tensor] = {}
        with undisturbed(model):
            metrics = {name: metric.to(device) for name, metric in made.items()}
            with _together(device), autocast:
                for view, batches in enumerate(self.passes, start=-1):
                    for batch in _share(batches):
                        self._pass(model, batch, view, metrics, vectors)
            values = {name: metric.compute().tolist() for name, metric in metrics.items()}
        if self.labels is not None:
            values[LABEL_ACCURACY] = self._label_accuracy(vectors, self.labels)
        return values

    def _pass(
        self, model: nn.Module, batch: Batch, view: int, metrics: dict[str, LayerMetric], vectors: dict[int, Tensor]
    ) -> None:
        """Pass one batch through the model and update the metrics that want it."""
        device = next(model.parameters()).device
        inputs = {name: value.to(device, non_blocking=True) for name, value in batch.inputs.items()}
        real = inputs["attention_mask"].bool() if "attention_mask" in inputs else None
        names = accepted_inputs(model)
        extra = {"use_cache": False} if names and "use_cache" in names else {}
        of_tokens = [metric for metric in metrics.values() if metric.kind == "tokens"] if view < 0 else []
        final = [model.get_submodule(path) for path in self.anatomy.final] if self.norm == "final" else []
        index = torch.tensor(batch.positions)
        pooled: list[Tensor] = []

        def receive(layer: int, _: str, states: Tensor) -> None:
            mask = real_tokens(real, states)
            for metric in of_tokens:
                metric.update(layer, states, mask, index=index)
            for module in final:
                states = module(states)
            pooled.append(pool(states, mask, self.pooling).float())

        capture(model, {**inputs, **extra}, receive, anatomy=self.anatomy, layers=self.layers)
        self._take(torch.stack(pooled), batch.positions, view, metrics, vectors)

    def _take(
        self,
        pooled: Tensor,
        positions: list[int],
        view: int,
        metrics: dict[str, LayerMetric],
        vectors: dict[int, Tensor],
    ) -> None:
        """Hand one vector per layer and input, ``(L, B, D)``, to the metrics that want them."""
        index = torch.tensor(positions)
        wants = "pooled" if view < 0 else "views"
        place = {} if view < 0 else {"view": view}
        for layer, rows in zip(self.layers, pooled, strict=True):
            for metric in metrics.values():
                if metric.kind == wants:
                    metric.update(layer, rows, index=index, **place)
        if view < 0 and self.labels is not None:
            vectors.update(zip(positions, pooled.unbind(dim=1), strict=True))

    def _label_accuracy(self, vectors: dict[int, Tensor], labels: Tensor) -> list[float]:
        """Return the accuracy of each layer; the processes' vectors are brought together first."""
        if _world() > 1:
            everyone: list[dict[int, Tensor]] = [{} for _ in range(_world())]
            dist.all_gather_object(everyone, {place: vector.cpu() for place, vector in vectors.items()})
            vectors = {place: vector for part in everyone for place, vector in part.items()}
        stacked = torch.stack([vectors[place] for place in sorted(vectors)], dim=1).cpu()
        if not bool(stacked.isfinite().all()):
            layer = self.layers[int((~stacked.isfinite().flatten(1).all(dim=1)).nonzero()[0])]
            raise NotFiniteError(f"Layer {layer} gives NaN or infinity for the probe's inputs.")
        correct = ridge_correct(stacked, labels, seed=self.seed)
        return [float(value) for value in correct.double().mean(dim=1)]


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _share(batches: list[Batch]) -> list[Batch]:
    """Return the batches of this process."""
    return batches[dist.get_rank() :: _world()] if _world() > 1 else batches


@contextmanager
def _together(device: torch.device) -> Iterator[None]:
    """On the way out, make every process fail where one did: the others would wait for it for ever."""
    failed = True
    try:
        yield
        failed = False
    finally:
        anywhere = _in_any_process(failed, device)
    if anywhere:
        raise OtherProcessError("The probe failed in another process; its log has the trace.")


def _in_any_process(failed: bool, device: torch.device) -> bool:
    if _world() == 1:
        return failed
    flag = torch.tensor(int(failed), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)
