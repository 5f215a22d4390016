"""What a benchmark's ``main`` sets for its process is put back after a test that calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    threads, levels = torch.get_num_threads(), [logger.level for logger in loggers]
    yield
    torch.set_num_threads(threads)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
