"""Create environments with other releases, which share the torch of this one."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import pytest

_MINUTES = 15


@lru_cache
def _home() -> Path:
    """Return where environments are kept: what the Makefile names, or a folder that goes with the session."""
    return Path(os.environ.get("XDG_CACHE_HOME") or tempfile.mkdtemp()) / "engines"


def environment(name: str, *expected: str, without: tuple[str, ...] = (), python: str = sys.executable) -> str:
    """Return the Python of an environment, made once; skip the test where pip cannot make it.

    Args:
        name: of its folder.
        wanted: what pip is asked for.
        without: what is removed afterwards.
        python: that it is made of; another than this one does not share torch.
    """
    home = _home() / name
    process, executable = home / "done.json", home / "bin" / "python"
    requested = [*expected, *(f"-{item}" for item in without), importlib.metadata.version("torch")]
    if process.is_file() and json.loads(process.read_text()) == requested:
        return str(executable)
    subprocess.run([python, "-m", "venv", "--clear", home], check=True)
    if python == sys.executable:
        _share_torch(home)
    pip = [home / "bin" / "pip", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        [*pip, "install", *expected], capture_output=True, text=True, timeout=60 * _MINUTES, check=False
    )
    if result.returncode:
        pytest.skip(f"pip cannot install {' '.join(expected)} here: {result.stderr.strip()[-300:]}")
    if without:
        subprocess.run([*pip, "uninstall", "--yes", *without], check=True, capture_output=True)
    process.write_text(json.dumps(requested))
    return str(executable)


def _share_torch(home: Path) -> None:
    """Let an environment see the installed torch, which is large, and nothing else of this one."""
    shared = home / "shared"
    shared.mkdir()
    torch = importlib.metadata.distribution("torch")
    for name in {file.parts[0] for file in torch.files or ()} - {"..", "__pycache__"}:
        (shared / name).symlink_to(Path(str(torch.locate_file(name))))
    (site,) = home.glob("lib/python*/site-packages")
    (site / "torch.pth").write_text(f"{shared}\n")
