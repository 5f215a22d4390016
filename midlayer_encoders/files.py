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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError, short_repr

T = TypeVar("T")

#: Name of the lock file in a folder that one run at a time may write to.
LOCK = "midlayer.lock"

_RESULT_FILES = {LOCK, "frame.parquet", "metrics.parquet", "probe.parquet", "units"}  # a results folder has one
_STALE_SECONDS = 3600.0  # after which a leftover temporary file belongs to a killed process
_TEMPORARY = re.compile(r"\.[0-9a-z_]{8}\.tmp")  # the names of `TemporaryDirectory`
_FULL_DISK_BYTES = 2**16  # free bytes that may remain when a library fails without saying that the disk is full
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)

_log = logging.getLogger(__name__)


def write_file(path: Path, content: bytes, *, once: bool = False) -> None:
    """Write a file atomically: afterwards it is complete, or the previous one is unchanged.

    A symbolic link at ``path`` is replaced; its target stays unchanged.

    Args:
        path: the file.
        content: its bytes.
        once: keep a file that exists. If several processes write one, the first one wins.
    """
    with atomic_write(path, once=once) as temporary:
        temporary.write_bytes(content)


@contextmanager
def atomic_write(path: Path, *, once: bool = False) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success it replaces ``path`` in one step.

    Args:
        path: the file.
        once: keep a file that exists.

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
        _apply_umask([temporary], temporary.parent)
        _sync(temporary)
        if once and path.exists():
            return
        if once and not path.is_symlink():
            with suppress(FileExistsError):
                os.link(temporary, path)
        else:
            _move(temporary, path)
        _sync(path.parent)


def _apply_umask(paths: Iterable[Path], folder: Path) -> None:
    """Give files the permissions of any new file: safetensors lets only their owner read those that it writes."""
    example = folder / "example"
    example.touch()
    for path in paths:
        path.chmod(example.stat().st_mode)


def _move(temporary: Path, path: Path) -> None:
    with _explain_obstacle(path):
        temporary.replace(path)


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
    with scratch(target if exists else target.parent) as temporary, explain_full_disk(target):
        write(temporary)
        files = sorted(file.relative_to(temporary) for file in temporary.rglob("*") if file.is_file())
        written = tuple(file.as_posix() for file in files)
        _apply_umask([temporary / file for file in files], temporary.parent)
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
    """Yield the path of a file or folder to create in a temporary folder inside ``folder``, which is then removed.

    A later process removes the leftovers of a killed one after an hour.
    """
    remove_leftovers(folder)
    with ExitStack() as stack:
        with _explain_obstacle(folder):
            temporary = TemporaryDirectory(dir=folder, prefix=".", suffix=".tmp", ignore_cleanup_errors=True)
            stack.enter_context(temporary)
        # A unique name: transformers caches the code of a model by the name of its folder.
        yield Path(temporary.name, Path(temporary.name).stem.lstrip("."))


@lru_cache(maxsize=4096)  # once per folder and process
def remove_leftovers(folder: Path) -> None:
    """Remove temporary folders that killed processes left in a folder at least an hour ago."""
    with suppress(OSError):  # a read-only disk keeps them
        for entry in [entry for entry in os.scandir(folder) if _TEMPORARY.fullmatch(entry.name)]:
            if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE_SECONDS:
                shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Turn the error of a full disk, or of a file too large for it, into one that names the disk and the path."""
    try:
        yield
    except MidlayerError:
        raise
    except Exception as error:
        folder = next(parent for parent in path.absolute().parents if parent.exists()).resolve()
        free = shutil.disk_usage(folder).free
        # Rust libraries write the number of an error into the message only; numpy's `tofile` has none.
        found = re.search(r"(?:Errno|os error) (\d+)", str(error))
        number = int(found[1]) if found else None
        if number not in _DISK_FULL if found else free > _FULL_DISK_BYTES and "free space" not in str(error):
            raise
        disk = next(parent for parent in (folder, *folder.parents) if os.path.ismount(parent))
        problem = "permits no such size" if number == errno.EFBIG else f"is full ({free / 2**20:.1f} MiB free)"
        raise DiskFullError(
            f"The disk of {disk} {problem}: {path} was not written. Existing files are unchanged: free some space, or "
            "write elsewhere, and run again."
        ) from error


@contextmanager
def _explain_obstacle(path: Path) -> Iterator[None]:
    """Turn errors of making or moving a path into errors that name what is in the way, or not writable."""
    try:
        with explain_full_disk(path):
            yield
    except DiskFullError:
        raise
    except OSError as error:
        obstacle = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
        raise FolderError(
            f"{path} cannot be written ({error.strerror}) because of {obstacle}: choose another path."
        ) from error


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
    with _explain_obstacle(path):
        path.mkdir(parents=True, exist_ok=True)


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


def dump_with_checksum(content: Mapping[str, Any]) -> bytes:
    """Return JSON with a checksum of its content, for :func:`read_with_checksum`."""
    return json.dumps({**content, "checksum": _content_checksum(content)}, indent=1).encode()


def read_with_checksum(path: Path) -> dict[str, Any]:
    """Return the content of a file of :func:`dump_with_checksum`, or raise a ``ValueError`` if it was changed."""
    content: dict[str, Any] = read_json(path)
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
        if error.errno not in _READ_ONLY:
            raise FolderError(f"{path} cannot be used ({reason}), nor moved to {broken}: move both away.") from error
        broken = path
    one_line = " ".join(reason.split())
    _log.warning("%s could not be read (%s). It is rebuilt; the old content is in %s.", path, one_line[:300], broken)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Reserve a folder for this run. The lock ends with the process, even if it is killed.

    A folder is not locked if its lock file cannot be written, as another user's in a folder that both share.

    Raises:
        FolderError: another run is using the folder, or no file can be written to it.
        OptionError: the folder holds files of something else, or a link to a folder outside.
    """
    from filelock import FileLock, Timeout

    check_output_folder(folder)
    make_folder(folder)
    for place in (Path(parent, name) for parent, names, _ in os.walk(folder) for name in names):
        if place.is_symlink() and not place.resolve().is_relative_to(folder.resolve()):
            raise OptionError(
                f"`out` must not contain links that lead out of it, but {place} is a link to {place.readlink()}: "
                "remove the link, or pass its target as `out` (or as `store`, for embeddings)."
            )
    path = folder / LOCK
    if path.is_symlink() or path.is_dir():
        raise FolderError(f"{path} must be a file, but is a symbolic link or a folder: remove it, and run again.")
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    except Timeout as error:
        holder = path.read_text(encoding="utf8", errors="replace") or "another process"
        raise FolderError(
            f"{folder} is in use: {holder} is writing there. Wait until it has finished, or use another folder."
        ) from error
    except OSError as error:
        if error.errno not in (*_READ_ONLY, *_DISK_FULL):
            raise
    try:
        yield
    finally:
        lock.release()


