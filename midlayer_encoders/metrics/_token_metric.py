"""Metrics of a text's token states: a mean over texts, of which only sums are kept."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, check_at_least

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
        return self._values([layer])[0]

    def _values(self, layers: Sequence[int]) -> Tensor:
        rows = [self._position(layer) for layer in layers]
        total, count = self.total[rows], self.count[rows]
        for layer, texts in zip(layers, count.tolist(), strict=True):
            if self._has_value(layer):
                check_at_least(1, texts, f"Texts long enough for {type(self).__name__} at layer {layer}")
        return total / count


class TokenMetric(MeanOverTexts):
    """A :class:`MeanOverTexts` of a number that one layer's states alone give."""

    @abstractmethod
    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it has one, both ``(B,)``."""

    def _numbers(self, states: Tensor) -> int:
        """Return how many temporary numbers one text takes: as many as its states have, unless these are not copied."""
        return states.shape[1] * states.shape[2]

    def update(self, layer: int, states: Tensor, mask: Tensor, *, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states of a batch.

        Args:
            layer: one of ``layers``.
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.
            index: ignored; other metrics of token states need it.
        """
        check_tokens(states, mask)
        row = self._position(layer)
        for some, real in parts(states, mask, self._numbers(states)):
            self._take(row, some, real)

    def _take(self, row: int, states: Tensor, mask: Tensor) -> None:
        """Add some texts of a layer to its sums."""
        self._add(row, *self._per_text(states, mask))


@dataclass(frozen=True)
class _Waiting:
    """Texts of some layers whose numbers are still to be found: the layer of each, and one row per text of the rest."""

    rows: list[int]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class WaitingTokenMetric(TokenMetric):
    """A :class:`TokenMetric` whose steps are taken for several layers at once, on a GPU.

    The small matrices or the few angles of one layer do not fill a GPU, and every launch costs the same. So the
    ingredients of the texts' numbers, not their states, wait for those of the next layers
    (benchmarks/results/metrics_h200.md); the states themselves only where a batch is so small that a copy of them costs
    less than the launches (benchmarks/results/callbacks_cuda.md). The sums are complete after :meth:`settle`, with
    which ``compute`` and ``sync`` begin.
    """

    _together: ClassVar[int]
    """How many bytes of ingredients may wait."""
    _states_together: ClassVar[int] = 2**26
    """How many bytes of states may wait."""

    def __init__(self, layers: Sequence[int], **torchmetrics_options: Any) -> None:
        super().__init__(layers, **torchmetrics_options)
        self._kind: tuple[torch.device, torch.dtype, torch.Size] | None = None
        self._states: list[_Waiting] = []
        self._waiting: list[_Waiting] = []

    @abstractmethod
    def _ingredients(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return what the texts' numbers are made of, tensors of one row per text that are no views of the states."""

    @abstractmethod
    def _settled(self, ingredients: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it has one, both ``(B,)``, from ingredients and the states' width."""

    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self._settled(self._ingredients(states, mask), states.shape[-1])

    def _waits(self, states: Tensor) -> bool:
        return states.is_cuda

    def _take(self, row: int, states: Tensor, mask: Tensor) -> None:
        if not self._waits(states):
            super()._take(row, states, mask)
            return
        kind = states.device, states.dtype, states.shape[1:]
        if kind != self._kind:
            self.settle()
        self._kind = kind
        rows = [row] * len(states)
        if 4 * states.nbytes > self._states_together:
            self._wait([_Waiting(rows, (states, mask))])
            return
        self._states.append(_Waiting(rows, (states.clone(), mask)))  # a block may add to its input in place
        if sum(one.nbytes for one in self._states) >= self._states_together:
            self._wait(self._pop_states())

    def _pop_states(self) -> list[_Waiting]:
        states, self._states = self._states, []
        return states

    def _wait(self, given: list[_Waiting]) -> None:
        """Make ingredients of states, and have them wait."""
        if not given:
            return
        rows, (states, mask) = _joined(given)
        self._waiting.append(_Waiting(rows, self._ingredients(states, mask)))
        if sum(one.nbytes for one in self._waiting) >= self._together:
            self._find()

    def settle(self) -> None:
        """Add what waits to the sums."""
        self._wait(self._pop_states())
        self._find()

    def _find(self) -> None:
        if not self._waiting or self._kind is None:
            return
        rows, ingredients = _joined(self._waiting)
        self._waiting = []  # they take as much memory again
        values, defined = self._settled(ingredients, self._kind[-1][-1])
        device = self.total.device
        at = torch.tensor(rows).to(device, non_blocking=True)
        values, defined = values.to(device), defined.to(device)
        # Not in place: sums that were made in inference mode may be settled outside.
        self.total = self.total.index_add(0, at, torch.where(defined, values, 0.0).double())
        self.count = self.count.index_add(0, at, defined.long())
        self.skipped = self.skipped.index_add(0, at, (~defined).long())

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Settle what waits, then share the sums with the other processes; ``compute`` begins with it, always."""
        self.settle()
        super().sync(*args, **kwargs)

    @property
    def metric_state(self) -> dict[str, list[Tensor] | Tensor]:
        """The sums, with what waits."""
        self.settle()
        return super().metric_state

    def reset(self) -> None:
        """Forget all texts."""
        super().reset()
        self._states, self._waiting = [], []


def _joined(waiting: list[_Waiting]) -> tuple[list[int], tuple[Tensor, ...]]:
    """Return the rows of all texts that wait, and their tensors."""
    if len(waiting) == 1:
        return waiting[0].rows, waiting[0].tensors
    rows = [row for one in waiting for row in one.rows]
    return rows, tuple(torch.cat(each) for each in zip(*(one.tensors for one in waiting), strict=True))


def check_tokens(states: Tensor, mask: Tensor) -> None:
    """Raise an :class:`OptionError` unless states and mask belong together."""
    if states.ndim != 3 or mask.shape != states.shape[:2] or mask.dtype != torch.bool:
        raise OptionError(
            "`states` must be (B, T, D) and `mask` (B, T) of bool, "
            f"but got {tuple(states.shape)} and {tuple(mask.shape)} of {mask.dtype}."
        )


def parts(states: Tensor, mask: Tensor, numbers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch in parts whose texts, at ``numbers`` temporary numbers each, take a bounded amount of memory."""
    texts = max(1, _ELEMENTS // max(1, numbers))
    yield from zip(torch.split(states, texts), torch.split(mask, texts), strict=True)


def all_real(states: Tensor) -> Tensor:
    """Return the mask of states without padding, shape ``(*, T)``."""
    return torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)
