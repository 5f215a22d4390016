"""Invalid calls of a store and their errors."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.errors import LayerIndexError, NotFiniteError, OptionError
from midlayer_encoders.sweeping.store import StoreError, TextNotStoredError
from tests.store.filling import check_vectors, expected_vectors, fill, make_keys, open_store, shard_paths


def test_different_dimension_or_dtype_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path)
    with pytest.raises(OptionError, match=r"`dim` must be 6 for the store in .*, but got 7: pass that, choose another"):
        open_store(tmp_path, dim=7)
    with pytest.raises(OptionError, match=r"`dtype` must be 'float32' for the store in .*, but got 'float16'"):
        open_store(tmp_path, dtype="float16")


def test_shard_of_another_store_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other_store = open_store(tmp_path, key="other")
    fill(other_store, range(2))
    store = open_store(tmp_path)
    shutil.copy(shard_paths(other_store)[0], store.folder)
    store.refresh()
    assert len(store) == 0
    assert "it belongs to the store 'other'" in caplog.text
    assert list(store.folder.glob("*.broken"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float61"},
            "`dtype` must be one of 'float16', 'float32', but got 'float61'. Did you mean 'float16'",
        ),
        ({"key": "../k"}, "`key` must be letters, digits, '-' and '_', since it names a folder, but got '../k'"),
        ({"key": ""}, "`key` must be letters"),
        ({"layers": []}, r"`layers` must be increasing layers from 0, at least one, but got \[\]"),
        ({"layers": [2, 1]}, r"`layers` must be increasing layers from 0, at least one, but got \[2, 1\]"),
        ({"layers": [-1, 1]}, r"`layers` must be increasing layers from 0"),
        ({"dim": 0}, "`dim` must be at least 1, but got 0"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        open_store(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_invalid_calls_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, [0])
    with pytest.raises(
        LayerIndexError, match="`layer` must be one of the stored layers 0, 1, 2, 5, but got 3: open the"
    ):
        store.read(3, make_keys([0]))
    with pytest.raises(OptionError, match=r"`embeddings` must have the shape \(4, 2, 6\) .* but got \(4, 1, 6\)"):
        store.write(make_keys([1, 2]), expected_vectors([1]))
    with pytest.raises(
        OptionError, match="A key must be 32 lowercase hexadecimal digits, but got 'a text': use `text_key"
    ):
        store.read(0, ["a text"])
    with pytest.raises(
        TextNotStoredError, match=rf"1 of 2 are not, the first `keys\[1\]` \({make_keys([1])[0]}\): embed"
    ):
        store.read(0, make_keys([0, 1]))
    check_vectors(store, [0])


def test_nonfinite_values_are_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path, dtype="float16")
    rows = expected_vectors([0, 1])
    rows[2, 1, 3] = 70_000
    with pytest.raises(NotFiniteError, match="row 1 at layer 2 is too large for float16: use `dtype='float32'`"):
        store.write(make_keys([0, 1]), rows)
    rows[3, 0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="row 0 at layer 5 is NaN or infinite: check that text"):
        open_store(tmp_path, key="k32").write(make_keys([0]), rows[:, :1])
    assert store.missing(make_keys([0, 1])) == [0, 1]


def test_writing_to_a_removed_store_raises(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, [0])
    shutil.rmtree(store.folder)
    with pytest.raises(StoreError, match="was removed while it was in use: run again"):
        fill(store, [1])
    with pytest.raises(TextNotStoredError):
        store.read(0, make_keys([0]))
