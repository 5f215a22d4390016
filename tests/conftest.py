import gc
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

# Before any hub client is imported: the tests run without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".cache"))
# Sweeps score in this process unless a test asks for workers, each of which imports torch and mteb for 20 s.
os.environ.setdefault("LOKY_MAX_CPU_COUNT", "1")

# A package's metadata is parsed on every query, which takes 3 ms and happens for every loaded model and written result.
for _name in ("metadata", "version"):
    setattr(importlib.metadata, _name, cache(getattr(importlib.metadata, _name)))


def pytest_sessionfinish() -> None:
    """Leave out the garbage of the session, which pytest would collect five times."""
    gc.freeze()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a family's tiny model, created once."""
    from tests.support.tiny_folders import save_tiny

    folders: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in folders:
            folders[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return folders[name]

    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real validation data; tests that need it are skipped where it is absent."""
    folder = Path(os.environ.get("MIDLAYER_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        if "MIDLAYER_DATA" in os.environ:
            pytest.fail(f"MIDLAYER_DATA names no folder: {folder}")
        pytest.skip(f"no validation data at {folder}; set MIDLAYER_DATA to its folder")
    return folder


@pytest.fixture(scope="module", autouse=True)
def quick_collector() -> Iterator[None]:
    """Let the garbage collector skip the million imported objects, which trainers collect once per run for a second."""
    gc.freeze()
    yield
    gc.unfreeze()


def _unless_empty(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    @wraps(reset)
    def quick(module: Any) -> None:
        if not module.weight.is_meta:
            reset(module)

    return quick


def _by_type(has: Callable[[Any, str], bool]) -> Callable[[Any, str], bool]:
    found: dict[tuple[type, str], bool] = {}

    @wraps(has)
    def quick(value: Any, name: str) -> bool:
        key = type(value), name
        if key not in found:
            found[key] = has(value, name)
        return found[key]

    return quick


@pytest.fixture(scope="module", autouse=True)
def quick_libraries() -> None:
    """Leave out what is done again and again for nothing that a test reads, where the library has been imported."""
    loaded: Callable[[str], Any] = sys.modules.get
    for name in ("torch.cuda", "torch.xpu", "torch.mtia"):  # format the stack at every seed, until the device is used
        if device := loaded(name):
            device.traceback = SimpleNamespace(format_stack=list)
    if configs := loaded("transformers.configuration_utils"):  # formats a config that is loaded, to log it
        configs.PreTrainedConfig.__repr__ = object.__repr__
    if (layers := loaded("torch.nn")) and not hasattr(layers.Linear.reset_parameters, "__wrapped__"):
        for kind in (layers.Linear, layers.Embedding):  # initialize weights on the meta device
            kind.reset_parameters = _unless_empty(kind.reset_parameters)
    if (frames := loaded("narwhals._utils")) and not hasattr(frames._hasattr_static, "__wrapped__"):
        frames._hasattr_static = _by_type(frames._hasattr_static)  # for each array that scikit-learn gets
    if rankings := loaded("mteb._evaluators.retrieval_metrics"):  # has 147 scores more for each ranking
        rankings.evaluate_abstention = lambda *_: {}
    if notes := loaded("midlayer_encoders.sweeping.notes"):  # the fastest of nine passes
        notes._TIMED_PASSES = 2
    if (runner := loaded("typer.testing")) and not hasattr(runner._get_command, "cache_info"):  # makes every command
        runner._get_command = cache(runner._get_command)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Return a separate disk of one MiB, where mounting is permitted."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.fixture
def read_only_disk(small_disk: Path) -> Iterator[Path]:
    """Return a read-only disk with one empty folder, ``out``."""
    (small_disk / "out").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    yield small_disk
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
