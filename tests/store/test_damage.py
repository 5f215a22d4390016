"""Damaged files cost the texts of one shard, and never give a wrong vector."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from midlayer_encoders.errors import FolderError
from midlayer_encoders.store import TextNotStoredError, list_stores
from tests.store.filling import DIM, check, fill, keys_of, opened, shards_of


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: cut(path, -1),
        lambda path: cut(path, 300),
        lambda path: cut(path, 5),
        lambda path: cut(path, 0),
        lambda path: flip(path, -1),
        lambda path: flip(path, -DIM * 4 * 4 * 2),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-64] + bytes(64)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_damage_costs_the_texts_of_one_shard(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm) -> None:
    fill(opened(tmp_path), range(12))
    harm(shards_of(opened(tmp_path))[1])  # that of texts 4 to 7
    store = opened(tmp_path)
    assert store.missing(keys_of(range(12))) == [4, 5, 6, 7]
    assert "could not be read (" in caplog.text
    assert len(list(store.folder.glob("*.broken"))) == 1
    check(store, [0, 1, 2, 3, 8, 9, 10, 11])
    with pytest.raises(TextNotStoredError, match=r"4 of 12 are not, the first `keys\[4\]`"):
        store.read(0, keys_of(range(12)))
    fill(store, range(4, 8))
    check(store, range(12))
    check(opened(tmp_path), range(12))


def test_a_shard_that_is_cut_off_is_noticed_on_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(opened(tmp_path), range(8))
    cut(shards_of(opened(tmp_path))[1], -1)
    assert len(opened(tmp_path)) == 4
    assert "not a complete safetensors file" in caplog.text


@pytest.mark.slow
def test_no_flipped_byte_anywhere_gives_a_wrong_vector(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(3))
    path = shards_of(opened(tmp_path))[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at)
        store = opened(tmp_path)
        assert store.missing(keys_of(range(3))) == [0, 1, 2], f"byte {at}"
        assert not path.exists()
        path.write_bytes(whole)


def test_a_reader_that_does_not_ask_what_is_missing_sees_damage_too(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    store = opened(tmp_path)
    flip(shards_of(store)[0], -1 - 4 * 16)  # in the last layer, before the keys
    check(opened(tmp_path, layers=[0, 1]), range(4))
    with pytest.raises(TextNotStoredError, match="4 of 4 are not"):
        store.read(5, keys_of(range(4)))


def test_damage_under_an_open_store_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(8))
    check(store, range(8))
    cut(shards_of(store)[0], 100)
    with pytest.raises(TextNotStoredError, match="4 of 8 are not"):
        store.read(0, keys_of(range(8)))
    shards_of(store)[0].unlink()
    with pytest.raises(TextNotStoredError, match="8 of 8 are not"):
        store.read(0, keys_of(range(8)))


def test_a_damaged_label_is_written_again(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    (tmp_path / "k" / "store.json").write_text('{"format"')
    check(opened(tmp_path), range(4))


def in_place_of(path: Path, what: str) -> None:
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": "nowhere", "loop": path.name}[what])


@pytest.mark.parametrize("what", ["folder", "FIFO", "link", "loop"])
def test_what_is_no_file_costs_the_texts_of_one_shard(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(opened(tmp_path), range(8))
    in_place_of(shards_of(opened(tmp_path))[1], what)
    assert [store.texts for store in list_stores(tmp_path)] == [4]
    assert opened(tmp_path).missing(keys_of(range(8))) == [4, 5, 6, 7]
    assert "could not be read (it is" in caplog.text
    fill(opened(tmp_path), range(4, 8))
    check(opened(tmp_path), range(8))


@pytest.mark.parametrize("what", ["FIFO", "link", "loop", "nested"])
def test_what_is_no_label_is_written_again(what: str, tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    label = tmp_path / "k" / "store.json"
    label.write_text("[" * 100_000) if what == "nested" else in_place_of(label, what)
    assert list_stores(tmp_path) == []
    check(opened(tmp_path), range(4))


def test_a_folder_is_never_moved_over_another_nor_taken_for_a_label(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    (shard,) = shards_of(opened(tmp_path))
    in_place_of(shard, "folder")
    Path(f"{shard}.broken").write_text("of before")
    with pytest.raises(FolderError, match=rf"{shard.name} cannot be used .* move both away"):
        opened(tmp_path)
    shard.rmdir()
    in_place_of(tmp_path / "k" / "store.json", "folder")
    with pytest.raises(FolderError, match=r"store\.json must be a file, but is a folder: move it away"):
        opened(tmp_path)
