"""Stored vectors are read back in the requested order."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

from midlayer_encoders.sweeping.store import read_head, text_key
from tests.store.filling import DIM, LAYERS, check_vectors, expected_vectors, fill, make_keys, open_store, shard_paths


def test_vectors_are_read_in_the_requested_order(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(10), batch=3)
    assert len(store) == 10
    assert make_keys([3])[0] in store
    assert make_keys([10])[0] not in store
    for numbers in ([9, 0, 5, 0, 9], [7], list(range(9, -1, -1)), []):
        for reader in (store, open_store(tmp_path)):
            check_vectors(reader, numbers)
    assert store.read(5, []).shape == (0, DIM)
    assert store.read(0, make_keys([1])).dtype == np.float32


def test_missing_lists_each_key_once_and_sees_other_writers(tmp_path: Path) -> None:
    reader, writer = open_store(tmp_path), open_store(tmp_path)
    keys = make_keys([0, 1, 2, 1, 3, 2])
    assert reader.missing(keys) == [0, 1, 2, 4]
    fill(writer, [1, 3])
    assert reader.missing(keys) == [0, 2]
    check_vectors(reader, [3, 1])
    assert reader.missing([]) == []


def test_stored_texts_are_not_written_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, [0, 1])
    store.write(make_keys([1, 2, 2]), np.concatenate([expected_vectors([1]) + 9, expected_vectors([2, 2])], axis=1))
    store.write(make_keys([0, 1]), expected_vectors([0, 1]) + 9)
    store.write([], expected_vectors([0])[:, :0])
    check_vectors(store, [0, 1, 2])
    assert sum(read_head(path)[0].count for path in shard_paths(store)) == 3


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, [4, 2, 7])
    with safe_open(shard_paths(store)[0], framework="numpy") as file:
        assert file.metadata()["store"] == "k"
        assert json.loads(file.metadata()["layers"]) == LAYERS
        assert [bytes(key).hex() for key in file.get_tensor("keys")] == make_keys([4, 2, 7])
        for position, layer in enumerate(LAYERS):
            np.testing.assert_array_equal(file.get_tensor(f"layer.{layer}"), expected_vectors([4, 2, 7])[position])


def test_float16_is_rounded_once(tmp_path: Path) -> None:
    store = open_store(tmp_path, dtype="float16")
    fill(store, range(5))
    for position, layer in enumerate(LAYERS):
        rows = store.read(layer, make_keys(range(5)))
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, expected_vectors(range(5))[position].astype(np.float16))
        np.testing.assert_allclose(rows, expected_vectors(range(5))[position], rtol=2**-11, atol=6e-5 * 2**-10)


def test_wider_dtypes_are_accepted_and_rounded(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.write(make_keys([0]), expected_vectors([0]).astype(np.float64) * (1 + 1e-12))
    check_vectors(store, [0])


def test_text_keys_differ_by_text_and_prompt() -> None:
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
