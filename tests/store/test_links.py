"""A store that is a link to a folder elsewhere is read and written, and never removed, nor half of it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.store import list_stores, prune
from tests.store.filling import check, fill, opened


def test_a_linked_store_is_listed_and_never_pruned(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    fill(opened(elsewhere, key="linked"), range(4))
    fill(opened(root, key="mine"), range(4))
    (root / "linked").symlink_to(elsewhere / "linked")
    fill(opened(root, key="linked"), range(4, 8))
    assert {info.key for info in list_stores(root)} == {"linked", "mine"}
    with pytest.raises(OptionError, match=rf"'linked' is a link to {elsewhere}/linked: remove it there, or remove"):
        prune(root, keys=["mine", "linked"])
    assert {info.key for info in list_stores(root)} == {"linked", "mine"}
    assert [info.key for info in prune(root, unused_for=timedelta(seconds=-9), keep_bytes=0)] == ["mine"]
    assert [path.name for path in root.iterdir()] == ["linked"]
    check(opened(elsewhere, key="linked"), range(8))


def test_a_shard_that_is_a_link_is_read_and_set_aside_without_its_target(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(8))
    shards = sorted(store.folder.glob("*.safetensors"))
    for number, path in enumerate(shards):
        path.rename(tmp_path / f"target{number}")
        path.symlink_to(tmp_path / f"target{number}")
    whole = [(tmp_path / f"target{number}").read_bytes() for number in range(2)]
    check(opened(tmp_path), range(8))
    assert [(tmp_path / f"target{number}").read_bytes() for number in range(2)] == whole
    (tmp_path / "torn").write_bytes(whole[0][:99])
    link = store.folder / "0.safetensors"
    link.symlink_to(tmp_path / "torn")
    check(opened(tmp_path), range(8))
    assert (tmp_path / "torn").read_bytes() == whole[0][:99]
    assert not link.is_symlink()


def test_a_prune_that_was_killed_leaves_nothing_that_is_listed(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    (tmp_path / "k").rename(tmp_path / f".{'a' * 32}.tmp")
    assert list_stores(tmp_path) == []
    fill(opened(tmp_path), range(4))
    check(opened(tmp_path), range(4))
