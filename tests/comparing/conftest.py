import weakref

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
