r"""Experiments without a model: orders of the entropy (Figure 7), and Theorems 1 to 3, as printed and as corrected.

Theorem 1 (4 in the appendix) compares effective rank and entropy. Theorem 2 (5 and 6) says how the dataset entropy of
order 2 grows when every prompt's entropy is at its largest or at its smallest; its proof uses
:math:`S_2 = -\log \lVert \bar Z \bar Z^\top \rVert_F^2`, without the trace that the paper's Equation 1 divides by.
Theorem 3 (7) bounds :math:`\log N - \text{InfoNCE}` by the mutual information, and that by the entropy of Z.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.metrics import dataset_entropy, effective_rank, infonce, matrix_entropy
from midlayer_encoders.spectra import spectral_entropy

ORDERS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
EXPONENTS = tuple(step / 8 for step in range(33))  # 0 to 4

STATEMENTS = {
    "1, as printed": "EffRank(Z) <= exp S1(Z)",
    "1, the other way round": "exp S1(Z) <= EffRank(Z)",
    "2.1, as printed": "largest prompt entropy: |Z Z'|^2 = N / L^2",
    "2.1, with Equation 1": "largest prompt entropy: S2 = log N",
    "2.2, as printed": "smallest prompt entropy: |Z Z'|^2 = N^3 / L^2",
    "2.2, corrected": "smallest prompt entropy: |Z Z'|^2 = N",
    "2.2, with Equation 1": "smallest prompt entropy: S2 = log N, as for the largest",
    "3, InfoNCE and information": "log N - InfoNCE <= I(X; Z)",
    "3, information and entropy": "I(X; Z) <= H(Z), Shannon's",
    "3, matrix entropy for H": "log N - InfoNCE <= S1 of the embeddings",
}
"""The statements that are tested, by name."""


def order_entropies(
    orders: Sequence[float] = ORDERS, exponents: Sequence[float] = EXPONENTS, *, size: int = 128
) -> pl.DataFrame:
    r"""Return the tidy frame of entropies of every order on power-law spectra, and the share of the smaller half.

    .. math::
        S_\alpha(\lambda) \quad\text{and}\quad S_\alpha(\lambda) - S_\alpha(\lambda_1, \dots, \lambda_{n/2}), \qquad
        \lambda_i = i^{-\beta}

    ``tail_share`` is the second divided by the first: the share of the entropy that the smaller half of the eigenvalues
    contributes.

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
    subject = NamedSubject("power law", f"n={size}", 0)
    rows: list[dict[str, Any]] = []
    for beta in exponents:
        spectrum = torch.diag(torch.arange(1, size + 1, dtype=torch.float64) ** -beta)
        for alpha in orders:
            whole = float(spectral_entropy(spectrum, alpha=alpha, method="exact"))
            head = float(spectral_entropy(spectrum[: size // 2, : size // 2], alpha=alpha, method="exact"))
            extra = {"alpha": alpha, "beta": beta}
            for name, value in (("matrix_entropy", whole / math.log(size)), ("tail_share", (whole - head) / whole)):
                rows += tidy_rows({0: value}, subject, kind="metric", dataset="i^-beta", name=name, extra=extra)
    return tidy_frame(rows, extra={"alpha": pl.Float64(), "beta": pl.Float64()})


@dataclass(frozen=True)
class Check:
    """One draw of one statement.

    Attributes:
        statement: a key of :data:`STATEMENTS`.
        case: description of the draw.
        left: value of the left side.
        right: value of the right side.
        slack: three standard errors of an average over draws, ``0`` where both sides are exact.
    """

    statement: str
    case: str
    left: float
    right: float
    slack: float = 0.0

    @property
    def holds(self) -> bool:
        """True if the statement's ``<=`` holds up to rounding, or its ``=`` to within a quarter."""
        if "<=" not in STATEMENTS[self.statement]:
            return abs(self.left - self.right) <= 0.25 * abs(self.right)
        return self.left <= self.right * (1 + 1e-9) + self.slack


def check_theorems(*, draws: int = 1000, width: int = 256, seed: int = 0) -> pl.DataFrame:
    """Return the tidy frame of every draw of every statement: two rows each, the left side and the right side.

    Args:
        draws: number of random matrices for Theorem 1; Theorem 2 uses a hundredth of it for each size.
        width: dimension D and length L of the prompts of Theorem 2, 16 or more.
        seed: seed of all draws.

    Returns:
        The tidy columns with ``name`` ``"left"`` and ``"right"`` and the case as ``dataset``, and ``statement``,
        ``draw`` and ``holds``.
    """
    generator = torch.Generator().manual_seed(seed)
    checks = [
        *_rank_checks(draws, generator),
        *_dataset_entropy_checks(draws // 100, width, generator),
        *_information_checks(generator),
        *_matrix_entropy_checks(generator),
    ]
    subject = NamedSubject("mathematics", None, 0)
    rows: list[dict[str, Any]] = []
    for draw, check in enumerate(checks):
        extra = {"statement": check.statement, "draw": draw, "holds": check.holds}
        for name, value in (("left", check.left), ("right", check.right)):
            rows += tidy_rows({0: value}, subject, kind="metric", dataset=check.case, name=name, extra=extra)
    return tidy_frame(rows, extra={"statement": pl.String(), "draw": pl.Int64(), "holds": pl.Boolean()})


def theorem_verdicts(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the number of draws of each statement, in how many it holds, and the range of left over right."""
    sides = frame.pivot("name", index=["statement", "draw", "holds"], values="value")
    ratio = pl.col("left") / pl.col("right")
    return sides.group_by("statement", maintain_order=True).agg(
        pl.len().alias("draws"),
        pl.col("holds").sum().alias("holds"),
        ratio.min().alias("lowest ratio"),
        ratio.max().alias("highest ratio"),
    )


# --- Theorem 1 ------------------------------------------------------------------------------------------------------


def _rank_checks(draws: int, generator: torch.Generator) -> Iterator[Check]:
    """Draw matrices with spectra from flat to steep; the two sides are equal only where the spectrum is flat."""
    for draw in range(draws):
        rows, columns = torch.randint(2, 33, (2,), generator=generator).tolist()
        steepness = 4 * float(torch.rand((), generator=generator))
        states = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        if draw % 2:
            states *= torch.arange(1, columns + 1, dtype=torch.float64) ** -steepness
        case = "Gaussian columns of falling size" if draw % 2 else "Gaussian"
        rank, entropy = float(effective_rank(states)), math.exp(float(matrix_entropy(states)))
        yield Check("1, as printed", case, rank, entropy)
        yield Check("1, the other way round", case, entropy, rank)


# --- Theorem 2 ------------------------------------------------------------------------------------------------------


def _dataset_entropy_checks(draws: int, width: int, generator: torch.Generator) -> Iterator[Check]:
    """Draw N prompts of L = D unit tokens: orthogonal ones (largest prompt entropy), or all equal (smallest)."""
    for count in (2, 4, 8, 16):
        case = f"{count} prompts of {width} tokens"
        for _ in range(draws):
            square = torch.randn(count, width, width, generator=generator, dtype=torch.float64)
            orthogonal = torch.linalg.qr(square).Q
            equal = torch.nn.functional.normalize(square[:, :1], dim=-1).expand(-1, width, -1)
            largest, smallest = (prompts.mean(1) for prompts in (orthogonal, equal))
            printed = {"2.1, as printed": count / width**2}
            yield from _growth_checks(largest, printed | {"2.1, with Equation 1": math.log(count)}, case)
            printed = {"2.2, as printed": count**3 / width**2, "2.2, corrected": float(count)}
            yield from _growth_checks(smallest, printed | {"2.2, with Equation 1": math.log(count)}, case)


def _growth_checks(embeddings: Tensor, expected: dict[str, float], case: str) -> Iterator[Check]:
    """Compare the squared norm of the Gram matrix, or the entropy that divides by its trace, with a formula."""
    norm = float((embeddings @ embeddings.T).square().sum())
    entropy = float(dataset_entropy(embeddings, 2.0))
    for statement, right in expected.items():
        yield Check(statement, case, entropy if "Equation 1" in statement else norm, right)


# --- Theorem 3 ------------------------------------------------------------------------------------------------------


def _information_checks(generator: torch.Generator, batches: int = 400) -> Iterator[Check]:
    """Send one of M symbols through a channel that errs with probability e; their information and entropy are known."""
    for symbols in (4, 32):
        for error in (0.0, 0.3, 0.9):
            joint = (torch.eye(symbols, dtype=torch.float64) * (1 - error) + error / symbols) / symbols
            information = float(torch.special.xlogy(joint, joint * symbols**2).sum())
            entropy = math.log(symbols)
            yield Check("3, information and entropy", f"{symbols} symbols, {error} errors", information, entropy)
            for count in (8, 64):
                losses = _infonce_of_channel(joint, count, batches, generator)
                case = f"{symbols} symbols, {error} errors, {count} samples"
                slack = 3 * float(losses.std()) / math.sqrt(batches)
                left = math.log(count) - float(losses.mean())
                yield Check("3, InfoNCE and information", case, left, information, slack=slack)


def _infonce_of_channel(joint: Tensor, count: int, batches: int, generator: torch.Generator) -> Tensor:
    """Return the one-way InfoNCE loss of batches of pairs, with the critic log p(z|x)/p(z); shape ``(batches,)``."""
    symbols = len(joint)
    samples = torch.multinomial(joint.flatten(), batches * count, replacement=True, generator=generator)
    x, z = (samples // symbols).view(batches, count), (samples % symbols).view(batches, count)
    critic = (joint * symbols**2).clamp_min(1e-30).log()
    scores = critic[x[:, :, None], z[:, None, :]]
    return (scores.logsumexp(-1) - scores.diagonal(dim1=-2, dim2=-1)).mean(-1)


def _matrix_entropy_checks(generator: torch.Generator) -> Iterator[Check]:
    """Compare embeddings of N texts seen twice: one direction each, many in few directions, and points on a circle."""
    angles = 2 * math.pi * torch.arange(256, dtype=torch.float64) / 256
    embeddings: Sequence[tuple[str, Tensor, float]] = (
        ("256 texts, a direction each", torch.eye(256, dtype=torch.float64), 0.1),
        ("256 Gaussian texts in 64 dimensions", torch.randn(256, 64, generator=generator, dtype=torch.float64), 0.1),
        ("256 Gaussian texts in 8 dimensions", torch.randn(256, 8, generator=generator, dtype=torch.float64), 0.1),
        ("256 texts on a circle", torch.stack([angles.cos(), angles.sin()], dim=1), 1e-5),
    )
    for case, views, temperature in embeddings:
        bound = float(infonce(views, views, temperature=temperature, form="bound"))
        yield Check("3, matrix entropy for H", case, bound, float(dataset_entropy(views)))
