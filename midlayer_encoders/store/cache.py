"""The stores in a folder: what each holds, and removing those that are not needed. Behind ``midlayer cache``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import naming_a_full_disk, scratch
from midlayer_encoders.store.embeddings import read_label
from midlayer_encoders.store.shard import DamagedError, read_head

__all__ = ["StoreInfo", "list_stores", "prune"]


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """What a store holds.

    Attributes:
        folder: where it lies.
        key: its name in ``root``.
        description: what the key stands for.
        texts: number of texts stored with at least one layer.
        layers: layers that are stored for some text.
        dim: number of dimensions.
        dtype: on disk.
        bytes: on disk.
        last_used: when it was last opened or written to.
    """

    folder: Path
    key: str
    description: Mapping[str, object]
    texts: int
    layers: tuple[int, ...]
    dim: int
    dtype: str
    bytes: int
    last_used: datetime


def list_stores(root: Path | str) -> list[StoreInfo]:
    """Return the stores in a folder, the one used last first.

    Example:
        >>> list_stores("nowhere")
        []
    """
    labels = Path(root).expanduser().glob("[!.]*/store.json")  # hidden: what is being removed
    stores = [_info(label.parent, found) for label in labels if (found := read_label(label)) is not None]
    return sorted(stores, key=lambda info: info.last_used, reverse=True)


def _info(folder: Path, label: Mapping[str, object]) -> StoreInfo:
    texts: set[bytes] = set()
    layers: set[int] = set()
    size, used = 0, 0.0
    for path in folder.iterdir():
        try:
            status = path.stat()
            if path.suffix == ".safetensors":
                shard, keys = read_head(path)
                layers.update(shard.layers)
                texts.update(keys)
        except OSError:
            continue  # merged by another process, or a link that leads nowhere
        except DamagedError:
            pass  # set aside when the store is opened
        size += status.st_size
        used = max(used, status.st_mtime)
    description = label.get("description")
    return StoreInfo(
        folder=folder,
        key=folder.name,
        description=description if isinstance(description, dict) else {},
        texts=len(texts),
        layers=tuple(sorted(layers)),
        dim=int(str(label.get("dim", 0))),
        dtype=str(label.get("dtype", "")),
        bytes=size,
        last_used=datetime.fromtimestamp(used, tz=UTC),
    )


def prune(
    root: Path | str,
    *,
    keys: Collection[str] | None = None,
    unused_for: timedelta | None = None,
    keep_bytes: int | None = None,
    dry_run: bool = False,
) -> list[StoreInfo]:
    """Remove stores, and return those removed: all that meet any of the conditions given.

    A store that is a link to a folder elsewhere is never removed.

    Args:
        root: folder of stores.
        keys: these.
        unused_for: those not opened or written to for so long.
        keep_bytes: those used longest ago, until the rest takes at most so much room.
        dry_run: whether to return only what would be removed.

    Example:
        >>> prune("nowhere", unused_for=timedelta(days=30))
        []
    """
    if keys is None and unused_for is None and keep_bytes is None:
        raise OptionError("`prune` must be told what to remove, but got none of `keys`, `unused_for`, `keep_bytes`.")
    stores = list_stores(root)
    known = [info.key for info in stores]
    for key in keys or ():
        if key not in known:
            raise OptionError(f"`keys` must be stores in {root}, but got {key!r}.{did_you_mean(key, known)}")
        if (linked := Path(root).expanduser() / key).is_symlink():
            raise OptionError(
                f"`keys` must be stores in {root} itself, but {key!r} is a link to {linked.resolve()}: remove it "
                "there, or remove the link."
            )
    before = datetime.now(tz=UTC) - unused_for if unused_for is not None else None
    chosen: list[StoreInfo] = []
    kept = 0
    for info in stores:  # the one used last first
        if info.folder.is_symlink():
            continue
        stale = before is not None and info.last_used < before
        if info.key in (keys or ()) or stale or (keep_bytes is not None and kept + info.bytes > keep_bytes):
            chosen.append(info)
        else:
            kept += info.bytes
    if not dry_run:
        for info in chosen:
            _remove(info.folder)
    return chosen


def _remove(folder: Path) -> None:
    """Remove a store in one step for all who look for it, and then its files."""
    with naming_a_full_disk(folder), scratch(folder.parent) as aside:
        folder.rename(aside)
