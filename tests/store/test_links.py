"""A store that is a link to another folder is read and written but never removed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.store import list_stores, prune
from tests.store.filling import check_vectors, fill, open_store


def test_linked_store_is_listed_and_never_pruned(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    fill(open_store(elsewhere, key="linked"), range(4))
    fill(open_store(root, key="mine"), range(4))
    (root / "linked").symlink_to(elsewhere / "linked")
    fill(open_store(root, key="linked"), range(4, 8))
    assert {info.key for info in list_stores(root)} == {"linked", "mine"}
    with pytest.raises(OptionError, match=rf"'linked' is a link to {elsewhere}/linked: remove it there, or remove"):
        prune(root, keys=["mine", "linked"])
    assert {info.key for info in list_stores(root)} == {"linked", "mine"}
    assert [info.key for info in prune(root, unused_for=timedelta(seconds=-9), keep_bytes=0)] == ["mine"]
    assert [path.name for path in root.iterdir()] == ["linked"]
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


def test_killed_prune_leaves_nothing_listed(tmp_path: Path) -> None:
    fill(open_store(tmp_path), range(4))
    (tmp_path / "k").rename(tmp_path / f".{'a' * 32}.tmp")
    assert list_stores(tmp_path) == []
    fill(open_store(tmp_path), range(4))
    check_vectors(open_store(tmp_path), range(4))
