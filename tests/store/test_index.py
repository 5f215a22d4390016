"""The index finds keys where a dictionary finds them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.store import embeddings
from midlayer_encoders.store.index import Index
from midlayer_encoders.store.shard import KEY_BYTES, Shard
from tests.store.filling import fill, keys_of, opened


def shard(count: int) -> Shard:
    return Shard("test", (0,), count, 4, "float32", (0,))


def test_keys_are_found_where_a_dictionary_finds_them() -> None:
    draw = np.random.default_rng(0)
    keys = [bytes(row) for row in draw.integers(0, 256, (3000, KEY_BYTES), dtype=np.uint8)]
    stored, absent = keys[:2000], [*keys[2000:], bytes(16), b"\xff" * 16]
    index = Index()
    assert index.find(absent).tolist() == [-1] * len(absent)
    assert index.places(index.find([])) == {}
    shards = {"a": stored[:1500], "b": stored[1500:], "c": stored[100:400]}  # those of "c" are read from there
    for name, shard_keys in shards.items():
        index.add(name, shard(len(shard_keys)), shard_keys)
    expected = {key: (name, row) for name, shard_keys in shards.items() for row, key in enumerate(shard_keys)}
    requested = [(stored + absent)[position] for position in draw.integers(0, len(stored) + len(absent), 4000)]
    rows = index.find(requested)
    assert [row >= 0 for row in rows] == [key in expected for key in requested]
    present = [key for key in requested if key in index]
    places = index.places(rows[rows >= 0])
    assert sorted(places) == ["a", "b", "c"]
    located = {position: (name, row) for name, pair in places.items() for position, row in zip(*pair, strict=True)}
    assert [located[position] for position in range(len(present))] == [expected[key] for key in present]
    assert all((np.diff(shard_rows) >= 0).all() for _, shard_rows in places.values())
    index.remove(["c"])
    assert all(key in index for key in stored)
    assert set(index.places(index.find(present))) == {"a", "b"}


def test_keys_of_a_wrong_length_are_named_though_together_they_fit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(2))
    one, other = keys_of(range(2))
    for keys in ([one + other[:2], other[2:]], [one, " " + other[1:]], [one, None]):
        with pytest.raises(embeddings.OptionError, match="A key must be 32 hexadecimal digits"):
            store.read(store.layers[0], keys)  # type: ignore[arg-type]
