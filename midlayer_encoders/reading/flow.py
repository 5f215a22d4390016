"""Overlap preprocessing, copies and forward passes of batches.

Another thread prepares the next batches. Inputs and vectors are copied through pinned memory on separate CUDA streams,
the vectors of all layers in one copy with one flag for finiteness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Norm, Pooling, ReadSite
from midlayer_encoders.errors import NotFiniteError
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.transformers_internals import without_cache
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.capture import STREAM, capture
from midlayer_encoders.reading.causal import causal_attention, mask_is_needless, padded_right
from midlayer_encoders.reading.fused import FusedPooling
from midlayer_encoders.reading.pooling import real_tokens
from midlayer_encoders.recipes.counting import Counting

TokenReceive: TypeAlias = Callable[[int, Tensor, Tensor, list[int]], None]
"""Called with the layer, the raw states ``(B, T, D)``, the mask ``(B, T)`` and the inputs' positions."""

_THREADS = 2  # for images and audio; a tokenizer serves one thread at a time

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReaderSettings:
    """What to read from a model, and how.

    Attributes:
        model: the transformer, uncut or cut after the last layer to read, in eval mode.
        preprocess: returns the model's inputs for a list of texts, images or waveforms; called from any thread.
        anatomy: structure of ``model``.
        layers: layers to read, in the order of the results.
        norm: ``"final"`` or ``"none"``.
        pooling: how token states become one vector.
        truncate_dim: number of leading dimensions to return, ``None`` for all.
        device: device of the inputs; ``None`` if ``preprocess`` returns them on the right device.
        unmasked: omit the padding mask if a trial shows that it has no effect, as in causal models padded on the right.
        counting: which tokens to pool.
        site: ``"block"``, or ``"attention"`` or ``"mlp"`` for their contribution to the residual stream, before any
            scale or norm. ``norm`` applies to any site.
    """

    model: nn.Module
    preprocess: Callable[[list[Any]], Mapping[str, Any]]
    anatomy: Anatomy
    layers: Sequence[int]
    norm: Norm = "final"
    pooling: Pooling = "mean"
    truncate_dim: int | None = None
    device: torch.device | None = None
    unmasked: bool = False
    counting: Counting = Counting()
    site: ReadSite = "block"

    @property
    def sites(self) -> tuple[str]:
        """The name of the site inside a block."""
        return (STREAM if self.site == "block" else self.site,)


@dataclass(frozen=True)
class Passed:
    """A batch whose pass has started; :meth:`vectors` waits for its vectors in any thread.

    Attributes:
        positions: positions of its inputs in the whole list.
        inputs: its inputs, for error messages.
        layers: layers of its vectors.
    """

    positions: list[int]
    inputs: list[Any]
    layers: Sequence[int]
    _host: Tensor
    _finite: Tensor
    _copied: torch.cuda.Event | None

    @property
    def pinned(self) -> bool:
        """True if the vectors are in pinned memory, which must be released soon."""
        return self._copied is not None

    def vectors(self) -> Tensor:
        """Wait for the vectors and return them, ``(L, B, D)`` float32 on the CPU.

        Raises:
            NotFiniteError: if a vector contains NaN or infinity; the message names the layer and the input.
        """
        if self._copied is not None:
            self._copied.synchronize()
        if not bool(self._finite):
            row, index = (~self._host.isfinite().all(dim=2)).nonzero()[0].tolist()
            raise NotFiniteError(
                f"Layer {self.layers[row]} gives NaN or infinity for {str(self.inputs[index])[:80]!r}. "
                "Load the model with dtype='float32', or check its weights."
            )
        return self._host


@dataclass(frozen=True)
class _Prepared:
    """The model's inputs of a batch, and whether they are only ids and a mask, padded on the right."""

    features: Mapping[str, Any]
    is_padded_right: bool

    @property
    def size(self) -> int:
        """Number of elements of the largest tensor; for texts the number of tokens."""
        return max((value.numel() for value in self.features.values() if isinstance(value, Tensor)), default=0)


def passes(
    reader: ReaderSettings,
    inputs: Sequence[Any],
    batches: Sequence[Sequence[int]],
    *,
    tokens: TokenReceive | None = None,
) -> Generator[Passed, None, None]:
    """Yield each batch once its pass has started, without waiting for the device.

    Args:
        reader: what to read from which model.
        inputs: all inputs.
        batches: positions of the inputs of each batch.
        tokens: also called with the raw states of each layer.
    """
    flow = _Flow(reader, inputs, tokens)
    lists = [list(batch) for batch in batches]
    if len(lists) < 2:
        for batch in lists:
            yield from flow.halving(batch, partial(flow.prepare, batch))
        return
    with closing(ahead(flow.prepare, lists, threads=_THREADS)) as prepared_batches:
        for batch, prepared in prepared_batches:
            yield from flow.halving(batch, prepared)


