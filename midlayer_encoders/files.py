"""Write files atomically, read them back, and read the text files that users provide.

The package's own files are complete or absent, and never written through a symbolic link: a file is written next to its
final path, flushed to disk and renamed. A file that cannot be read back is set aside, logged and rebuilt by the caller.

Functions that read a user's file raise the error class that the caller passes, with the file, the line and the cure.
"""

import errno
import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError, short_repr
from midlayer_encoders.validation import lone_surrogate

T = TypeVar("T")

#: Name of the lock file in a folder that one run at a time may write to.
LOCK = "midlayer.lock"

_RESULT_FILES = {LOCK, "frame.parquet", "metrics.parquet", "probe.parquet", "units"}  # a results folder has one
_STALE_SECONDS = 3600.0  # after which a leftover temporary file belongs to a killed process
_TEMPORARY = re.compile(r"\.?[0-9a-f]{32}\.tmp")
_FULL_DISK_BYTES = 2**16  # free bytes that may remain when a library fails without saying that the disk is full
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_PATH_TAKEN = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}

_log = logging.getLogger(__name__)


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically: afterwards it is complete, or the previous one is unchanged.

    A symbolic link at ``path`` is replaced; its target stays unchanged.
    """
    with atomic_write(path) as temporary:
        temporary.write_bytes(content)


def write_file_once(path: Path, content: bytes) -> None:
    """Write a file unless it exists. If several processes try, the first one wins."""
    make_folder(path.parent)
    with explain_full_disk(path), scratch(path.parent) as temporary:
        temporary.write_bytes(content)
        _sync(temporary)
        if path.is_symlink() and not path.exists():  # a dangling link
            path.unlink()
        with suppress(FileExistsError):
            os.link(temporary, path)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success it replaces ``path`` in one step.

    Raises:
        DiskFullError: the disk is full; the previous file is unchanged.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with atomic_write(Path(folder) / "new" / "notes.json") as temporary:
        ...         _ = temporary.write_text("{}")
        ...     (Path(folder) / "new" / "notes.json").read_text()
        '{}'
    """
    make_folder(path.parent)
    with explain_full_disk(path), scratch(path.parent) as temporary:
        yield temporary
        _apply_umask([temporary], path.parent)
        _sync(temporary)
        _move(temporary, path)
        _sync(path.parent)


def _apply_umask(paths: Iterable[Path], folder: Path) -> None:
    """Give files the permissions of any new file: safetensors lets only their owner read those that it writes."""
    with scratch(folder) as example:
        example.touch()
        mode = stat.S_IMODE(example.stat().st_mode)
    for path in paths:
        path.chmod(mode)


def _move(temporary: Path, path: Path) -> None:
    try:
        temporary.replace(path)
    except IsADirectoryError as error:
        raise FolderError(f"{path} must be a file, but is a folder: move it away, and run again.") from error


def write_folder(path: Path, write: Callable[[Path], object], *, last: Sequence[str] = ()) -> tuple[str, ...]:
    """Write a folder to a temporary path and move it into place, file by file if the folder exists.

    Args:
        path: the folder. A link to a folder stays a link. Existing files that ``write`` does not produce stay.
        write: called with the path of the folder to create.
        last: files that make the others usable, the entry point last. In an existing folder they are removed first, in
            reverse order, and moved last, in this order, so that a reader never mixes old and new files.

    Returns:
        The files written, relative to the folder.
    """
    target = path.resolve()
    make_folder(target if target.exists() else target.parent)
    exists = target.is_dir()
    parent_is_fixed = exists and (os.path.ismount(target) or not os.access(target.parent, os.W_OK))
    with scratch(target if parent_is_fixed else target.parent) as temporary, explain_full_disk(target):
        write(temporary)
        files = sorted(file.relative_to(temporary) for file in temporary.rglob("*") if file.is_file())
        written = tuple(file.as_posix() for file in files)
        _apply_umask([temporary / file for file in files], temporary)
        if not exists:
            temporary.replace(target)
            return written
        for name in reversed(last):
            (target / name).unlink(missing_ok=True)
        for file in sorted(files, key=lambda file: (last.index(str(file)) if str(file) in last else -1, file)):
            make_folder((target / file).parent)
            _move(temporary / file, target / file)
    return written


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """Yield the path of a temporary file or folder inside ``folder``, and remove it afterwards.

    A later process removes the leftovers of a killed one after an hour.
    """
    if folder.exists() and not os.access(folder, os.W_OK):
        raise FolderError(f"The folder {folder} is not writable: choose another path, or change its permissions.")
    remove_leftovers(folder)
    temporary = folder / f".{uuid4().hex}.tmp"
    try:
        yield temporary
    finally:
        _remove(temporary)


