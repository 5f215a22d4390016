"""What is written is what is read, in the order asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from midlayer_encoders.store import shard, text_key
from tests.store.filling import DIM, LAYERS, check, fill, keys_of, opened, shards_of, vectors


def test_reads_what_was_written_in_the_order_asked(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(10), batch=3)
    assert len(store) == 10
    assert keys_of([3])[0] in store
    assert keys_of([10])[0] not in store
    for numbers in ([9, 0, 5, 0, 9], [7], list(range(9, -1, -1)), []):
        for again in (store, opened(tmp_path)):
            check(again, numbers)
    assert store.read(5, []).shape == (0, DIM)
    assert store.read(0, keys_of([1])).dtype == np.float32


def test_missing_lists_each_key_once_and_sees_other_writers(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    keys = keys_of([0, 1, 2, 1, 3, 2])
    assert one.missing(keys) == [0, 1, 2, 4]
    fill(other, [1, 3])
    assert one.missing(keys) == [0, 2]
    check(one, [3, 1])
    assert one.missing([]) == []


def test_stored_texts_are_not_written_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [0, 1])
    store.write(keys_of([1, 2, 2]), np.concatenate([vectors([1]) + 9, vectors([2, 2])], axis=1))
    store.write(keys_of([0, 1]), vectors([0, 1]) + 9)
    store.write([], vectors([0])[:, :0])
    check(store, [0, 1, 2])
    assert sum(shard.read_head(path)[0].count for path in shards_of(store)) == 3


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [4, 2, 7])
    with safe_open(shards_of(store)[0], framework="numpy") as file:
        assert file.metadata()["store"] == "k"
        assert json.loads(file.metadata()["layers"]) == LAYERS
        assert [bytes(key).hex() for key in file.get_tensor("keys")] == keys_of([4, 2, 7])
        for place, layer in enumerate(LAYERS):
            np.testing.assert_array_equal(file.get_tensor(f"layer.{layer}"), vectors([4, 2, 7])[place])


def test_float16_is_rounded_once(tmp_path: Path) -> None:
    store = opened(tmp_path, dtype="float16")
    fill(store, range(5))
    for place, layer in enumerate(LAYERS):
        read = store.read(layer, keys_of(range(5)))
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, vectors(range(5))[place].astype(np.float16))
        np.testing.assert_allclose(read, vectors(range(5))[place], rtol=2**-11, atol=6e-5 * 2**-10)


def test_wider_types_are_taken_and_rounded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(keys_of([0]), vectors([0]).astype(np.float64) * (1 + 1e-12))
    check(store, [0])


def test_text_keys_differ_where_texts_or_prompts_do() -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("b", "a"),
        ("ab", ""),
        ("", "ab"),
        ("a ", ""),
        ("1:a", ""),
        ("\ud800", ""),
    ]
    assert len({text_key(text, prompt) for text, prompt in pairs}) == len(pairs)
    assert all(len(text_key(text, prompt)) == 32 for text, prompt in pairs)
    assert text_key("a text") == text_key("a text", "")
