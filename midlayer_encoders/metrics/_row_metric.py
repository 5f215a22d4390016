"""Metrics of the spectrum of a set of rows, exact for any number of rows and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, prepared, result_dtype, smaller_gram
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, check_at_least, in_stacks, joined, one_device


@dataclass(frozen=True)
class Moments:
    """Summary of sets of rows Z.

    Attributes:
        matrix: the smaller of ``Z Z'`` and ``Z' Z``, shape ``(*, n, n)``, of the prepared rows.
        total: sum of the rows, shape ``(*, D)``, before centering.
        count: number of rows N, shape ``(*)``.
        width: their dimension D.
    """

    matrix: Tensor
    total: Tensor
    count: Tensor
    width: int


def number_of_rows(
    embeddings: Tensor, number: Callable[[Moments], Tensor], *, center: bool = False, unit: bool = False
) -> Tensor:
    """Return the number of rows ``(N, D)``, a scalar; NaN if they contain NaN or infinity.

    Rows are first scaled to unit length (``unit``), then centered (``center``): in this order they can be accumulated.
    """
    return _finite_number(_row_moments(embeddings, center=center, unit=unit), number).to(result_dtype(embeddings))


def _row_moments(embeddings: Tensor, *, center: bool, unit: bool) -> Moments:
    """Return the moments of sets of rows, ``(*, N, D)``."""
    rows = prepared(embeddings.double(), None, center=False, unit=unit)
    centered = prepared(rows, None, center=True, unit=False) if center else rows
    count = torch.full(rows.shape[:-2], rows.shape[-2], device=rows.device)
    return Moments(smaller_gram(centered), rows.sum(dim=-2), count, rows.shape[-1])


def _finite_number(moments: Moments, number: Callable[[Moments], Tensor]) -> Tensor:
    # No `if`, which would wait for a GPU.
    finite = torch.isfinite(moments.matrix).all(dim=-1).all(dim=-1)
    return torch.where(finite, number(moments), torch.nan)


class MomentMetric(LayerMetric):
    """A number that depends on the moment matrix of all rows, accumulated as one D x D float64 matrix per layer.

    A subclass passes ``number``, which computes the numbers of sets of rows, shape ``(*)``, from their
    :class:`Moments` and the options other than ``center`` and ``unit``.

    Attributes:
        least: smallest number of rows that has a value.
        center: subtract the mean of all rows, after ``unit``.
        unit: scale each row to unit length.
    """

    least: int = 1
    count: Tensor

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.center = bool(self.options.get("center", False))
        self.unit = bool(self.options.get("unit", False))
        assert self._number is not None
        number_options = {name: value for name, value in self.options.items() if name not in ("center", "unit")}
        self._number_of_moments = partial(self._number, **number_options)
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
            layer_rows = rows[layer]
            count = counts.get(layer, 0) + (0 if layer_rows is None else len(layer_rows))
            check_at_least(self.least, count, f"Rows given to {type(self).__name__} at layer {layer}")
        numbers = {
            layer: _finite_number(self._moments(layer, rows[layer]), self._number_of_moments) for layer in folded
        }
        unfolded = [rows[layer] for layer in layers if layer not in folded]
        values = iter(in_stacks([tensor for tensor in unfolded if tensor is not None], self._number_of_stack))
        return one_device([numbers[layer] if layer in numbers else next(values) for layer in layers])

    def _number_of_stack(self, rows: Tensor) -> Tensor:
        """Return the numbers of several layers, shape ``(L,)``, from their unfolded rows, ``(L, N, D)``."""
        return _finite_number(_row_moments(rows, center=self.center, unit=self.unit), self._number_of_moments)

    def _moments(self, layer: int, rows: Tensor | None) -> Moments:
        """Return the moments of all rows of a layer: the folded ones and those not yet folded."""
        count = self.count[self._position(layer)] + (0 if rows is None else len(rows))
        moment = joined(getattr(self, f"moment_{layer}"))
        total = joined(getattr(self, f"total_{layer}"))
        assert moment is not None
        assert total is not None
        moment = moment.sum(dim=0)
        total = total.sum(dim=0)
        if rows is not None and len(rows):
            rest = prepared(rows.double(), None, center=False, unit=self.unit)
            moment = moment + rest.mT @ rest
            total = total + rest.sum(dim=0)
        return Moments(_centered(moment, total, count) if self.center else moment, total, count, len(total))


def _centered(moment: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Return the moment matrix about the mean; zero if rows differ from the mean only by rounding."""
    centered = moment - torch.outer(total, total) / count
    rounding = 32 * count.sqrt() * torch.finfo(moment.dtype).eps * moment.trace()
    return torch.where(centered.trace() <= rounding, 0.0, centered)


class RowMetric(MomentMetric):
    """A number that depends on the spectrum of the texts' vectors, one row per text.

    Exact for any number of texts. Rows are stored in their own dtype (without a copy if they own their memory) until a
    layer has more than 1024 and more than twice as many as dimensions; from then on only the D x D moment matrix in
    float64 is stored. So few texts need a small Gram matrix, and many never need more than D x D.

    A text counts as often as it is passed: shards of several processes must not overlap.
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
        rows.append(owned(embeddings))
        if sum(map(len, rows)) > max(1024, 2 * embeddings.shape[-1]):
            prepared_rows = prepared(torch.cat(rows).double(), None, center=False, unit=self.unit)
            rows.clear()
            self._fold(layer, prepared_rows, len(prepared_rows))


def check_embeddings(embeddings: Tensor, index: Tensor | None) -> None:
    """Raise an :class:`OptionError` unless there is one row, and one index, per text."""
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise OptionError(
            f"`embeddings` must be (B, D) of floats, but got {tuple(embeddings.shape)} of {embeddings.dtype}."
        )
    if index is not None and (index.shape != embeddings.shape[:1] or index.is_floating_point()):
        raise OptionError(
            f"`index` must be {len(embeddings)} integers, the position of each text in the whole list, "
            f"but got {tuple(index.shape)} of {index.dtype}."
        )


def owned(embeddings: Tensor) -> Tensor:
    """Return vectors that own their memory: a copy if they are a view into larger states."""
    rows = embeddings.detach()
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows
