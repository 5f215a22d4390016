from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from midlayer_encoders import LayerEncoder


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[LayerEncoder]:
    """Return the encoders that are made from now on, and still alive."""
    alive: weakref.WeakSet[LayerEncoder] = weakref.WeakSet()
    make = LayerEncoder.__init__

    def recorded(self: LayerEncoder, *args: object, **options: object) -> None:
        make(self, *args, **options)  # type: ignore[arg-type]
        alive.add(self)

    monkeypatch.setattr(LayerEncoder, "__init__", recorded)
    return alive


@pytest.fixture(scope="module")
def quick_collector() -> Iterator[None]:
    """Let the collector pass over what was imported, a million objects: models are collected before the next is read."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
