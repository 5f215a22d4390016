from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Before any hub client is imported: the tests run without a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Return the folder of a family's tiny model, made once."""
    from tests.tiny_folders import save_tiny

    made: dict[str, str] = {}

    def folder(name: str) -> str:
        if name not in made:
            made[name] = save_tiny(name, tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of real data for validation; tests that need it skip where it is absent."""
    folder = Path(os.environ.get("MIDLAYER_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no validation data at {folder}; set MIDLAYER_DATA to its folder")
    return folder


@pytest.fixture(scope="module")
def quick_collector() -> Iterator[None]:
    """Let the collector pass over what was imported, a million objects: models are collected before the next is read."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