def check_output_folder(folder: Path, results: Set[str] = _RESULT_FILES) -> None:
    """Raise unless files can be written to a folder that is absent, empty, or holds ``results`` of an earlier run."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    visible = {name for name in names if not name.startswith(".")} - {LOCK}  # a run that is killed at once leaves these
    if visible and not names & results:
        raise OptionError(
            f"`out` must be a new or empty folder, or hold an earlier run, but {folder} holds other files, such as "
            f"{short_repr(min(visible))}: choose another folder."
        )
    check_writable(folder)


def check_writable(folder: Path) -> None:
    """Raise a :class:`FolderError` unless files can be written to a folder, or it can be created; leave nothing."""
    place = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    # Hidden, in case the process is killed here.
    with _explain_obstacle(folder), TemporaryDirectory(dir=place, prefix="."):
        pass


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf8"))


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf8")


def expand_home(path: Path | str) -> Path:
    """Return a path with ``~`` expanded, or unchanged if that user does not exist."""
    return Path(os.path.expanduser(path))  # noqa: PTH111  (pathlib raises an error then)


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
    return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"


def exists(path: Path) -> bool:
    """Return True if the path exists; an invalid path does not."""
    return os.path.exists(path)  # noqa: PTH110  (pathlib raises an error for a name that is too long)


def check_regular_file(path: Path, error: type[MidlayerError]) -> None:
    """Raise ``error`` unless ``path`` is a readable regular file; reading a pipe would never end."""
    if not exists(path):
        raise error(f"There is no file {short_repr(str(path), 200)} to read.")
    if not path.is_file():
        raise error(f"{path} must be a regular file, but is a folder, a pipe or a device. Copy its content to a file.")
    if not os.access(path, os.R_OK):
        raise error(f"{path} must be readable, but you lack the permission: chmod +r.")


def read_text_file(path: Path, error: type[MidlayerError]) -> str:
    """Return the content of a UTF-8 file, without a byte order mark."""
    check_regular_file(path, error)
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
        position = content.find(b"\0")
    except UnicodeDecodeError as reason:
        position = reason.start
    if position >= 0:
        line = 1 + content[:position].count(b"\n")
        raise error(
            f"{path}, line {line}: must be UTF-8, but the byte 0x{content[position]:02x} is not: it may be Latin-1 "
            "(Windows-1252), UTF-16, compressed, or not text. Convert it: "
            f"iconv -f windows-1252 -t utf-8 {shell_path(path.name)} > {shlex.quote(f'new{path.suffix}')}"
        )
    return text


def read_lines(path: Path, error: type[MidlayerError]) -> list[str]:
    """Return the lines of a text file, split at line ends only."""
    # `splitlines` would also split at U+2028 and control characters, which texts may contain.
    lines = read_text_file(path, error).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def read_json_lines(path: Path, error: type[MidlayerError]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the line number and the object of each line that is not blank."""
    for number, line in enumerate(read_lines(path, error), start=1):
        if line.strip():
            where = f"{path}, line {number}: must be one JSON object, but"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as reason:
                raise error(f"{where} cannot be read: {reason}.") from reason
            if not isinstance(row, dict):
                raise error(f"{where} got {short_repr(line.strip(), 40)}.")
            yield number, row
