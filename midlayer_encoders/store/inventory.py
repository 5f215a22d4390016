"""List and remove the stores in a folder, for ``midlayer cache``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from midlayer_encoders.errors import OptionError, did_you_mean
from midlayer_encoders.files import explain_full_disk, scratch
from midlayer_encoders.store.embeddings import read_label
from midlayer_encoders.store.shard import DamagedError, read_head


@dataclass(frozen=True, kw_only=True)
class StoreInfo:
    """A summary of a store.

    Attributes:
        folder: path of the store.
        key: its name in ``root``.
        description: readable description of the key.
        texts: number of stored texts.
        layers: layers stored for at least one text.
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
    """Return the stores in a folder, the most recently used first.

    Example:
        >>> list_stores("nowhere")
        []
    """
    stores = []
    for path in Path(root).expanduser().glob("[!.]*/store.json"):  # hidden folders are being removed
        with suppress(FileNotFoundError, ValueError, RecursionError):
            if path.is_file():  # reading a FIFO would never end
                stores.append(_info(path.parent, read_label(path)))
    return sorted(stores, key=lambda info: info.last_used, reverse=True)


def _info(folder: Path, label: Mapping[str, object]) -> StoreInfo:
    texts: set[bytes] = set()
    layers: set[int] = set()
    size = 0
    last_used = 0.0
    for path in folder.iterdir():
        # It may have been removed by another process, or be a dangling link; the store sets aside a damaged shard.
        with suppress(OSError, DamagedError):
            status = path.stat()
            size += status.st_size
            last_used = max(last_used, status.st_mtime)
            if path.suffix == ".safetensors":
                shard, keys = read_head(path)
                layers.update(shard.layers)
                texts.update(keys)
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
        last_used=datetime.fromtimestamp(last_used, tz=UTC),
    )


def prune(
    root: Path | str,
    *,
    keys: Collection[str] | None = None,
    unused_for: timedelta | None = None,
    keep_bytes: int | None = None,
    dry_run: bool = False,
) -> list[StoreInfo]:
    """Remove the stores that meet any of the conditions, and return them.

    A store that is a symbolic link is never removed.

    Args:
        root: folder of stores.
        keys: stores to remove.
        unused_for: remove stores that were not opened or written to for this long.
        keep_bytes: remove the least recently used stores until the others take at most this many bytes.
        dry_run: return the stores without removing them.

    Example:
        >>> prune("nowhere", unused_for=timedelta(days=30))
        []
    """
    if keys is None and unused_for is None and keep_bytes is None:
        raise OptionError("`prune` must get at least one of `keys`, `unused_for` and `keep_bytes`, but got none.")
    stores = list_stores(root)
    existing = [info.key for info in stores]
    for key in keys or ():
        if key not in existing:
            raise OptionError(f"`keys` must be stores in {root}, but got {key!r}.{did_you_mean(key, existing)}")
        if (linked := Path(root).expanduser() / key).is_symlink():
            raise OptionError(
                f"`keys` must be stores in {root} itself, but {key!r} is a link to {linked.resolve()}: remove it "
                "there, or remove the link."
            )
    before = datetime.now(tz=UTC) - unused_for if unused_for is not None else None
    removed: list[StoreInfo] = []
    kept_bytes = 0
    for info in stores:
        if info.folder.is_symlink():
            continue
        stale = before is not None and info.last_used < before
        if info.key in (keys or ()) or stale or (keep_bytes is not None and kept_bytes + info.bytes > keep_bytes):
            removed.append(info)
        else:
            kept_bytes += info.bytes
    for info in [] if dry_run else removed:
        # Hidden from other processes in one step, then removed file by file.
        with explain_full_disk(info.folder), scratch(info.folder.parent) as temporary:
            info.folder.rename(temporary)
    return removed