@lru_cache(maxsize=4096)  # once per folder and process
def remove_leftovers(folder: Path) -> None:
    """Remove temporary files that killed processes left in a folder at least an hour ago."""
    with suppress(OSError):  # a read-only disk keeps them
        for entry in [entry for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name)]:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                _remove(Path(entry))


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):  # already renamed, or removed by a later process
            path.unlink()


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn the error of a full disk, or of a file too large for it, into one that names the disk and the path."""
    try:
        yield
    except Exception as error:
        if _error_number(error) == errno.EFBIG:
            raise DiskFullError(
                f"{path} was not written: it is larger than its disk, or `ulimit -f`, permits. Write elsewhere, or "
                "raise the limit, and run again."
            ) from error
        folder = next(parent for parent in path.absolute().parents if parent.exists()).resolve()
        if not _means_full(error, folder):
            raise
        disk = next(parent for parent in (folder, *folder.parents) if os.path.ismount(parent))
        free = shutil.disk_usage(folder).free / 2**20
        raise DiskFullError(
            f"The disk of {disk} is full ({free:.1f} MiB free): {path} was not written. Existing files are "
            "unchanged: free some space, or write elsewhere, and run again."
        ) from error


def _means_full(error: Exception, folder: Path) -> bool:
    number = _error_number(error)
    if isinstance(error, MidlayerError) or number is not None:
        return number in _DISK_FULL
    numpy_error = str(error).startswith("Not enough free space")
    return numpy_error or shutil.disk_usage(folder).free <= _FULL_DISK_BYTES


def _error_number(error: Exception) -> int | None:
    """Return the number of an error of the operating system, which Rust libraries only write into the message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    rust_error = re.search(r"\(os error (\d+)\)", str(error))
    return int(rust_error[1]) if rust_error else None


def _sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    if os.name != "posix" and path.is_dir():  # Windows cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, or raise if something else is in the way."""
    try:
        with explain_full_disk(path):
            path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        obstacle = next(parent for parent in (path, *path.parents) if parent.is_symlink() or parent.exists())
        kind = f"a link to {obstacle.readlink()}, which is not a folder" if obstacle.is_symlink() else "a file"
        raise FolderError(
            f"{path} must be a folder, but {obstacle} is {kind}: remove it, or choose another path."
        ) from error
    except DiskFullError:
        raise
    except OSError as error:
        raise FolderError(
            f"The folder {path} cannot be created ({error.strerror}): choose another, writable path."
        ) from error


def read_artifact(path: Path, read: Callable[[Path], T]) -> T | None:
    """Return ``read(path)``, or ``None`` if the file is absent or damaged.

    A damaged file is set aside and logged; the caller writes it again.
    """
    if not path.is_file():
        return None
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk fails, not the content
            raise
        set_aside(path, f"{type(error).__name__}: {error}")
        return None


