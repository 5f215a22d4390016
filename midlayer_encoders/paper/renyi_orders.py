"""Rényi entropies of power-law spectra by order (Figure 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.spectra import spectral_entropy

ORDERS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
EXPONENTS = tuple(step / 8 for step in range(33))  # 0 to 4


def power_law(size: int, exponent: float) -> Tensor:
    r"""Return the eigenvalues :math:`\lambda_i = i^{-\beta}`, shape ``(size,)``, float64.

    Example:
        >>> power_law(4, 1.0)
        tensor([1.0000, 0.5000, 0.3333, 0.2500], dtype=torch.float64)
    """
    return torch.arange(1, size + 1, dtype=torch.float64) ** -exponent


def order_entropies(
    orders: Sequence[float] = ORDERS, exponents: Sequence[float] = EXPONENTS, *, size: int = 128
) -> pl.DataFrame:
    r"""Return the tidy frame of entropies of every order on power-law spectra, and what the smaller half adds to each.

    .. math::
        S_\alpha(\lambda) \quad\text{and}\quad S_\alpha(\lambda) - S_\alpha(\lambda_1, \dots, \lambda_{n/2}), \qquad
        \lambda_i = i^{-\beta}

    The second, ``tail_share`` after division by the first, says how much the smaller half of the eigenvalues
    contributes to an entropy.

    Args:
        orders: :math:`\alpha`, each ``> 0``.
        exponents: :math:`\beta`, each ``>= 0``; ``0`` is a flat spectrum.
        size: number of eigenvalues n, two or more.

    Returns:
        The tidy columns, with ``"matrix_entropy"`` (over log n) and ``"tail_share"`` as names, and ``alpha`` and
        ``beta``.

    Example:
        >>> flat = order_entropies([2.0], [0.0], size=8)
        >>> [(name, round(value, 4)) for name, value in flat.select("name", "value").iter_rows()]
        [('matrix_entropy', 1.0), ('tail_share', 0.3333)]
    """
    if size < 2:
        raise OptionError(f"`size` must be 2 eigenvalues or more, but got {size}.")
    if not orders or not exponents or min(exponents) < 0:
        raise OptionError(
            f"`orders` and `exponents` must name one or more, exponents of 0 or more, but got {list(orders)} and "
            f"{list(exponents)}."
        )
    subject = NamedSubject("power law", f"n={size}", 0)
    rows: list[dict[str, Any]] = []
    for beta in exponents:
        values = power_law(size, beta)
        for alpha in orders:
            whole = float(spectral_entropy(torch.diag(values), alpha=alpha, method="exact"))
            head = float(spectral_entropy(torch.diag(values[: size // 2]), alpha=alpha, method="exact"))
            values_by_name = {"matrix_entropy": whole / math.log(size), "tail_share": (whole - head) / whole}
            for name, value in values_by_name.items():
                rows += tidy_rows(
                    {0: value},
                    subject,
                    kind="metric",
                    dataset="i^-beta",
                    name=name,
                    extra={"alpha": alpha, "beta": beta},
                )
    return tidy_frame(rows, extra={"alpha": pl.Float64(), "beta": pl.Float64()})
