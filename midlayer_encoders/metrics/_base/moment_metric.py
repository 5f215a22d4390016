"""Metrics of the spectrum of a set of rows, from sums that any number of rows can be added to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.metrics._base.gram import prepared, smaller_gram
from midlayer_encoders.metrics._base.layer_metric import LayerMetric, check_at_least, joined
from midlayer_encoders.metrics._base.precision import full_precision, result_dtype

__all__ = ["MomentMetric", "Moments", "of_rows"]


@dataclass(frozen=True)
class Moments:
    """What the metrics of a set of rows Z need to know of it.

    Attributes:
        matrix: the smaller of ``Z Z'`` and ``Z' Z``, shape ``(n, n)``, of the rows as prepared.
        total: sum of the rows, shape ``(D,)``, before centering.
        count: number of rows N, a scalar.
        width: their dimension D.
    """

    matrix: Tensor
    total: Tensor
    count: Tensor
    width: int


def of_rows(embeddings: Tensor, of: Callable[[Moments], Tensor], *, center: bool, unit: bool) -> Tensor:
    """Return the number ``of`` the moments of rows ``(N, D)``, a scalar; NaN where they hold NaN or infinity.

    Rows are scaled to unit length first and centered then, as asked: the order in which rows can be added one by one.
    """
    return _of_finite(_row_moments(embeddings, center=center, unit=unit), of).to(result_dtype(embeddings))


def _row_moments(embeddings: Tensor, *, center: bool, unit: bool) -> Moments:
    rows = prepared(embeddings.double(), None, center=False, unit=unit)
    centered = prepared(rows, None, center=True, unit=False) if center else rows
    count = torch.tensor(len(rows), device=rows.device)
    return Moments(smaller_gram(centered), rows.sum(dim=0), count, rows.shape[-1])


def _of_finite(moments: Moments, of: Callable[[Moments], Tensor]) -> Tensor:
    if not torch.isfinite(moments.matrix).all():
        return moments.matrix.new_tensor(torch.nan)
    return of(moments)


class MomentMetric(LayerMetric):
    """A number that depends on the moment matrix of all rows, kept as one D x D matrix per layer in float64.

    Args:
        layers: as in :class:`LayerMetric`.
        of: the number of a set of rows, a scalar, from their moments.
        center: subtract the mean of all rows, after ``unit``.
        unit: scale each row to unit length.
        torchmetrics_options: as in :class:`LayerMetric`.

    Attributes:
        least: number of rows below which there is no value.
    """

    least: int = 1
    count: Tensor

    def __init__(
        self,
        layers: Sequence[int],
        of: Callable[[Moments], Tensor],
        *,
        center: bool = False,
        unit: bool = False,
        **torchmetrics_options: Any,
    ) -> None:
        super().__init__(layers, **torchmetrics_options)
        self._of, self.center, self.unit = of, center, unit
        self.add_state("count", torch.zeros(len(self.layers), dtype=torch.int64), dist_reduce_fx="sum")
        for layer in self.layers:
            for name in ("rows", "total", "moment"):
                self.add_state(f"{name}_{layer}", [], dist_reduce_fx="cat")

    def _fold(self, layer: int, rows: Tensor, count: Tensor | int) -> None:
        """Add prepared rows, shape ``(n, D)``, of which ``count`` are not padding, to the moment matrix."""
        with full_precision(rows.device):
            moment = rows.mT @ rows
        for name, new in (("moment", moment), ("total", rows.sum(dim=0))):
            old = getattr(self, f"{name}_{layer}")
            new = new.double().to(self.count.device)[None]
            old[:] = [old[0] + new] if old else [new]
        self.count[self._position(layer)] += count

    def _value(self, layer: int) -> Tensor:
        return _of_finite(self._moments(layer), self._of)

    def _moments(self, layer: int) -> Moments:
        """Return the moments of all that was added to a layer: rows not yet folded, and the folded ones."""
        rows, moment, total = (joined(getattr(self, f"{name}_{layer}")) for name in ("rows", "moment", "total"))
        count = self.count[self._position(layer)] + (0 if rows is None else len(rows))
        check_at_least(self.least, int(count), f"Rows given to {type(self).__name__} at layer {layer}")
        if moment is None or total is None or len(moment) == 0:
            assert rows is not None
            return _row_moments(rows, center=self.center, unit=self.unit)
        moment, total = moment.sum(dim=0), total.sum(dim=0)
        if rows is not None and len(rows):
            rest = prepared(rows.double(), None, center=False, unit=self.unit)
            moment, total = moment + rest.mT @ rest, total + rest.sum(dim=0)
        return Moments(_centered(moment, total, count) if self.center else moment, total, count, len(total))


def _centered(moment: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Return the moment matrix about the mean; zero where rows differ from it by no more than rounding."""
    centered = moment - torch.outer(total, total) / count
    rounding = 32 * count.sqrt() * torch.finfo(moment.dtype).eps * moment.trace()
    return torch.where(centered.trace() <= rounding, 0.0, centered)
