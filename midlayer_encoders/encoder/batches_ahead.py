"""The batches of ``encode``: tokenized without a detour, and on a GPU ahead, while the device is at work on another.

``SentenceTransformer.encode`` prepares a batch, passes it and waits for it, one after the other, and asks this encoder
to prepare each. Whoever knows the order in which it asks can have the next ones ready.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from sentence_transformers import SentenceTransformer

from midlayer_encoders.encoder.sentence_transformers_internals import encoding_order
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.tokenization import TextInputs

__all__ = ["prepared", "preparing"]

Prepare: TypeAlias = Callable[[list[Any]], dict[str, Any]]
Batches: TypeAlias = Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None]

_running: ContextVar[_Ahead | None] = ContextVar("_running", default=None)  # of this thread's `encode`


class _Ahead:
    """What is prepared of one call's inputs."""

    def __init__(self, encoder: SentenceTransformer, inputs: Sequence[Any], beside: bool) -> None:
        self.encoder, self.inputs, self.beside = encoder, inputs, beside
        self.prepare: Prepare | None = None
        self.made: Batches | None = None
        self.how: Any = None

    def take(self, batch: list[Any], how: Any, prompt: str | None, prepare: Prepare) -> dict[str, Any]:
        """Return the features of a batch: made ahead, unless this is not the batch, or the way, that was expected."""
        if self.prepare is None:  # the first batch tells how large they are
            self.prepare, self.how = TextInputs(self.encoder.tokenizer, prepare, prompt or ""), how
            self.made = self._begin(len(batch)) if self.beside else None
        if self.how != how:
            return prepare(batch)
        if self.made is None:
            return self.prepare(batch)
        expected, result = next(self.made, ([], dict))
        if len(expected) == len(batch) and all(one is other for one, other in zip(expected, batch, strict=True)):
            return result()
        self.close()
        return self.prepare(batch)

    def _begin(self, size: int) -> Batches | None:
        order = encoding_order(self.encoder, self.inputs) if len(self.inputs) > 2 * size else None
        if order is None or self.prepare is None:
            return None
        starts = range(0, len(order), size)
        return ahead(self.prepare, [[self.inputs[n] for n in order[start : start + size]] for start in starts])

    def close(self) -> None:
        """End the thread that prepares."""
        if self.made is not None:
            self.made.close()
        self.made = None


@contextmanager
def preparing(encoder: SentenceTransformer, inputs: Sequence[Any], *, beside: bool) -> Iterator[None]:
    """Have the batches of the ``encode`` inside this block made quickly, and ahead.

    Args:
        encoder: whose ``encode`` it is.
        inputs: that it is called with.
        beside: whether batches are made in another thread, before they are asked for.
    """
    running = _Ahead(encoder, inputs, beside)
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        running.close()


def prepared(
    encoder: SentenceTransformer, batch: Sequence[Any], prompt: str | None, how: Any, prepare: Prepare
) -> dict[str, Any]:
    """Return what ``prepare`` makes of a batch, sooner where this thread is inside :func:`preparing`.

    Args:
        encoder: that is asked for it.
        batch: its inputs.
        prompt: that ``prepare`` puts before each text.
        how: the other arguments, which must be the same from batch to batch.
        prepare: makes the features.
    """
    running = _running.get()
    if running is None or running.encoder is not encoder:
        return prepare(list(batch))
    return running.take(list(batch), (prompt, how), prompt, prepare)
