"""The batches of ``encode`` prepared ahead: the next ones are tokenized while the device is at work on one.

``SentenceTransformer.encode`` prepares a batch, passes it and waits for it, one after the other, and asks this encoder
to prepare each. Whoever knows the order in which it asks can have the next ones ready.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from sentence_transformers import SentenceTransformer

from midlayer_encoders.encoder.compat import encoding_order
from midlayer_encoders.reading.ahead import ahead

__all__ = ["prepared", "preparing_ahead"]

Prepare: TypeAlias = Callable[[Sequence[Any]], dict[str, Any]]

_running: ContextVar[_Ahead | None] = ContextVar("_running", default=None)  # of this thread's `encode`


class _Ahead:
    """What is prepared of one call's inputs."""

    def __init__(self, encoder: SentenceTransformer, inputs: Sequence[Any]) -> None:
        self.encoder, self.inputs = encoder, inputs
        self.made: Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None] | None = None
        self.asked: Any = None
        self.over = False

    def take(self, batch: Sequence[Any], how: Any, prepare: Prepare) -> dict[str, Any]:
        """Return the features of a batch: made ahead, unless this is not the batch, or the way, that was expected."""
        if self.made is None and not self.over:
            self.made, self.asked = self._begin(batch, prepare), how
        if self.made is None or self.asked != how:
            return prepare(batch)
        expected, result = next(self.made, ((), dict))
        if len(expected) == len(batch) and all(one is other for one, other in zip(expected, batch, strict=True)):
            return result()
        self.close()
        return prepare(batch)

    def _begin(
        self, batch: Sequence[Any], prepare: Prepare
    ) -> Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None] | None:
        """Start with the first batch that is asked for, which tells how large they are."""
        order = encoding_order(self.encoder, self.inputs) if len(self.inputs) > 2 * len(batch) else None
        if order is None:
            self.over = True
            return None
        starts = range(0, len(order), len(batch))
        return ahead(prepare, [[self.inputs[n] for n in order[start : start + len(batch)]] for start in starts])

    def close(self) -> None:
        """End the thread that prepares."""
        if self.made is not None:
            self.made.close()
        self.made, self.over = None, True


@contextmanager
def preparing_ahead(encoder: SentenceTransformer, inputs: Sequence[Any]) -> Iterator[None]:
    """Have the batches of the ``encode`` inside this block prepared ahead, of these inputs, in another thread."""
    running = _Ahead(encoder, inputs)
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        running.close()


def prepared(encoder: SentenceTransformer, batch: Sequence[Any], how: Any, prepare: Prepare) -> dict[str, Any]:
    """Return what ``prepare`` makes of a batch, made ahead where this thread is inside :func:`preparing_ahead`.

    Args:
        encoder: that is asked for it.
        batch: its inputs.
        how: the other arguments, which must be the same from batch to batch.
        prepare: makes the features.
    """
    running = _running.get()
    return prepare(batch) if running is None or running.encoder is not encoder else running.take(batch, how, prepare)