def sealed(content: Mapping[str, Any]) -> bytes:
    """Return JSON with a checksum of its content, for :func:`read_sealed`."""
    return json.dumps({**content, "checksum": _content_checksum(content)}, indent=1).encode()


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content of a file of :func:`sealed`, or raise a ``ValueError`` if it was changed."""
    return unsealed(json.loads(path.read_bytes()))


def unsealed(content: dict[str, Any]) -> dict[str, Any]:
    """Return parsed JSON of :func:`sealed` without its checksum, or raise a ``ValueError`` if it was changed."""
    if content.pop("checksum", None) != _content_checksum(content):
        raise ValueError("its content does not match its checksum")
    return content


def _content_checksum(content: Mapping[str, Any]) -> str:
    return content_digest(json.dumps(content, sort_keys=True))


def file_checksums(folder: Path, pattern: str = "*") -> dict[str, str]:
    """Return the checksum of every file in a folder, by its path relative to the folder."""
    checksums = {}
    for path in sorted(folder.rglob(pattern)):
        if path.is_file():
            with path.open("rb") as file:
                checksums[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    return checksums


def set_aside(path: Path, reason: str) -> None:
    """Rename an unusable file to ``*.broken``, replacing an earlier one, and log it."""
    broken = path.with_name(f"{path.name}.broken")
    try:
        path.replace(broken)
    except FileNotFoundError:
        return  # another process has renamed it
    except OSError as error:
        if error.errno in _PATH_TAKEN:
            raise FolderError(
                f"{path} cannot be used ({reason}), nor moved to {broken} ({error.strerror}): move both away."
            ) from error
        if error.errno not in _READ_ONLY:
            raise
        broken = path
    one_line = " ".join(reason.split())
    _log.warning("%s could not be read (%s). It is rebuilt; the old content is in %s.", path, one_line[:300], broken)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Reserve a folder for this run. The lock ends with the process, even if it is killed.

    A folder is not locked if its lock file cannot be written, as another user's in a folder that both share.

    Raises:
        FolderError: another run is using the folder, or no file can be written to it.
        OptionError: the folder holds files of something else.
    """
    from filelock import FileLock, Timeout

    check_output_folder(folder)
    make_folder(folder)
    path = folder / LOCK
    if path.is_symlink() or path.is_dir():
        kind = "a symbolic link" if path.is_symlink() else "a folder"
        raise FolderError(f"{path} must be a file, but is {kind}: remove it, and run again.")
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise FolderError(
            f"{folder} is in use: {_holder(path)} is writing there. Wait until it has finished, or use another folder."
        ) from error
    except OSError as error:
        if error.errno not in (*_READ_ONLY, *_DISK_FULL):
            raise
    try:
        if lock.is_locked:
            with suppress(OSError):  # only a message to other processes
                start = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
                path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {start}")
        yield
    finally:
        lock.release()
        with suppress(OSError):  # Windows removes it, and it marks the folder as ours
            path.touch()


def _holder(path: Path) -> str:
    with suppress(OSError):  # Windows denies reading a locked file
        return path.read_text(encoding="utf8", errors="replace").strip() or "another process"
    return "another process"


def check_output_folder(folder: Path) -> None:
    """Raise unless files can be written to a folder that is absent, empty, or holds results of an earlier run."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not names & _RESULT_FILES:
        raise OptionError(
            f"`out` must be a new or empty folder, or hold an earlier run, but {folder} holds other files, such as "
            f"{short_repr(min(names))}: choose another folder."
        )
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Raise a :class:`FolderError` unless files can be written to a folder, or it can be created; leave nothing."""
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists() or place.is_symlink())
    try:  # hidden, in case the process is killed here
        with explain_full_disk(folder), tempfile.TemporaryDirectory(dir=place, prefix="."):
            pass
    except DiskFullError:
        raise
    except OSError as error:
        if folder.is_dir():
            raise FolderError(
                f"The folder {folder} is not writable ({error.strerror}): choose another path."
            ) from error
        make_folder(folder)  # says what is in the way


def check_links(folder: Path, subfolders: Iterable[Path]) -> None:
    """Raise if a subfolder, or a folder inside one, is a link that leads out of ``folder``.

    Files need no check: a link in place of a file is replaced, never written through.
    """
    root = folder.resolve()
    for subfolder in subfolders:
        nested = (Path(parent, name) for parent, names, _ in os.walk(subfolder) for name in names)
        for place in (subfolder, *nested):
            if place.is_symlink() and not place.resolve().is_relative_to(root):
                raise OptionError(
                    f"`out` must not contain links that lead out of it, but {place} is a link to {place.readlink()}: "
                    "remove the link, or pass its target as `out` (or as `store`, for embeddings)."
                )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf8"))


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def expand_home(path: Path | str) -> Path:
    """Return a path with ``~`` expanded, or unchanged if that user does not exist."""
    try:
        return Path(path).expanduser()
    except (RuntimeError, ValueError):
        return Path(path)


