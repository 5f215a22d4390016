"""A full disk ends a write with an error, and what was stored stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from midlayer_encoders.errors import DiskFullError, MidlayerError
from midlayer_encoders.store import embeddings
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
    assert isinstance(error.value.__cause__, OSError)
    written = len(store)
    assert 8 <= written < 120
    assert not list(store.folder.glob("*.tmp"))
    for reader in (store, opened(small_disk, dim=500)):
        check(reader, range(written))
        assert reader.missing(keys_of(range(written + 4))) == [written + i for i in range(4)]
    filler.unlink()
    fill(store, range(written, written + 20))
    check(opened(small_disk, dim=500), range(written + 20))


def test_a_merge_without_room_leaves_the_batch_written(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embeddings, "_TIER", 16)
    store = opened(small_disk, dim=500)
    (small_disk / "filler").write_bytes(bytes(200_000))
    fill(store, range(68))  # 17 shards of 33 kB
    assert "were not merged" in caplog.text
    check(store, range(68))
