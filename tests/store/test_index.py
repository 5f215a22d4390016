"""Which shard and row a key is read from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.store import embeddings
from tests.store.filling import LAYERS, check, fill, keys_of, opened, shards_of, vectors


def test_a_text_in_two_shards_is_read_from_the_later_one_until_it_is_removed(tmp_path: Path) -> None:
    early, late = opened(tmp_path), opened(tmp_path)
    fill(early, range(6))
    late.write(keys_of(range(4, 9)), vectors(range(14, 19)))
    reader = opened(tmp_path)
    order = np.random.default_rng(0).permutation(9).tolist()
    expected = [number if number < 4 else number + 10 for number in order]
    for layer, rows in zip(LAYERS, vectors(expected), strict=True):
        np.testing.assert_array_equal(reader.read(layer, keys_of(order)), rows)
    shards_of(reader)[-1].unlink()
    check(reader, range(6))
    assert reader.missing(keys_of(range(9))) == [6, 7, 8]


def test_keys_of_a_wrong_length_are_named_though_together_they_fit(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(2))
    one, other = keys_of(range(2))
    for keys in ([one + other[:2], other[2:]], [one, " " + other[1:]], [one, None]):
        with pytest.raises(embeddings.OptionError, match="A key must be 32 lowercase hexadecimal digits"):
            store.read(store.layers[0], keys)  # type: ignore[arg-type]
