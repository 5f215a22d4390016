"""Tests of benchmarks: what a ``main`` sets for its process is put back after a test that calls it."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave the tests of this folder, which are not about the package, to `make test-long`."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.long)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    threads, levels = torch.get_num_threads(), [logger.level for logger in loggers]
    yield
    torch.set_num_threads(threads)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
