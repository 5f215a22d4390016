"""Metrics of a text's token states: a mean over texts, accumulated as sums."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, check_at_least

_MAX_TEMPORARIES = 2**24
"""Temporary numbers at once (64 MB in float32): a large batch is never copied whole."""


class MeanOverTexts(LayerMetric):
    """Mean over texts of a number of each text's token states.

    Stores three sums per layer, whatever the number of texts. A text that is too short to have the number is excluded
    from the mean and counted in ``skipped``.

    Attributes:
        count: texts in the mean, shape ``(len(layers),)``.
        skipped: texts excluded, shape ``(len(layers),)``.
    """

    kind: ClassVar[Kind] = "tokens"
    total: Tensor
    count: Tensor
    skipped: Tensor

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.add_state("total", torch.zeros(len(self.layers), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(len(self.layers), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("skipped", torch.zeros(len(self.layers), dtype=torch.int64), dist_reduce_fx="sum")

    def _add(self, row: int, values: Tensor, defined: Tensor) -> None:
        """Add the number of each text that has one to the sums of a layer; both ``(B,)``."""
        device = self.total.device
        self.total[row] += torch.where(defined, values, 0.0).sum(dtype=torch.float64).to(device)
        count = defined.sum().to(device)
        self.count[row] += count
        self.skipped[row] += len(defined) - count

    def _value(self, layer: int) -> Tensor:
        return self._values([layer])[0]

    def _values(self, layers: Sequence[int]) -> Tensor:
        rows = [self._position(layer) for layer in layers]
        count = self.count[rows]
        for layer, texts in zip(layers, count.tolist(), strict=True):
            if self._has_value(layer):
                check_at_least(1, texts, f"Texts long enough for {type(self).__name__} at layer {layer}")
        return self.total[rows] / count


class TokenMetric(MeanOverTexts):
    """A :class:`MeanOverTexts` of a number that depends on one layer only."""

    @abstractmethod
    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it is defined, both ``(B,)``."""

    def _temporaries(self, states: Tensor) -> int:
        """Return how many temporary numbers one text needs: as many as its states, unless they are not copied."""
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
        for chunk, chunk_mask in chunks(states, mask, self._temporaries(states)):
            self._add_texts(row, chunk, chunk_mask)

    def _add_texts(self, row: int, states: Tensor, mask: Tensor) -> None:
        """Add texts of a layer to its sums."""
        self._add(row, *self._per_text(states, mask))


