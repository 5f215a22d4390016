"""Metrics of the spectrum of one vector per text, exact and in bounded memory."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._base.gram import prepared
from midlayer_encoders.metrics._base.layer_metric import Kind
from midlayer_encoders.metrics._base.moment_metric import MomentMetric

__all__ = ["RowMetric", "check_embeddings", "own"]


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
