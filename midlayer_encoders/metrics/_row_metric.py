"""Metrics of the spectrum of a set of rows, from sums that any number of rows can be added to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, prepared, result_dtype, smaller_gram
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, check_at_least, in_stacks, joined, one_device


@dataclass(frozen=True)
class Moments:
    """What the metrics of a set of rows Z need to know of it.

    Attributes:
        matrix: the smaller of ``Z Z'`` and ``Z' Z``, shape ``(*, n, n)``, of the rows as prepared.
        total: sum of the rows, shape ``(*, D)``, before centering.
        count: number of rows N, shape ``(*)``.
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
    """Return the moments of sets of rows, ``(*, N, D)``."""
    rows = prepared(embeddings.double(), None, center=False, unit=unit)
    centered = prepared(rows, None, center=True, unit=False) if center else rows
    count = torch.full(rows.shape[:-2], rows.shape[-2], device=rows.device)
    return Moments(smaller_gram(centered), rows.sum(dim=-2), count, rows.shape[-1])


def _of_finite(moments: Moments, of: Callable[[Moments], Tensor]) -> Tensor:
    # Without asking whether all are finite, which would wait for a GPU.
    finite = torch.isfinite(moments.matrix).all(dim=-1).all(dim=-1)
    return torch.where(finite, of(moments), torch.nan)


class MomentMetric(LayerMetric):
    """A number that depends on the moment matrix of all rows, kept as one D x D matrix per layer in float64.

    Args:
        layers: as in :class:`LayerMetric`.
        of: the numbers of sets of rows, shape ``(*)``, from their moments; NaN where those are.
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
        return self._values([layer])[0]

    def _values(self, layers: Sequence[int]) -> Tensor:
        rows = {layer: joined(getattr(self, f"rows_{layer}")) for layer in layers}
        folded = [layer for layer in layers if len(getattr(self, f"moment_{layer}"))]
        counts = dict(zip(self.layers, self.count.tolist(), strict=True)) if folded else {}
        for layer in layers:
            kept = rows[layer]
            count = counts.get(layer, 0) + (0 if kept is None else len(kept))
            check_at_least(self.least, count, f"Rows given to {type(self).__name__} at layer {layer}")
        found = {layer: _of_finite(self._moments(layer, rows[layer]), self._of) for layer in folded}
        whole = [kept for layer in layers if layer not in folded and (kept := rows[layer]) is not None]
        values = iter(in_stacks(whole, self._of_stack))
        return one_device([found[layer] if layer in found else next(values) for layer in layers])

    def _of_stack(self, rows: Tensor) -> Tensor:
        """Return the numbers of several layers, shape ``(L,)``, whose rows were not folded, ``(L, N, D)``."""
        return _of_finite(_row_moments(rows, center=self.center, unit=self.unit), self._of)

    def _moments(self, layer: int, rows: Tensor | None) -> Moments:
        """Return the moments of all that was added to a layer: the folded rows, and those not yet folded."""
        count = self.count[self._position(layer)] + (0 if rows is None else len(rows))
        moment, total = (getattr(self, f"{name}_{layer}") for name in ("moment", "total"))
        moment, total = (torch.cat(one) if isinstance(one, list) else one for one in (moment, total))
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


class RowMetric(MomentMetric):
    """A number that depends on the spectrum of the texts' vectors, one row per text.

    Exact for any number of texts. Rows are kept as they come (in their own type, without a copy where they own their
    memory) until a layer has more than 1024 and more than twice as many as they have dimensions; from then on only the
    D x D moment matrix in float64. So few texts cost a small Gram matrix, and many cost no more than D x D.

    A text counts as often as it is given: the shards of several processes must not overlap.
    """

    kind: ClassVar[Kind] = "pooled"

    def update(self, layer: int, embeddings: Tensor, *, index: Tensor | None = None) -> None:
        """Add one layer's vectors of a batch.

        Args:
            layer: one of ``layers``.
            embeddings: one row per text, shape ``(B, D)``.
            index: ignored; other metrics of one vector per text need it.
        """
        check_embeddings(embeddings, index)
        self._position(layer)
        rows = getattr(self, f"rows_{layer}")
        rows.append(own(embeddings))
        if sum(map(len, rows)) > max(1024, 2 * embeddings.shape[-1]):
            kept = prepared(torch.cat(rows).double(), None, center=False, unit=self.unit)
            rows.clear()
            self._fold(layer, kept, len(kept))


def check_embeddings(embeddings: Tensor, index: Tensor | None) -> None:
    """Raise an :class:`OptionError` unless there is one row, and one index, per text."""
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise OptionError(
            f"`embeddings` must be (B, D) of floats, but got {tuple(embeddings.shape)} of {embeddings.dtype}."
        )
    if index is not None and (index.shape != embeddings.shape[:1] or index.is_floating_point()):
        raise OptionError(
            f"`index` must be {len(embeddings)} integers, the place of each text in the whole list, "
            f"but got {tuple(index.shape)} of {index.dtype}."
        )


def own(embeddings: Tensor) -> Tensor:
    """Return vectors that keep nothing else alive: a copy where they are a view into larger states."""
    rows = embeddings.detach()
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
