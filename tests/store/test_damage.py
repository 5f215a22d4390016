"""Damaged files lose the texts of one shard and never give a wrong vector."""

import os
from pathlib import Path

import pytest

from midlayer_encoders.errors import FolderError
from midlayer_encoders.sweeping.store import TextNotStoredError
from tests.store.filling import DIM, LAYERS, check_vectors, fill, make_keys, open_store, shard_paths


def flip_byte(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 0x10
    path.write_bytes(content)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: truncate(path, -1),
        lambda path: truncate(path, 300),
        lambda path: truncate(path, 5),
        lambda path: truncate(path, 0),
        lambda path: flip_byte(path, -1),
        lambda path: flip_byte(path, -DIM * 4 * 4 * 2),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-64] + bytes(64)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_damage_loses_the_texts_of_one_shard(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage) -> None:
    fill(open_store(tmp_path), range(12))
    damage(shard_paths(open_store(tmp_path))[1])  # holds texts 4 to 7
    store = open_store(tmp_path)
    assert store.missing(make_keys(range(12))) == [4, 5, 6, 7]
    assert "could not be read (" in caplog.text
    assert len(list(store.folder.glob("*.broken"))) == 1
    check_vectors(store, [0, 1, 2, 3, 8, 9, 10, 11])
    with pytest.raises(TextNotStoredError, match=r"4 of 12 are not, the first `keys\[4\]`"):
        store.read(0, make_keys(range(12)))
    fill(store, range(4, 8))
    check_vectors(store, range(12))
    check_vectors(open_store(tmp_path), range(12))


def test_truncated_shard_is_detected_on_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(open_store(tmp_path), range(8))
    truncate(shard_paths(open_store(tmp_path))[1], -1)
    assert len(open_store(tmp_path)) == 4
    assert "not a complete safetensors file" in caplog.text


@pytest.mark.slow
def test_no_flipped_byte_gives_a_wrong_vector(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(3))
    path = shard_paths(open_store(tmp_path))[0]
    content = path.read_bytes()
    for position in range(len(content)):
        flip_byte(path, position)
        store = open_store(tmp_path)
        assert store.missing(make_keys(range(3))) == [0, 1, 2], f"byte {position}"
        assert not path.exists()
        path.write_bytes(content)


def test_damage_is_detected_without_a_call_to_missing(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    store = open_store(tmp_path)
    flip_byte(shard_paths(store)[0], -1 - 4 * 16)  # in the last layer, before the keys
    check_vectors(open_store(tmp_path, layers=[0, 1]), range(4))
    with pytest.raises(TextNotStoredError, match="4 of 4 are not"):
        store.read(5, make_keys(range(4)))


def test_damage_under_an_open_store_raises_and_does_not_crash(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(8))
    check_vectors(store, range(8))
    truncate(shard_paths(store)[0], 100)
    with pytest.raises(TextNotStoredError, match="4 of 8 are not"):
        store.read(0, make_keys(range(8)))
    shard_paths(store)[0].unlink()
    with pytest.raises(TextNotStoredError, match="8 of 8 are not"):
        store.read(0, make_keys(range(8)))


def test_damaged_label_is_rewritten(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    (tmp_path / "k" / "store.json").write_text('{"format"')
    check_vectors(open_store(tmp_path), range(4))


def replace_with(path: Path, kind: str) -> None:
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    else:
        path.symlink_to({"link": "nowhere", "loop": path.name}[kind])


@pytest.mark.parametrize("kind", ["folder", "FIFO", "link", "loop"])
def test_non_file_in_place_of_a_shard_loses_its_texts(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(open_store(tmp_path), range(8))
    replace_with(shard_paths(open_store(tmp_path))[1], kind)
    assert open_store(tmp_path).missing(make_keys(range(8))) == [4, 5, 6, 7]
    assert "could not be read (it is" in caplog.text
    fill(open_store(tmp_path), range(4, 8))
    check_vectors(open_store(tmp_path), range(8))


@pytest.mark.parametrize("kind", ["FIFO", "link", "loop", "nested"])
def test_invalid_label_is_rewritten(kind: str, tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    label = tmp_path / "k" / "store.json"
    label.write_text("[" * 100_000) if kind == "nested" else replace_with(label, kind)
    check_vectors(open_store(tmp_path), range(4))


def test_folder_is_never_moved_over_another_or_used_as_a_label(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    (shard,) = shard_paths(open_store(tmp_path))
    replace_with(shard, "folder")
    Path(f"{shard}.broken").write_text("old content")
    with pytest.raises(FolderError, match=rf"{shard.name} cannot be used .* move both away"):
        open_store(tmp_path)
    shard.rmdir()
    replace_with(tmp_path / "k" / "store.json", "folder")
    with pytest.raises(FolderError, match=r"store\.json cannot be written \(Is a directory\) because of"):
        open_store(tmp_path)


@pytest.mark.long
def test_damage_after_the_first_read_is_detected_by_the_next(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    (path,) = shard_paths(open_store(tmp_path))
    content = path.read_bytes()
    detected = 0
    for position in range(0, len(content), 11):
        os.utime(path, ns=(0, 0))  # the clock of a file system may tick every 4 ms only
        store = open_store(tmp_path)
        check_vectors(store, range(4))
        flip_byte(path, position)
        try:
            check_vectors(store, range(4))  # right, if a key was damaged, which is in memory
        except TextNotStoredError:
            detected += 1
        path.write_bytes(content)
    assert detected >= len(LAYERS) * 4 * DIM * 4 // 11
