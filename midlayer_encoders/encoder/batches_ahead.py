"""Prepare the batches of ``encode`` quickly and, on a GPU, ahead of time.

``SentenceTransformer.encode`` prepares each batch only after the previous one has run. Its order is known, so another
thread can prepare the next batches.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from sentence_transformers import SentenceTransformer

from midlayer_encoders.encoder.sentence_transformers_internals import encoding_order
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.batches import TextInputs

Prepare: TypeAlias = Callable[[list[Any]], dict[str, Any]]
Batches: TypeAlias = Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None]

_running: ContextVar[_Ahead | None] = ContextVar("_running", default=None)  # the `encode` of this thread


class _Ahead:
    """The batches of one call of ``encode``."""

    def __init__(self, encoder: SentenceTransformer, inputs: Sequence[Any], beside: bool) -> None:
        self.encoder = encoder
        self.inputs = inputs
        self.beside = beside
        self.prepare: Prepare | None = None
        self.batches: Batches | None = None
        self.arguments: Any = None

    def take(self, batch: list[Any], arguments: Any, prompt: str | None, prepare: Prepare) -> dict[str, Any]:
        """Return the features of a batch, prepared ahead unless the batch or the arguments are unexpected."""
        if self.prepare is None or self.batches is None:  # the first batch, which has the batch size
            self.prepare = TextInputs(self.encoder.tokenizer, prepare, prompt or "")
            self.batches = self._start(self.prepare, len(batch))
            self.arguments = arguments
        if self.arguments != arguments:
            return prepare(batch)
        expected, result = next(self.batches, ([object()], dict))
        if len(expected) == len(batch) and all(map(operator.is_, expected, batch)):
            return result()
        self.batches.close()
        return self.prepare(batch)

    def _start(self, prepare: Prepare, size: int) -> Batches:
        """Prepare batches in another thread, or none if their order is unknown."""
        is_worthwhile = self.beside and len(self.inputs) > 2 * size
        order = (encoding_order(self.encoder, self.inputs) if is_worthwhile else None) or []
        starts = range(0, len(order), size)
        return ahead(prepare, [[self.inputs[n] for n in order[start : start + size]] for start in starts])


@contextmanager
def preparing(encoder: SentenceTransformer, inputs: Sequence[Any], *, beside: bool) -> Iterator[None]:
    """Prepare the batches of ``encode`` inside this block quickly and ahead of time.

    Args:
        encoder: the encoder.
        inputs: the inputs of ``encode``.
        beside: whether another thread prepares batches ahead of time.
    """
    running = _Ahead(encoder, inputs, beside)
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        if running.batches is not None:
            running.batches.close()


def prepared(
    encoder: SentenceTransformer, batch: Sequence[Any], prompt: str | None, arguments: Any, prepare: Prepare
) -> dict[str, Any]:
    """Return the features of a batch, faster inside :func:`preparing`.

    Args:
        encoder: the encoder.
        batch: its inputs.
        prompt: the prompt that ``prepare`` puts before each text.
        arguments: the other arguments; batches with different ones are not prepared ahead.
        prepare: computes the features.
    """
    running = _running.get()
    if running is None or running.encoder is not encoder:
        return prepare(list(batch))
    return running.take(list(batch), (prompt, arguments), prompt, prepare)
