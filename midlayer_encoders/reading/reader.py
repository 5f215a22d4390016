"""``LayerReader``: read many layers of a model from one forward pass per batch.

Preprocessing, copies and passes overlap: another thread prepares the next batches, and inputs and vectors are copied
through pinned memory without waiting, the vectors of all layers in one copy with one flag for finiteness.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._isolation import usable_cores
from midlayer_encoders._types import Layer, Norm, Pooling
from midlayer_encoders.errors import NotFiniteError, OptionError
from midlayer_encoders.models.anatomy import Anatomy, resolve_layers
from midlayer_encoders.models.transformers_internals import without_cache
from midlayer_encoders.reading import causal
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.batches import LayerSource, TextInputs
from midlayer_encoders.reading.capture import capture, final_norm
from midlayer_encoders.reading.fused import fused_blocks
from midlayer_encoders.reading.pooled_spans import PooledSpans
from midlayer_encoders.reading.pooling import pool_normalized, real_tokens
from midlayer_encoders.token_selector import TokenSelector

#: Called with the layer, the raw states ``(B, T, D)``, the mask ``(B, T)`` and the inputs' positions.
TokenReceive: TypeAlias = Callable[[int, Tensor, Tensor, list[int]], None]

_TEXT_THREADS = 2  # a tokenizer serves one thread at a time
_MAX_MEDIA_THREADS = 8

_log = logging.getLogger(__name__)


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
class LayerReader:
    """Reads the vectors of many layers from one forward pass per batch.

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
        normalize: scale every vector to length 1, before it is truncated.
        spans: the pooling of several spans, used instead of ``pooling`` and ``counting``; ``None`` otherwise.
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
    counting: TokenSelector = TokenSelector()
    normalize: bool = False
    spans: PooledSpans | None = None

    def pooled_masks(self, mask: Tensor, ids: Tensor | None) -> tuple[Tensor, ...]:
        """Return the mask of the pooled tokens of each span, shape ``(B, T)``."""
        return (self.counting(mask, ids),) if self.spans is None else self.spans.masks(mask)

    def flow(self, inputs: Sequence[Any], tokens: TokenReceive | None) -> Flow:
        """Return the state that the batches of a run share."""
        return Flow(self, inputs, tokens)

    def read(
        self, inputs: Mapping[str, Any], positions: list[int], *, tokens: TokenReceive | None = None
    ) -> list[Tensor]:
        """Return the vectors of one batch, ``(B, D)`` in float32 or better for each layer, on the layer's device.

        This method does not change mode, gradients or precision, so callbacks can read a model in training.

        Args:
            inputs: keyword arguments of the model's forward.
            positions: positions of the batch in the whole list, passed to ``tokens``.
            tokens: also called with the raw states of each layer.
        """
        return Flow(self, (), tokens).read(inputs, inputs.get("attention_mask"), positions)

    def embed(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Yield the positions of each batch and its vectors, ``(L, B, D)`` float32 on the CPU.

        Args:
            inputs: all inputs.
            batches: positions of each batch, from :func:`~midlayer_encoders.reading.batches.batches_of`.
            tokens: also called with the raw states of each layer, the mask and the positions.

        Raises:
            NotFiniteError: if a vector contains NaN or infinity; the message names the layer and the input.
        """
        max_pending = 0 if tokens is not None or self.device is None or self.device.type != "cuda" else 1
        pending: deque[Passed] = deque()
        with closing(self.passes(inputs, batches, tokens=tokens)) as started:
            for passed in started:
                pending.append(passed)
                if len(pending) > max_pending:
                    yield _positions_and_vectors(pending.popleft())
        yield from map(_positions_and_vectors, pending)

    def passes(
        self, inputs: Sequence[Any], batches: Sequence[Sequence[int]], *, tokens: TokenReceive | None = None
    ) -> Generator[Passed, None, None]:
        """Yield each batch once its pass has started, without waiting for its vectors; see :meth:`embed`."""
        flow = self.flow(inputs, tokens)
        lists = [list(batch) for batch in batches]
        if len(lists) < 2:
            for batch in lists:
                yield from flow.halving(batch, partial(flow.prepare, batch))
            return
        threads = self._num_threads()
        with closing(ahead(flow.prepare, lists, depth=threads, threads=threads)) as prepared_batches:
            for batch, prepared in prepared_batches:
                yield from flow.halving(batch, prepared)

    def _num_threads(self) -> int:
        """Return the number of threads that prepare batches."""
        if getattr(self.preprocess, "tokenizer", None) is not None or self.device is None or self.device.type != "cuda":
            return _TEXT_THREADS
        return max(_TEXT_THREADS, min(usable_cores() // 2, _MAX_MEDIA_THREADS))

    def vectors(
        self,
        inputs: Sequence[Any],
        batches: Sequence[Sequence[int]],
        *,
        tokens: TokenReceive | None = None,
        done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the vectors of all inputs in order, shape ``(L, N, D)`` float32 on the CPU.

        Args:
            inputs: all inputs.
            batches: positions of each batch, covering all inputs.
            tokens: see :meth:`embed`.
            done: called after each batch with its number of inputs.
        """
        all_vectors: Tensor | None = None
        for positions, vectors in self.embed(inputs, batches, tokens=tokens):
            if all_vectors is None:
                all_vectors = vectors.new_empty(len(vectors), len(inputs), vectors.shape[2])
            all_vectors[:, positions] = vectors
            if done is not None:
                done(len(positions))
        return torch.empty(len(self.layers), 0, 0) if all_vectors is None else all_vectors


def _positions_and_vectors(passed: Passed) -> tuple[list[int], Tensor]:
    """Return the positions and vectors of a batch, copied from pinned memory."""
    vectors = passed.vectors()
    return passed.positions, vectors.clone() if passed.pinned else vectors


#: The model's inputs of a batch, and whether they are only ids and a mask, padded on the right.
_Prepared: TypeAlias = tuple[dict[str, Any], bool]


class Flow:
    """State shared by the batches of a run: pooling, streams and the size limit."""

    def __init__(self, reader: LayerReader, inputs: Sequence[Any], tokens: TokenReceive | None) -> None:
        self.reader = reader
        self.inputs = inputs
        self.tokens = tokens
        self.norm = final_norm(reader.model, reader.anatomy, reader.norm)
        self.poolings: tuple[Pooling, ...] = (reader.pooling,) if reader.spans is None else ("mean", "last", "mean")
        self.needless: bool | None = None if reader.unmasked else False
        self.size_limit: int | None = None  # smallest size that ran out of memory
        self.outgoing: torch.cuda.Stream | None = None

    @torch.inference_mode()
    def prepare(self, batch: Sequence[int]) -> _Prepared:
        """Return the model's inputs of a batch, pinned for a GPU, and whether they are ids padded on the right."""
        features = dict(self.reader.preprocess([self.inputs[position] for position in batch]))
        device = self.reader.device
        is_padded_right = self.needless is not False and causal.padded_right(features)
        if device is not None and device.type == "cuda":
            features = {
                key: value.pin_memory() if isinstance(value, Tensor) and value.device.type == "cpu" else value
                for key, value in features.items()
            }
        return features, is_padded_right

    def halving(self, batch: list[int], prepared: Callable[[], _Prepared]) -> Iterator[Passed]:
        """Run a batch; if memory runs out, run its halves, and halve later batches of that size."""
        indivisible = len(batch) == 1 or self.tokens is not None  # a metric must receive each state once
        size = 0
        try:
            features, is_padded_right = prepared()
            # The number of elements of the largest tensor; for texts the number of tokens.
            size = max((value.numel() for value in features.values() if isinstance(value, Tensor)), default=0)
            fits = indivisible or self.size_limit is None or size < self.size_limit
            passed = self._launch(batch, features, is_padded_right) if fits else None
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
    def _launch(self, batch: list[int], features: Mapping[str, Any], is_padded_right: bool) -> Passed:
        reader = self.reader
        moved = {
            key: value.to(reader.device, non_blocking=value.is_pinned()) if isinstance(value, Tensor) else value
            for key, value in features.items()
        }
        real = moved.get("attention_mask")
        with fused_blocks(reader.model):
            if is_padded_right and self.needless is None:
                self.needless = causal.mask_is_needless(reader.model, reader.anatomy, moved)
            if is_padded_right and self.needless:
                del moved["attention_mask"]
            moved = without_cache(reader.model, moved)
            by_layer = self.read(moved, real, batch)
        # One tensor for all layers, copied to the CPU at once.
        vectors = torch.stack([layer_vectors.to(by_layer[0].device) for layer_vectors in by_layer]).float()
        inputs = [self.inputs[position] for position in batch]
        return Passed(batch, inputs, reader.layers, *self._to_host(vectors))

    def _to_host(self, vectors: Tensor) -> tuple[Tensor, Tensor, torch.cuda.Event | None]:
        """Start copying the vectors and their finiteness to the CPU; return both and the event to wait for."""
        finite = vectors.isfinite().all()
        if not vectors.is_cuda:
            return vectors.cpu(), finite.cpu(), None
        # On a stream of its own, the copy overlaps with the next pass.
        if self.outgoing is None:
            self.outgoing = torch.cuda.Stream(vectors.device)  # type: ignore[no-untyped-call]
        self.outgoing.wait_stream(torch.cuda.current_stream(vectors.device))
        with torch.cuda.stream(self.outgoing):
            # A copy that does not wait for the GPU goes to pinned memory.
            host, flag = vectors.to("cpu", non_blocking=True), finite.to("cpu", non_blocking=True)
        for tensor in (vectors, finite):
            tensor.record_stream(self.outgoing)
        return host, flag, self.outgoing.record_event()

    def read(self, inputs: Mapping[str, Any], real: Tensor | None, positions: list[int]) -> list[Tensor]:
        """Return the vectors of one batch at each layer; ``real`` is its attention mask."""
        reader = self.reader
        masks: dict[Any, tuple[Tensor, tuple[Tensor, ...]]] = {}
        vectors: dict[int, Tensor] = {}

        def receive(layer: int, states: Tensor) -> None:
            key = states.shape[:2], states.device
            if key not in masks:
                mask = real_tokens(real, states, model=reader.model)
                masks[key] = mask, reader.pooled_masks(mask, inputs.get("input_ids"))
            mask, pooled_masks = masks[key]
            if self.tokens is not None:
                self.tokens(layer, states, mask, positions)
            pooled = [
                pool_normalized(self.norm, states, pooled_mask, pooling)
                for pooling, pooled_mask in zip(self.poolings, pooled_masks, strict=True)
            ]
            if reader.spans is not None:
                pooled = [reader.spans.pool(torch.stack(pooled, dim=1), pooled_masks)]
            vectors[layer] = pooled[0]

        capture(reader.model, inputs, receive, anatomy=reader.anatomy, layers=reader.layers)
        return self.finish(vectors)

    def finish(self, vectors: dict[int, Tensor]) -> list[Tensor]:
        """Return the vectors of each layer, normalized and truncated."""
        reader = self.reader
        if reader.normalize:
            vectors = {layer: torch.nn.functional.normalize(rows, dim=-1) for layer, rows in vectors.items()}
        return [vectors[layer][:, : reader.truncate_dim] for layer in reader.layers]


def layer_reader(
    source: LayerSource,
    *,
    layers: Sequence[Layer] | str = "all",
    norm: Norm | None = None,
    prompt: str = "",
    normalize: bool | None = None,
) -> LayerReader:
    """Return a reader of the layers of a source's model.

    Args:
        source: an encoder of the whole model, or of one cut after the last layer to read.
        layers: ``"all"`` or a list of layers.
        norm: norm of the vectors; defaults to the source's.
        prompt: prompt prepended to each text.
        normalize: whether to scale vectors to length 1; by default if the source does.
    """
    check_after_pooling(source)
    counting = source.pooled_tokens(prompt)
    if counting.prompt_tokens and "weightedmean" in source.pooling:
        raise OptionError(
            f"`pooling` must be named to read the layers of {source.name}, whose weighted mean leaves out the prompt."
        )
    anatomy = source.anatomy
    if not anatomy.num_blocks:
        raise OptionError(f"`encoder` must have a block, but {source.name} was cut at layer 0. Pass layer=-1.")
    # With norm="none" the model has one block more than `source.layer`.
    layer_numbers = resolve_layers(layers, source.layer, name=source.name)

    plain = partial(source.host_inputs, prompt=prompt or None)
    source.eval()
    return LayerReader(
        source.transformer,
        TextInputs(source.tokenizer, plain, prompt),
        anatomy,
        layer_numbers,
        norm or source.norm,
        source.pooling,
        source.truncate_dim,
        device=source.device,
        unmasked=source.device.type in ("cpu", "cuda"),
        counting=counting,
        normalize="Normalize" in source.after_pooling if normalize is None else normalize,
        spans=source.spans,
    )


def check_after_pooling(source: LayerSource) -> None:
    """Raise if a module after the pooling of a source belongs to one layer."""
    of_one_layer = [f"the module {name}" for name in source.after_pooling if name != "Normalize"]
    remedy = "Create it without `center`, and with dense='drop'."
    if source.spans is not None and source.spans.centered:
        of_one_layer.insert(0, "an offset of its spans")
        remedy = "Create it from the original model with recipe='word-echo', which is not centered."
    if of_one_layer:
        raise OptionError(
            f"`encoder` must only pool and normalize to read its layers, but has {of_one_layer[0]}. {remedy}"
        )