class _Flow:
    """State shared by the batches of a run: pooling, streams and the size limit."""

    def __init__(self, reader: ReaderSettings, inputs: Sequence[Any], tokens: TokenReceive | None) -> None:
        self.reader = reader
        self.inputs = inputs
        self.tokens = tokens
        final = reader.anatomy.final if reader.norm == "final" else ()
        self.pooled = FusedPooling([reader.model.get_submodule(path) for path in final], reader.pooling)
        self.needless: bool | None = None if reader.unmasked else False
        self.size_limit: int | None = None  # smallest size that ran out of memory
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    @torch.inference_mode()
    def prepare(self, batch: Sequence[int]) -> _Prepared:
        """Return the model's inputs of a batch, in pinned memory if the model is on a GPU."""
        features = dict(self.reader.preprocess([self.inputs[position] for position in batch]))
        device = self.reader.device
        is_padded_right = self.needless is not False and padded_right(features)
        if device is not None and device.type == "cuda":
            features = {
                key: value.pin_memory() if isinstance(value, Tensor) and value.device.type == "cpu" else value
                for key, value in features.items()
            }
        return _Prepared(features, is_padded_right)

    def halving(self, batch: list[int], prepared: Callable[[], _Prepared]) -> Iterator[Passed]:
        """Run a batch; if memory runs out, run its halves, and halve later batches of that size."""
        indivisible = len(batch) == 1 or self.tokens is not None  # a metric must receive each state once
        size = 0
        try:
            inputs = prepared()
            size = inputs.size
            fits = indivisible or self.size_limit is None or size < self.size_limit
            passed = self._launch(batch, inputs) if fits else None
        except torch.OutOfMemoryError:
            if indivisible:
                raise
            if self.size_limit is None:
                _log.warning(
                    "Out of memory in a batch of %d inputs: batches of this size are split in halves. "
                    "Pass a smaller `token_budget` to avoid this.",
                    len(batch),
                )
            self.size_limit = size or self.size_limit
            passed = None
        if passed is not None:
            yield passed
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        for half in (batch[: len(batch) // 2], batch[len(batch) // 2 :]):
            yield from self.halving(half, partial(self.prepare, half))

    @torch.inference_mode()
    def _launch(self, batch: list[int], prepared: _Prepared) -> Passed:
        reader = self.reader
        rows = {layer: row for row, layer in enumerate(reader.layers)}
        features = self._moved(prepared.features)
        real = features.get("attention_mask")
        attention: AbstractContextManager[object] = nullcontext()
        if prepared.is_padded_right and self._mask_is_needless(features):
            attention = causal_attention(features["input_ids"].device)
            features = {key: value for key, value in features.items() if key != "attention_mask"}
        masks: dict[Any, tuple[Tensor, Tensor]] = {}
        stacked: list[Tensor] = []
        order: list[int] = []

        def receive(layer: int, _: str, states: Tensor) -> None:
            key = states.shape[:2], states.device
            if key not in masks:
                mask = real_tokens(real, states, model=reader.model)
                masks[key] = mask, reader.counting(mask)
            mask, counted = masks[key]
            if self.tokens is not None:
                self.tokens(layer, states, mask, batch)
            vectors = self.pooled(states, counted)[:, : reader.truncate_dim]
            if not stacked:  # one tensor for all layers, copied to the CPU at once
                stacked.append(torch.empty(len(rows), *vectors.shape, device=vectors.device))
            stacked[0][rows[layer]].copy_(vectors, non_blocking=True)
            order.append(rows[layer])

        features = without_cache(reader.model, features)
        self.pooled.begin()
        with attention:
            capture(reader.model, features, receive, anatomy=reader.anatomy, layers=reader.layers, sites=reader.sites)
        for row, vectors in zip(order, self.pooled.settle() or (), strict=False):
            stacked[0][row].copy_(vectors[:, : reader.truncate_dim])
        inputs = [self.inputs[position] for position in batch]
        return Passed(batch, inputs, reader.layers, *self._to_host(stacked[0]))

    def _mask_is_needless(self, features: Mapping[str, Any]) -> bool:
        if self.needless is None:
            self.needless = mask_is_needless(self.reader.model, self.reader.anatomy, features)
        return self.needless

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams that copy inputs to a device and vectors from it."""
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _moved(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return features on the model's device; copies from pinned memory overlap with the previous pass."""
        device = self.reader.device
        if device is None:
            return dict(features)
        if device.type != "cuda":
            return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}
        incoming, _ = self._streams_of(device)
        current = torch.cuda.current_stream(device)
        with torch.cuda.stream(incoming):
            moved = {
                key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in features.items()
            }
        current.wait_stream(incoming)
        for key, value in moved.items():
            if isinstance(value, Tensor) and value is not features[key]:
                value.record_stream(current)
        return moved

    def _to_host(self, vectors: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Start copying the vectors and their finiteness to the CPU; return both and the event to wait for."""
        finite = vectors.isfinite().all()
        if not vectors.is_cuda:
            return vectors.cpu(), finite.cpu(), None
        _, outgoing = self._streams_of(vectors.device)
        outgoing.wait_stream(torch.cuda.current_stream(vectors.device))
        with torch.cuda.stream(outgoing):
            host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(vectors, non_blocking=True)
            flag.copy_(finite, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(outgoing)
        vectors.record_stream(outgoing)
        finite.record_stream(outgoing)
        return host, flag, copied