def shell_path(path: Path | str) -> str:
    """Return a path as a word of a shell command, which no program takes for a flag.

    Characters that are not printed, such as a line break or a right-to-left mark, are escaped as in bash and zsh.

    Example:
        >>> print(shell_path("-rf"), shell_path("my model"), shell_path("EleutherAI/pythia-410m"))
        ./-rf 'my model' EleutherAI/pythia-410m
    """
    word = f"./{path}" if str(path).startswith("-") else str(path)
    if word.isprintable():
        return shlex.quote(word)
    escaped = (char if char.isprintable() and char not in "\\'" else _escaped_bytes(char) for char in word)
    return f"$'{''.join(escaped)}'"


def _escaped_bytes(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(char))


def exists(path: Path) -> bool:
    """Return True if the path exists; an invalid path does not."""
    try:
        return path.exists()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def check_regular_file(path: Path, error: type[MidlayerError]) -> None:
    """Raise ``error`` unless ``path`` is a readable regular file; reading a FIFO would never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as reason:
        raise error(f"There is no file {short_repr(str(path), 200)} to read: {_reason(reason)}.") from reason
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else _KINDS.get(stat.S_IFMT(mode), "something else")
        raise error(f"{path} must be a regular file, but is {kind}. Copy its content to a file.")
    if not os.access(path, os.R_OK):
        raise error(f"{path} must be readable, but you lack the permission: chmod +r.")


def read_text_file(path: Path, error: type[MidlayerError]) -> str:
    """Return the content of a UTF-8 file, without a byte order mark."""
    check_regular_file(path, error)
    try:
        content = path.read_bytes()
    except OSError as reason:
        raise error(f"{path} cannot be read: {_reason(reason)}.") from reason
    if b"\0" in content:
        line = 1 + content[: content.index(b"\0")].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but has a null character: it may be UTF-16, compressed, or not text. "
            f"{_converted('utf-16', path)}"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = 1 + content[: reason.start].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but the byte 0x{content[reason.start]:02x} is not: it may be Latin-1 "
            f"(Windows-1252). {_converted('windows-1252', path)}"
        ) from reason


def read_lines(path: Path, error: type[MidlayerError]) -> list[str]:
    """Return the lines of a text file, split at line ends only."""
    # `splitlines` would also split at U+2028 and control characters, which texts may contain.
    lines = read_text_file(path, error).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def read_json_lines(path: Path, error: type[MidlayerError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line that is not blank."""
    for number, line in enumerate(read_lines(path, error), start=1):
        if line.strip():
            yield number, parse_json_object(line, f"{path}, line {number}", error)


def parse_json_object(text: str, where: str, error: type[MidlayerError]) -> dict[str, Any]:
    """Return a JSON object, or raise ``error`` with the problem and ``where`` it is."""
    try:
        row = json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError:
        raise error(f"{where}: must be one JSON object, but is nested too deeply. Flatten it.") from None
    except json.JSONDecodeError as reason:
        raise error(
            f"{where}: must be one JSON object, but cannot be read: {reason.msg}, at character {reason.pos + 1}."
        ) from reason
    except ValueError as reason:  # a huge integer, or a repeated name
        problem = "a number has thousands of digits: put it in quotes" if "digits" in str(reason) else reason
        raise error(f"{where}: must be one JSON object, but cannot be read: {problem}.") from reason
    if not isinstance(row, dict):
        raise error(f"{where}: must be one JSON object, but got {short_repr(text.strip(), 40)}.")
    if "\\u" in text and (surrogate := lone_surrogate(json.dumps(row, ensure_ascii=False))) is not None:
        raise error(
            f"{where}: must be valid text, but contains the unpaired surrogate {surrogate}, which is half of an emoji. "
            "Remove it."
        )
    return row


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {repeated!r} appears twice, remove one")
    return row


def _converted(encoding: str, path: Path) -> str:
    return f"Convert it: iconv -f {encoding} -t utf-8 {shell_path(path.name)} > {shlex.quote(f'new{path.suffix}')}"


def _reason(reason: Exception) -> str:
    return getattr(reason, "strerror", None) or str(reason)
