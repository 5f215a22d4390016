"""A full disk raises an error, and stored texts stay readable."""

from pathlib import Path

import pytest

from midlayer_encoders.errors import DiskFullError, MidlayerError
from tests.store.filling import check_vectors, fill, make_keys, open_store


def test_full_disk_raises_and_leaves_the_store_readable(small_disk: Path) -> None:
    store = open_store(small_disk, dim=500)
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
    for reader in (store, open_store(small_disk, dim=500)):
        check_vectors(reader, range(written))
        assert reader.missing(make_keys(range(written + 4))) == [written + i for i in range(4)]
    filler.unlink()
    fill(store, range(written, written + 20))
    check_vectors(open_store(small_disk, dim=500), range(written + 20))
