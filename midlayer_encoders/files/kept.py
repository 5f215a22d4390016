"""How every file is written and read again: whole or not there, one process to a folder, nothing through a link.

A file is written beside its place, flushed to the disk, and renamed. One that cannot be read again is set aside,
logged, and made anew, so that nothing fails for ever.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from midlayer_encoders.errors import DiskFullError, FolderError, OptionError

__all__ = [
    "LOCK",
    "beside",
    "check_links",
    "clear_left",
    "folder_lock",
    "lock",
    "make_folder",
    "naming_a_full_disk",
    "read_kept",
    "scratch",
    "set_aside",
    "write_file",
    "write_file_once",
    "write_folder",
]

Read = TypeVar("Read")

LOCK = "midlayer.lock"
"""Of a folder that one run at a time writes to."""

_STALE = 3600.0  # seconds without a change after which what is left beside a file is that of a killed process
_LEFT = re.compile(r"\.?[0-9a-f]{32}\.tmp")
_FULL = (errno.ENOSPC, errno.EDQUOT)
_TAKEN = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_log = logging.getLogger(__name__)


def write_file(path: Path, content: bytes) -> None:
    """Write a file: the whole of it is there afterwards, or what was there before.

    A link at ``path`` is replaced; what it leads to is left alone.
    """
    with beside(path) as aside:
        aside.write_bytes(content)


def write_file_once(path: Path, content: bytes) -> None:
    """Write a file unless there is one: of several processes the first one's holds for all."""
    make_folder(path.parent)
    with naming_a_full_disk(path), scratch(path.parent) as aside:
        aside.write_bytes(content)
        _sync(aside)
        if path.is_symlink() and not path.exists():  # it leads nowhere
            path.unlink()
        with suppress(FileExistsError):
            os.link(aside, path)


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """Yield a path beside ``path`` to write a file to; it takes the place of ``path`` in one step once it is whole.

    Raises:
        DiskFullError: no room; what was there before is still there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with beside(Path(folder) / "new" / "notes.json") as aside:
        ...         _ = aside.write_text("{}")
        ...     (Path(folder) / "new" / "notes.json").read_text()
        '{}'
    """
    make_folder(path.parent)
    with naming_a_full_disk(path), scratch(path.parent) as aside:
        yield aside
        _sync(aside)
        _put(aside, path)
        _sync(path.parent)


def _put(aside: Path, path: Path) -> None:
    """Rename a file to its place, or raise where a folder is there, which may be anyone's."""
    try:
        aside.replace(path)
    except IsADirectoryError as error:
        raise FolderError(f"{path} must be a file, but is a folder: move it away, and run again.") from error


def write_folder(path: Path, write: Callable[[Path], object], *, last: Sequence[str] = ()) -> tuple[str, ...]:
    """Have ``write`` make a folder elsewhere, and put it in its place in one step, or its files where there is one.

    Args:
        path: of the folder; a link to one stays a link. Files in it that the new one does not have stay.
        write: makes the folder that it is called with.
        last: files without which the others are not used, the one that is asked for first at the end: in a folder that
            is there they are removed before anything else, from the end, and come last, in this order, so that old
            files and new ones are never taken for one whole.

    Returns:
        The files that were written, from the folder on: others may lie beside them.
    """
    home = path.resolve()
    make_folder(home if home.exists() else home.parent)
    there = home.is_dir()
    alone = there and (os.path.ismount(home) or not os.access(home.parent, os.W_OK))
    with naming_a_full_disk(home), scratch(home if alone else home.parent) as aside:
        write(aside)
        files = sorted(one.relative_to(aside) for one in aside.rglob("*") if one.is_file())
        written = tuple(file.as_posix() for file in files)
        if not there:
            aside.replace(home)
            return written
        for name in reversed(last):
            (home / name).unlink(missing_ok=True)
        for file in sorted(files, key=lambda one: (last.index(str(one)) if str(one) in last else -1, one)):
            make_folder((home / file).parent)
            _put(aside / file, home / file)
    return written


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield the path of a file or folder inside ``folder`` that can be made there, and is removed afterwards.

    What a killed process left is removed by a later one, after an hour.
    """
    clear_left(folder)
    aside = folder / f".{uuid4().hex}.tmp"
    try:
        yield aside
    finally:
        _remove(aside)


@lru_cache(maxsize=4096)  # once for each folder and process
def clear_left(folder: Path) -> None:
    """Remove what killed processes left in a folder an hour ago or more."""
    with suppress(OSError):  # on a disk that is read-only it stays
        for left in [entry for entry in os.scandir(folder) if _LEFT.fullmatch(entry.name)]:
            if time.time() - left.stat(follow_symlinks=False).st_mtime > _STALE:
                _remove(Path(left))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # it was renamed; or it is removed by another process, in an hour
            path.unlink()


@contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Name the disk and the path where there is no room for it."""
    try:
        yield
    except Exception as error:
        if not _means_full(error):
            raise
        folder = next(one for one in path.absolute().parents if one.exists())
        free = shutil.disk_usage(folder).free / 2**20
        raise DiskFullError(
            f"The disk of {_mount(folder)} is full ({free:.1f} MiB free): {path} was not written. What was there "
            "before stays readable: make room, for example with `midlayer cache`, or write elsewhere, and run again."
        ) from error


