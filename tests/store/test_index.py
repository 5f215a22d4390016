"""Many keys looked up at once, against a dictionary."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.store import embeddings, index
from midlayer_encoders.store.index import Index
from midlayer_encoders.store.shard import KEY_BYTES, Shard
from tests.store.filling import check, fill, keys_of, opened


def shard(count: int) -> Shard:
    return Shard("test", (0,), count, 4, "float32", (0,))


@pytest.mark.parametrize("few", [0, 10**9], ids=["at once", "one by one"])
def test_keys_are_found_where_a_dictionary_finds_them(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "_FEW", few)
    draw = np.random.default_rng(0)
    keys = [bytes(row) for row in draw.integers(0, 256, (3000, KEY_BYTES), dtype=np.uint8)]
    twins = [keys[0][:8] + bytes([number]) * 8 for number in range(5)]  # whose first halves are one
    known, strange = [*keys[:2000], *twins[:4]], [*keys[2000:], twins[4], bytes(16), b"\xff" * 16]
    held = Index()
    assert held.find(b"".join(strange)).tolist() == [-1] * len(strange)
    held.add("a", shard(1500), known[:1500])
    held.add("b", shard(504), known[1500:])
    held.add("c", shard(300), known[100:400])  # stored twice: from now on read here
    asked = [(known + strange)[place] for place in draw.integers(0, len(known) + len(strange), 4000)]
    found = held.find(b"".join(asked))
    assert found.tolist() == [held._numbers.get(key, -1) for key in asked]
    assert (found < 0).any()
    places = held.places(found[found >= 0])
    assert sorted(places) == ["a", "b", "c"]
    there = [key for key in asked if key in held]
    lists = {"a": known[:1500], "b": known[1500:], "c": known[100:400]}
    for name, (where, rows) in places.items():
        assert [there[place] for place in where] == [lists[name][row] for row in rows]
    assert sum(len(where) for where, _ in places.values()) == len(there)
    held.forget(["c"])
    assert held.find(b"".join(asked)).tolist() == [held._numbers.get(key, -1) for key in asked]


def test_what_was_asked_last_is_not_taken_for_what_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "_TIER", 4)
    store = opened(tmp_path)
    fill(store, range(3))
    check(store, range(3))
    assert store._asked[0]
    fill(store, range(3, 30))  # merged on the way
    check(store, range(3))
    check(store, range(30))
    copied = pickle.loads(pickle.dumps(store))
    assert not copied._asked[0]
    check(copied, range(30))


def test_keys_of_a_wrong_length_are_named_though_together_they_fit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(2))
    one, other = keys_of(range(2))
    for keys in ([one + other[:2], other[2:]], [one, " " + other[1:]], [one, None]):
        with pytest.raises(embeddings.OptionError, match="A key must be 32 hexadecimal digits"):
            store.read(store.layers[0], keys)  # type: ignore[arg-type]
