"""Literal definitions in float64: one prompt, one pair, one number at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


def entropy_of_shares(shares: list[float], alpha: float) -> float:
    """Renyi entropy of numbers that add up to one."""
    if alpha == 1.0:
        return -sum(share * math.log(share) for share in shares if share > 0)
    return math.log(sum(share**alpha for share in shares if share > 0)) / (1 - alpha)


def spectrum(rows: Tensor) -> list[float]:
    """Eigenvalues of Z Z', by singular values of Z."""
    return [float(sigma) ** 2 for sigma in np.linalg.svd(rows.double().numpy(), compute_uv=False)]


def entropy_by_definition(rows: Tensor, alpha: float = 1.0) -> Tensor:
    """Matrix entropy of rows ``(N, D)``."""
    values = spectrum(rows)
    if sum(values) == 0:
        return torch.tensor(0.0, dtype=torch.float64)
    shares = [value / sum(values) for value in values]
    return torch.tensor(entropy_of_shares([share for share in shares if share > 1e-14], alpha), dtype=torch.float64)


def centered_unit(rows: Tensor) -> Tensor:
    """Rows minus their mean, scaled to unit length."""
    mean = sum(row for row in rows) / len(rows)
    return torch.stack([(row - mean) / (row - mean).norm() for row in rows])


def cosine(item: Tensor, other_item: Tensor) -> float:
    """Cosine of the angle between two vectors."""
    return float(item @ other_item / (item.norm() * other_item.norm()))


def random_rows(n: int, d: int, seed: int = 0) -> Tensor:
    """Normal rows ``(n, d)`` in float64."""
    return torch.randn(n, d, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def random_rotation(d: int, seed: int = 0) -> Tensor:
    """An orthogonal matrix ``(d, d)`` in float64."""
    rotation: Tensor = torch.linalg.qr(random_rows(d, d, seed + 100)).Q
    return rotation
