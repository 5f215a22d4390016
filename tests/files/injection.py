"""A process that dies, or whose disk is full, at the n-th call that changes a file in a folder."""

from __future__ import annotations

import builtins
import errno
import io
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

Mode = Literal["count", "kill", "full"]

_BY_PATH = ("mkdir", "rmdir", "unlink", "remove", "rename", "replace", "link", "symlink", "utime", "truncate")
_BY_DESCRIPTOR = ("fsync", "write", "pwrite", "ftruncate")


class Injection:
    """Counts the calls that change files in ``folder``, and ends the process, or the call, at one of them.

    A write that is killed leaves half of what it was given; any other call is made, and then the process dies by
    SIGKILL. A full disk is an ``OSError`` in place of the call. Only Python's own calls are seen, not those of
    libraries in other languages.
    """

    def __init__(self, folder: Path, point: int, mode: Mode) -> None:
        self.folder, self.point, self.mode = str(folder.resolve()), point, mode
        self.calls: list[str] = []

    def install(self) -> None:
        """Put the calls of this process under watch; there is no way back."""
        for name in _BY_PATH:
            setattr(os, name, self._watched(name, getattr(os, name), self._path_of))
        for name in _BY_DESCRIPTOR:
            setattr(os, name, self._watched(name, getattr(os, name), lambda inputs, _: self._descriptor(inputs[0])))
        os.open = self._watched("open", os.open, self._created)
        opened = builtins.open

        def open_file(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            result = opened(file, mode, *args, **options)
            if not set(mode) & set("wax+") or isinstance(file, int) or not self._inside(os.fspath(file)):
                return result
            return Watched(result, self)

        builtins.open = io.open = open_file  # type: ignore[assignment]

    def reached(self, call: str) -> bool:
        """Return whether this is the call to end at; raise where the disk is full at it."""
        self.calls.append(call)
        if len(self.calls) != self.point:
            return False
        if self.mode == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.mode == "kill"

    def _watched(self, name: str, call: Callable[..., Any], place: Callable[[Any, Any], str | None]) -> Any:
        def watched(*args: Any, **options: Any) -> Any:
            where = place(args, options)
            idle = {"mkdir": True, "unlink": False}.get(name) == os.path.lexists(where or "")
            if where is None or idle or not self._inside(where):
                return call(*args, **options)
            last = self.reached(f"{name} {Path(where).name}")
            result = call(*args, **options)
            if last:
                die()
            return result

        return watched

    def _path_of(self, inputs: Any, options: Any) -> str | None:
        if isinstance(inputs[0], int):
            return self._descriptor(inputs[0])
        above = options.get("dir_fd")
        return str(Path(self._descriptor(above) if above is not None else "", os.fspath(inputs[0])))

    def _created(self, inputs: Any, options: Any) -> str | None:
        return self._path_of(inputs, options) if inputs[1] & os.O_CREAT else None

    def _descriptor(self, number: int) -> str:
        return str(Path(f"/proc/self/fd/{number}").readlink())

    def _inside(self, path: str) -> bool:
        return f"{os.path.realpath(Path(path).parent)}/".startswith(f"{self.folder}/")


class Watched:
    """A file whose writes are counted; those of text, which Python gathers, once, when it is closed."""

    def __init__(self, file: Any, injection: Injection) -> None:
        self._file, self._injection = file, injection
        self._call = f"write {Path(file.name).name}"

    def write(self, content: Any) -> Any:
        if not isinstance(content, str) and self._injection.reached(self._call):
            self._file.write(content[: len(content) // 2])
            self._file.flush()
            die()
        return self._file.write(content)

    def close(self) -> None:
        if isinstance(self._file, io.TextIOBase) and not self._file.closed:
            self._file.flush()
            if self._injection.reached(self._call):
                os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size // 2)
                die()
        self._file.close()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