@dataclass(frozen=True)
class _Waiting:
    """Texts whose numbers are not computed yet: the layer of each, and tensors with one row per text."""

    rows: list[int]
    tensors: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class WaitingTokenMetric(TokenMetric):
    """A :class:`TokenMetric` that computes several layers at once on a GPU.

    The small matrices or few angles of one layer do not fill a GPU, and each launch costs the same. So the ingredients
    of the texts' numbers wait for those of the next layers (benchmarks/results/metrics_h200.md). The states themselves
    wait only if a batch is so small that copying them costs less than the launches
    (benchmarks/results/callbacks_cuda.md). :meth:`settle`, which ``compute`` and ``sync`` call, completes the sums.
    """

    _max_waiting_bytes: ClassVar[int]
    """Bytes of ingredients that may wait."""
    _max_state_bytes: ClassVar[int] = 2**26
    """Bytes of states that may wait."""

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self._layout: tuple[torch.device, torch.dtype, torch.Size] | None = None
        self._states: list[_Waiting] = []
        self._waiting: list[_Waiting] = []

    @abstractmethod
    def _ingredients(self, states: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs of :meth:`_settled`, tensors with one row per text that are not views of the states."""

    @abstractmethod
    def _settled(self, ingredients: tuple[Tensor, ...], width: int) -> tuple[Tensor, Tensor]:
        """Return each text's number and whether it is defined, both ``(B,)``, for states of this width."""

    def _per_text(self, states: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return self._settled(self._ingredients(states, mask), states.shape[-1])

    def _waits(self, states: Tensor) -> bool:
        return states.is_cuda

    def _add_texts(self, row: int, states: Tensor, mask: Tensor) -> None:
        if not self._waits(states):
            super()._add_texts(row, states, mask)
            return
        layout = states.device, states.dtype, states.shape[1:]
        if layout != self._layout:
            self.settle()
        self._layout = layout
        rows = [row] * len(states)
        if 4 * states.nbytes > self._max_state_bytes:
            self._wait([_Waiting(rows, (states, mask))])
            return
        self._states.append(_Waiting(rows, (states.clone(), mask)))  # a block may add to its input in place
        if sum(waiting.nbytes for waiting in self._states) >= self._max_state_bytes:
            self._wait_with_states()

    def _wait_with_states(self) -> None:
        """Turn all waiting states into ingredients."""
        states = self._states
        self._states = []
        if states:
            self._wait(states)

    def _wait(self, waiting_states: list[_Waiting]) -> None:
        """Turn states into ingredients, which wait in turn."""
        rows, (states, mask) = _joined(waiting_states)
        self._waiting.append(_Waiting(rows, self._ingredients(states, mask)))
        if sum(waiting.nbytes for waiting in self._waiting) >= self._max_waiting_bytes:
            self._add_waiting()

    def settle(self) -> None:
        """Add all waiting texts to the sums."""
        self._wait_with_states()
        self._add_waiting()

    def _add_waiting(self) -> None:
        if not self._waiting or self._layout is None:
            return
        rows, ingredients = _joined(self._waiting)
        self._waiting = []  # frees as much memory as the ingredients
        values, defined = self._settled(ingredients, self._layout[-1][-1])
        device = self.total.device
        position = torch.tensor(rows).to(device, non_blocking=True)
        values, defined = values.to(device), defined.to(device)
        # Not in place: sums created in inference mode may be settled outside it.
        self.total = self.total.index_add(0, position, torch.where(defined, values, 0.0).double())
        self.count = self.count.index_add(0, position, defined.long())
        self.skipped = self.skipped.index_add(0, position, (~defined).long())

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Settle, then merge the sums with the other processes; ``compute`` calls this first."""
        self.settle()
        super().sync(*args, **kwargs)

    @property
    def metric_state(self) -> dict[str, list[Tensor] | Tensor]:
        """The sums, including waiting texts."""
        self.settle()
        return super().metric_state

    def reset(self) -> None:
        """Remove all texts."""
        super().reset()
        self._states = []
        self._waiting = []


def _joined(waiting: list[_Waiting]) -> tuple[list[int], tuple[Tensor, ...]]:
    """Return the rows of all waiting texts and their tensors."""
    if len(waiting) == 1:
        return waiting[0].rows, waiting[0].tensors
    rows = [row for batch in waiting for row in batch.rows]
    return rows, tuple(torch.cat(tensors) for tensors in zip(*(batch.tensors for batch in waiting), strict=True))


def check_tokens(states: Tensor, mask: Tensor) -> None:
    """Raise an :class:`OptionError` unless the mask fits the states."""
    if states.ndim != 3 or mask.shape != states.shape[:2] or mask.dtype != torch.bool:
        raise OptionError(
            "`states` must be (B, T, D) and `mask` (B, T) of bool, "
            f"but got {tuple(states.shape)} and {tuple(mask.shape)} of {mask.dtype}."
        )


def chunks(states: Tensor, mask: Tensor, temporaries: int | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a batch in chunks that need a bounded number of temporary numbers; by default a text needs T x D."""
    per_text = states.shape[1] * states.shape[2] if temporaries is None else temporaries
    texts = max(1, _MAX_TEMPORARIES // max(1, per_text))
    yield from zip(torch.split(states, texts), torch.split(mask, texts), strict=True)


def all_real(states: Tensor) -> Tensor:
    """Return the mask of states without padding, shape ``(*, T)``."""
    return torch.ones(states.shape[:-1], dtype=torch.bool, device=states.device)
