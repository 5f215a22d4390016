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
        if self.prepare is None:  # the first batch, which has the batch size
            self.prepare = TextInputs(self.encoder.tokenizer, prepare, prompt or "")
            self.arguments = arguments
            self.batches = self._start(len(batch)) if self.beside else None
        if self.arguments != arguments:
            return prepare(batch)
        if self.batches is None:
            return self.prepare(batch)
        expected, result = next(self.batches, ([], dict))
        if len(expected) == len(batch) and all(map(operator.is_, expected, batch)):
            return result()
        self.close()
        return self.prepare(batch)

    def _start(self, size: int) -> Batches | None:
        order = encoding_order(self.encoder, self.inputs) if len(self.inputs) > 2 * size else None
        if order is None or self.prepare is None:
            return None
        starts = range(0, len(order), size)
        return ahead(self.prepare, [[self.inputs[n] for n in order[start : start + size]] for start in starts])

    def close(self) -> None:
        """End the preparing thread."""
        if self.batches is not None:
            self.batches.close()
        self.batches = None


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
        running.close()


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
