"""Batches on their way through a model: inputs made ahead, copies beside the passes, nothing that waits for the device.

A batch is prepared in another thread while those before it pass; its inputs and its vectors travel in pinned memory on
streams of their own, the vectors of all layers in one copy with one flag that says whether they are finite.
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

_THREADS = 2  # one tokenizer serves one thread at a time; images and audio are read side by side

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
    """One batch whose pass was started: its vectors are there once :meth:`vectors` returns, in whichever thread.

    Attributes:
        positions: of its inputs in the whole list.
        inputs: its inputs, for errors.
        layers: of its vectors.
    """

    positions: list[int]
    inputs: list[Any]
    layers: Sequence[int]
    _host: Tensor
    _finite: Tensor
    _copied: torch.cuda.Event | None

    @property
    def pinned(self) -> bool:
        """Whether the vectors lie in pinned memory, which is not to be kept."""
        return self._copied is not None

    def vectors(self) -> Tensor:
        """Return the vectors, ``(L, B, D)`` float32 on the CPU, when the device has made them.

        Raises:
            NotFiniteError: naming the layer and input whose states hold NaN or infinity.
        """
        if self._copied is not None:
            self._copied.synchronize()  # other threads go on meanwhile
        if not bool(self._finite):
            row, place = (~self._host.isfinite().all(dim=2)).nonzero()[0].tolist()
            raise NotFiniteError(
                f"Layer {self.layers[row]} gives NaN or infinity for {str(self.inputs[place])[:80]!r}. "
                "Load the model with dtype='float32', or check its weights."
            )
        return self._host


@dataclass(frozen=True)
class _Prepared:
    """The inputs of a batch, and whether they are texts padded on the right with nothing but ids and mask."""

    features: Mapping[str, Any]
    right: bool

    @property
    def size(self) -> int:
        """Entries of its largest tensor, for texts the tokens."""
        return max((value.numel() for value in self.features.values() if isinstance(value, Tensor)), default=0)


def passes(
    reader: ReaderSettings,
    inputs: Sequence[Any],
    batches: Sequence[Sequence[int]],
    *,
    tokens: TokenReceive | None = None,
) -> Generator[Passed, None, None]:
    """Yield each batch once its pass is started, without waiting for the device to end it.

    Args:
        reader: says what is read of which model.
        inputs: the whole list.
        batches: positions in it.
        tokens: also handed the raw states of every layer.
    """
    flow = _Flow(reader, inputs, tokens)
    lists = [list(batch) for batch in batches]
    if len(lists) < 2:  # nothing to be ahead of
        for batch in lists:
            yield from flow.halving(batch, partial(flow.prepare, batch))
        return
    with closing(ahead(flow.prepare, lists, threads=_THREADS)) as made:
        for batch, prepared in made:
            yield from flow.halving(batch, prepared)


class _Flow:
    """What the batches of one run have in common: how they are pooled, the streams, and how large they may be."""

    def __init__(self, reader: ReaderSettings, inputs: Sequence[Any], tokens: TokenReceive | None) -> None:
        self.reader, self.inputs, self.tokens = reader, inputs, tokens
        final = reader.anatomy.final if reader.norm == "final" else ()
        self.pooled = FusedPooling([reader.model.get_submodule(path) for path in final], reader.pooling)
        self.needless: bool | None = None if reader.unmasked else False
        self.most: int | None = None  # entries of a batch that memory was seen to be too small for
        self._streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = {}

    @torch.inference_mode()
    def prepare(self, batch: Sequence[int]) -> _Prepared:
        """Return the model's inputs of a batch, in pinned memory where they will be copied to a GPU."""
        made = dict(self.reader.preprocess([self.inputs[position] for position in batch]))
        device = self.reader.device
        right = self.needless is not False and padded_right(made)
        if device is not None and device.type == "cuda":
            made = {
                key: value.pin_memory() if isinstance(value, Tensor) and value.device.type == "cpu" else value
                for key, value in made.items()
            }
        return _Prepared(made, right)

    def halving(self, batch: list[int], prepared: Callable[[], _Prepared]) -> Iterator[Passed]:
        """Pass one batch; when memory runs out, its two halves, and from then on no batch as large as that."""
        alone = len(batch) == 1 or self.tokens is not None  # a metric must not see a state twice
        size = 0
        try:
            made = prepared()
            size = made.size
            passed = self._launch(batch, made) if alone or self.most is None or size < self.most else None
        except torch.OutOfMemoryError:
            if alone:
                raise
            if self.most is None:
                _log.warning(
                    "Memory ran out in a batch of %d inputs: batches as large as that pass in halves. "
                    "A smaller `token_budget` makes smaller ones from the start.", len(batch),
                )  # fmt: skip
            self.most = size or self.most
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
        reader, places = self.reader, {layer: place for place, layer in enumerate(self.reader.layers)}
        features = self._moved(prepared.features)
        real = features.get("attention_mask")
        attention: AbstractContextManager[object] = nullcontext()
        if prepared.right and self._mask_is_needless(features):
            attention = causal_attention(features["input_ids"].device)
            features = {key: value for key, value in features.items() if key != "attention_mask"}
        masks: dict[Any, tuple[Tensor, Tensor]] = {}
        made: list[Tensor] = []
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
            if not made:  # of all layers, so that one copy brings them to the host; other devices' layers come here
                made.append(torch.empty(len(places), *vectors.shape, device=vectors.device))
            made[0][places[layer]].copy_(vectors, non_blocking=True)
            order.append(places[layer])

        features = without_cache(reader.model, features)
        self.pooled.begin()
        with attention:
            capture(reader.model, features, receive, anatomy=reader.anatomy, layers=reader.layers, sites=reader.sites)
        for place, vectors in zip(order, self.pooled.settle() or (), strict=False):
            made[0][place].copy_(vectors[:, : reader.truncate_dim])
        inputs = [self.inputs[position] for position in batch]
        return Passed(batch, inputs, reader.layers, *self._to_host(made[0]))

    def _mask_is_needless(self, features: Mapping[str, Any]) -> bool:
        if self.needless is None:
            self.needless = mask_is_needless(self.reader.model, self.reader.anatomy, features)
        return self.needless

    def _streams_of(self, device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        """Return the streams on which inputs come to a device and vectors leave it."""
        if device not in self._streams:
            self._streams[device] = (torch.cuda.Stream(device), torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        return self._streams[device]

    def _moved(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return features on the model's device; those that come from pinned memory come beside the pass before."""
        device = self.reader.device
        if device is None:
            return dict(features)
        if device.type != "cuda":
            return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}
        coming, _ = self._streams_of(device)
        here = torch.cuda.current_stream(device)
        with torch.cuda.stream(coming):
            moved = {
                key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in features.items()
            }
        here.wait_stream(coming)
        for key, value in moved.items():
            if isinstance(value, Tensor) and value is not features[key]:
                value.record_stream(here)
        return moved

    def _to_host(self, vectors: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Return where the vectors, and whether they are finite, will be on the host, and the event after which."""
        finite = vectors.isfinite().all()
        if not vectors.is_cuda:
            return vectors.cpu(), finite.cpu(), None
        _, leaving = self._streams_of(vectors.device)
        leaving.wait_stream(torch.cuda.current_stream(vectors.device))
        with torch.cuda.stream(leaving):
            host = torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            host.copy_(vectors, non_blocking=True)
            flag.copy_(finite, non_blocking=True)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(leaving)
        vectors.record_stream(leaving)
        finite.record_stream(leaving)
        return host, flag, copied
