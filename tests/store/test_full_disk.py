"""A full disk ends a write with an error, and what was stored stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from midlayer_encoders.errors import DiskFullError, MidlayerError
from tests.store.filling import check, fill, keys_of, opened


def test_a_full_disk_is_told_and_leaves_the_store_readable(small_disk: Path) -> None:
    store = opened(small_disk, dim=500)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(500_000))
    with pytest.raises(
        DiskFullError, match=rf"The disk of {small_disk} is full \(.* MiB free\): .*safetensors was not written"
    ) as error:
        fill(store, range(1000))
    assert isinstance(error.value, MidlayerError)
    assert "No space left on device" in str(error.value.__cause__)
    written = len(store)
    assert 8 <= written < 120
    assert not list(store.folder.glob("*.tmp"))
    for reader in (store, opened(small_disk, dim=500)):
        check(reader, range(written))
        assert reader.missing(keys_of(range(written + 4))) == [written + i for i in range(4)]
    filler.unlink()
    fill(store, range(written, written + 20))
    check(opened(small_disk, dim=500), range(written + 20))
