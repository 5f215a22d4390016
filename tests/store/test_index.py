"""The shard and row that a key is read from."""

from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.errors import OptionError
from tests.store.filling import LAYERS, check_vectors, expected_vectors, fill, make_keys, open_store, shard_paths


def test_text_in_two_shards_is_read_from_the_later_one(tmp_path: Path) -> None:
    early, late = open_store(tmp_path), open_store(tmp_path)
    fill(early, range(6))
    late.write(make_keys(range(4, 9)), expected_vectors(range(14, 19)))
    reader = open_store(tmp_path)
    order = np.random.default_rng(0).permutation(9).tolist()
    expected = [number if number < 4 else number + 10 for number in order]
    for layer, rows in zip(LAYERS, expected_vectors(expected), strict=True):
        np.testing.assert_array_equal(reader.read(layer, make_keys(order)), rows)
    shard_paths(reader)[-1].unlink()
    check_vectors(reader, range(6))
    assert reader.missing(make_keys(range(9))) == [6, 7, 8]


def test_keys_of_a_wrong_length_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(2))
    first_key, second_key = make_keys(range(2))
    for keys in ([first_key + second_key[:2], second_key[2:]], [first_key, " " + second_key[1:]], [first_key, None]):
        with pytest.raises(OptionError, match="A key must be 32 lowercase hexadecimal digits"):
            store.read(store.layers[0], keys)  # type: ignore[arg-type]
