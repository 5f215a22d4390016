"""Metrics of a text's token states: a mean over texts, of which only sums are kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, check_at_least

__all__ = ["MeanOverTexts", "TokenMetric", "all_real", "check_tokens", "parts"]

_ELEMENTS = 2**24
"""How many temporary numbers there may be at once (64 MB in float32): a large batch is never copied as a whole."""


class MeanOverTexts(LayerMetric):
    """Mean over texts of a number that each text's token states have.

    Keeps three sums per layer, whatever the number of texts. A text that is too short to have the number is left out of
    the mean and counted in ``skipped``.

    Attributes:
        count: texts in the mean, shape ``(len(layers),)``.
        skipped: texts left out, shape ``(len(layers),)``.
    """

    kind: ClassVar[Kind] = "tokens"
    total: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self, layers: Sequence[int], **torchmetrics_options: Any) -> None:
        super().__init__(layers, **torchmetrics_options)
        self.add_state("total", torch.zeros(len(self.layers), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(self.layers), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros(len(self.layers), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, row: int, values: Tensor, defined: Tensor) -> None:
        """Add each text's number, where it has one, to the sums of a layer; both ``(B,)``."""
        device = self.total.device
        self.total[row] += torch.where(defined, values, 0.0).sum(dtype=torch.float64).to(device)
        count = defined.sum().to(device)
        self.count[row] += count
        self.skipped[row] += len(defined) - count

    def _value(self, layer: int) -> Tensor:
        row = self._position(layer)
        check_at_least(1, int(self.count[row]), f"Texts long enough for {type(self).__name__} at layer {layer}")
        return self.total[row] / self.count[row]


class TokenMetric(MeanOverTexts):
    """A :class:`MeanOverTexts` of a number that one layer's states alone give."""

    @abstractmethod
    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it has one, both ``(B,)``."""

    def _numbers(self, states: Tensor) -> int:
        """Return how many temporary numbers one text takes: as many as its states have, unless these are not copied."""
        return states.shape[1] * states.shape[2]

    def update(self, layer: int, states: Tensor, mask: Tensor) -> None:
        """Add one layer's token states of a batch.

        Args:
            layer: one of ``layers``.
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may stand on either side.
        """
        check_tokens(states, mask)
        row = self._position(layer)
        for some, real in parts(states, mask, self._numbers(states)):
            self._add(row, *self._per_text(some, real))


def check_tokens(states: Tensor, mask: Tensor) -> None:
    """Raise an :class:`OptionError` unless states and mask belong together."""
    if states.ndim != 3 or mask.shape != states.shape[:2] or mask.dtype != torch.bool:
        raise OptionError(
            "`states` must be (B, T, D) and `mask` (B, T) of bool, "
            f"but got {tuple(states.shape)} and {tuple(mask.shape)} of {mask.dtype}."
        )


def parts(states: Tensor, mask: Tensor, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield so many texts of a batch at a time that memory stays bounded when each takes so many temporary numbers."""
    texts = max(1, _ELEMENTS // max(1, numbers))
    yield from zip(torch.split(states, texts), torch.split(mask, texts), strict=True)


def all_real(states: Tensor) -> Tensor:
    """Return the mask of states without padding, shape ``(*, T)``."""
    return torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)
