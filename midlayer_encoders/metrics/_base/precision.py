"""The precision that metrics count in, and the products that are taken in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = [
    "full_precision",
    "lengths",
    "precise",
    "result_dtype",
    "single_or_better",
    "tiny_length",
    "unit_rows",
]


def single_or_better(states: Tensor) -> Tensor:
    """Return states in float32, and float64 ones as they are: enough for what reads one token at a time."""
    return states.to(result_dtype(states))


def precise(states: Tensor) -> Tensor:
    """Return states in float64 on a CPU, where products of it cost little more, and in float32 or better elsewhere."""
    double = states.device.type == "cpu" or states.dtype == torch.float64
    return states.to(torch.float64 if double else torch.float32)


def result_dtype(states: Tensor) -> torch.dtype:
    """Return float64 for float64 states and float32 for all others."""
    return torch.float64 if states.dtype == torch.float64 else torch.float32


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Keep autocast and TF32 out of the products inside, whatever the run around them has chosen."""
    before = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        try:
            torch.set_float32_matmul_precision("highest")
            yield
        finally:
            torch.set_float32_matmul_precision(before)


def lengths(rows: Tensor) -> Tensor:
    """Return the Euclidean length of each row of ``(*, N, D)``, shape ``(*, N)``."""
    result: Tensor = torch.linalg.vector_norm(rows, dim=-1)
    return result


def tiny_length(rows: Tensor) -> Tensor:
    """Return the length up to which a difference of rows, shape ``(*, N, D)``, is rounding: shape ``(*, 1)``."""
    return 32 * torch.finfo(rows.dtype).eps * lengths(rows).amax(dim=-1, keepdim=True)


def unit_rows(rows: Tensor) -> Tensor:
    """Return each row of ``(*, N, D)`` at length one; a zero row stays zero, NaN stays NaN."""
    length = lengths(rows).unsqueeze(-1)
    return rows / torch.where(length == 0, 1.0, length)