def _means_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return any(f"(os error {number})" in str(error) for number in _FULL)  # of libraries in Rust, as safetensors


def _mount(folder: Path) -> Path:
    """Return where the disk of a folder is mounted."""
    where = folder.resolve()
    return next(one for one in (where, *where.parents) if os.path.ismount(one))


def _sync(path: Path) -> None:
    """Have what is written at ``path`` on the disk."""
    if os.name != "posix" and path.is_dir():  # elsewhere a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, or raise where something else is in its place."""
    try:
        with naming_a_full_disk(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next(one for one in (path, *path.parents) if one.is_symlink() or one.exists())
        what = f"a link to {taken.readlink()}, which is no folder" if taken.is_symlink() else "a file"
        raise FolderError(
            f"{path} must be a folder, but {taken} is {what}: remove it, or name another place."
        ) from error
    except DiskFullError:
        raise
    except OSError as error:
        raise FolderError(
            f"The folder {path} cannot be made ({error.strerror}): name another place, which can be written to."
        ) from error


def read_kept(path: Path, read: Callable[[Path], Read]) -> Read | None:
    """Return what ``read`` makes of a file that was kept, or ``None`` where there is none that can be read.

    One that is torn, empty or damaged is set aside and logged: the caller makes it again.
    """
    if not path.is_file():
        return None
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk, not of what is in the file
            raise
        set_aside(path, f"{type(error).__name__}: {error}")
        return None


def set_aside(path: Path, why: str) -> None:
    """Rename a file that cannot be used, and log where it is now; the one set aside before it is gone."""
    aside = path.with_name(f"{path.name}.broken")
    try:
        path.replace(aside)
    except FileNotFoundError:
        return  # another process was quicker
    except OSError as error:
        if error.errno in _TAKEN:
            raise FolderError(
                f"{path} cannot be used ({why}), nor moved to {aside} ({error.strerror}): move both away."
            ) from error
        if error.errno not in _READ_ONLY:
            raise
        aside = path
    said = " ".join(why.split())
    _log.warning("%s could not be read (%s). It is made again; what was there is in %s.", path, said[:300], aside)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep a folder to this run, or raise who else is writing there. It ends with the process, however that ends.

    Raises:
        FolderError: another run writes there.
    """
    make_folder(folder)
    path = folder / LOCK
    with lock(path) as held:
        if not held:
            holder = path.read_text(encoding="utf8", errors="replace").strip() or "another process"
            raise FolderError(
                f"{folder} is in use: {holder} is writing there. Wait until it has ended, or name another folder."
            )
        yield


@contextmanager
def lock(path: Path) -> Iterator[bool]:
    """Hold a lock that ends with the process, or say that another holds it. The file stays, and names the last holder.

    Where there are no locks (Windows, some network disks, a disk that is read-only) it is held by all.
    """
    try:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except ImportError:
        yield True
        return
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            what = "a folder" if error.errno == errno.EISDIR else "a symbolic link"
            raise FolderError(f"{path} must be a file, but is {what}: remove it, and run again.") from error
        if error.errno not in (*_READ_ONLY, *_FULL):
            raise
        yield True  # the first file that is written says so
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            _log.debug("No lock on %s: %s", path, error)
        with suppress(OSError):  # it is only for people
            os.ftruncate(descriptor, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
            os.pwrite(descriptor, holder.encode(), 0)
        yield True
    finally:
        os.close(descriptor)


def check_links(home: Path, folders: Iterable[Path]) -> None:
    """Raise where one of the folders, or one inside them, is a link that leads out of ``home``.

    Files need no check: a link in the place of one is replaced, never written through.
    """
    inside = home.resolve()
    for folder in folders:
        for place in (folder, *(Path(above, one) for above, below, _ in os.walk(folder) for one in below)):
            if place.is_symlink() and not place.resolve().is_relative_to(inside):
                raise OptionError(
                    f"`out` must not lead elsewhere by links inside it, but {place} is a link to {place.readlink()}: "
                    "remove it, or name that place itself (`store` for embeddings)."
                )
