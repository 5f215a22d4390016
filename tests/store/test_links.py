"""A store that is a link to another folder is read and written."""

from pathlib import Path

from tests.store.filling import check_vectors, fill, open_store


def test_linked_store_is_written_in_its_place(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    fill(open_store(elsewhere, key="linked"), range(4))
    root.mkdir()
    (root / "linked").symlink_to(elsewhere / "linked")
    fill(open_store(root, key="linked"), range(4, 8))
    check_vectors(open_store(elsewhere, key="linked"), range(8))


def test_linked_shard_is_read_and_set_aside_without_its_target(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(8))
    shards = sorted(store.folder.glob("*.safetensors"))
    for number, path in enumerate(shards):
        path.rename(tmp_path / f"target{number}")
        path.symlink_to(tmp_path / f"target{number}")
    contents = [(tmp_path / f"target{number}").read_bytes() for number in range(2)]
    check_vectors(open_store(tmp_path), range(8))
    assert [(tmp_path / f"target{number}").read_bytes() for number in range(2)] == contents
    (tmp_path / "torn").write_bytes(contents[0][:99])
    link = store.folder / "0.safetensors"
    link.symlink_to(tmp_path / "torn")
    check_vectors(open_store(tmp_path), range(8))
    assert (tmp_path / "torn").read_bytes() == contents[0][:99]
    assert not link.is_symlink()
