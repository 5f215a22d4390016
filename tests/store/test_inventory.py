"""Stores are listed and pruned."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.store import list_stores, prune
from tests.store.filling import DIM, LAYERS, fill, open_store


def test_stores_are_listed_with_their_contents(tmp_path: Path) -> None:
    assert list_stores(tmp_path / "nowhere") == []
    fill(open_store(tmp_path, key="old", description={"model": "tiny", "layers": (1, 2)}), range(8))
    fill(open_store(tmp_path, key="new", layers=[1, 2], dtype="float16"), range(3))
    (tmp_path / "else").mkdir()
    os.utime(tmp_path / "new" / "store.json", (0, time.time() + 60))
    new, old = list_stores(tmp_path)
    assert (new.key, new.texts, new.layers, new.dim, new.dtype) == ("new", 3, (1, 2), DIM, "float16")
    assert (old.key, old.texts, old.layers, old.dim, old.dtype) == ("old", 8, tuple(LAYERS), DIM, "float32")
    assert old.description == {"model": "tiny", "layers": [1, 2]}
    assert old.bytes == sum(path.stat().st_size for path in old.folder.iterdir())
    assert abs(old.last_used.timestamp() - time.time()) < 60


def test_pruning_by_key_age_and_size(tmp_path: Path) -> None:
    def fill_three_stores() -> None:
        for age, key in enumerate(["today", "yesterday", "earlier"]):
            store = open_store(tmp_path, key=key)
            fill(store, range(4))
            for path in store.folder.iterdir():
                os.utime(path, (0, time.time() - 86400 * age - 60))

    fill_three_stores()
    size = list_stores(tmp_path)[0].bytes
    cases = [
        ({"keys": ["yesterday"]}, ["yesterday"]),
        ({"unused_for": timedelta(hours=12)}, ["yesterday", "earlier"]),
        ({"keep_bytes": 2 * size + 10}, ["earlier"]),
        ({"keep_bytes": 2 * size}, ["earlier"]),
        ({"keep_bytes": 2 * size - 1}, ["yesterday", "earlier"]),
        ({"keep_bytes": 0}, ["today", "yesterday", "earlier"]),
        ({"keys": ["today"], "unused_for": timedelta(hours=30)}, ["today", "earlier"]),
        ({"keys": ["today"], "keep_bytes": 2 * size + 10}, ["today"]),  # the others fit
        ({"unused_for": timedelta(days=90)}, []),
    ]
    for options, expected in cases:
        assert [info.key for info in prune(tmp_path, **options, dry_run=True)] == expected
        assert len(list_stores(tmp_path)) == 3
        assert [info.key for info in prune(tmp_path, **options)] == expected
        assert {path.name for path in tmp_path.iterdir()} == {"today", "yesterday", "earlier"} - set(expected)
        fill_three_stores()
    with pytest.raises(OptionError, match=r"`keys` must be stores in .*, but got 'todya'. Did you mean 'today'"):
        prune(tmp_path, keys=["todya"])
    with pytest.raises(OptionError, match="`prune` must get at least one of"):
        prune(tmp_path)
