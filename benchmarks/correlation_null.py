"""How often correlations of unrelated curves over layers stand out of the shifts that ``correlate`` compares them with.

Pairs of independent curves (autoregressive and random walks, with and without drift, and smooth curves) of 7, 13, 25 and
31 layers. The share with ``p`` at most 0.05 and 0.10 should be at most that; with 7 layers there are 12 shifts, so no
``p`` is below 0.083. Writes ``benchmarks/results/correlation_null.md``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from midlayer_encoders.comparing.correlation import _statistic_rows

OUT = Path(__file__).parent / "results" / "correlation_null.md"
LAYERS = (7, 13, 25, 31)
STATISTICS = ("dcor", "spearman", "kendall")
_Curve = NDArray[np.float64]


def autoregressive(normal: _Curve, coefficient: float) -> _Curve:
    """Return a stationary AR(1) curve from normal draws."""
    curve = normal.copy()
    curve[0] /= (1 - coefficient**2) ** 0.5
    for layer in range(1, len(curve)):
        curve[layer] += coefficient * curve[layer - 1]
    return curve


def smooth(normal: _Curve) -> _Curve:
    """Return a sum of five cosines whose weights fall with the square of their frequency."""
    depth = (np.arange(len(normal)) + 0.5) / len(normal)
    waves = [normal[k] / (k + 1) ** 2 * np.cos(np.pi * (k + 1) * depth) for k in range(5)]
    return np.sum(waves, axis=0) + 0.02 * normal


CURVES: dict[str, Callable[[_Curve], _Curve]] = {
    "independent values": lambda normal: normal,
    "AR(1), 0.5": lambda normal: autoregressive(normal, 0.5),
    "AR(1), 0.9": lambda normal: autoregressive(normal, 0.9),
    "random walk": np.cumsum,
    "random walk with drift 0.7": lambda normal: np.cumsum(normal + 0.7),
    "sum of a random walk": lambda normal: np.cumsum(np.cumsum(normal)),
    "five cosines": smooth,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=1000)
    pairs = parser.parse_args().pairs
    lines = [
        "# Correlations of unrelated curves over layers",
        "",
        f"`python -m benchmarks.correlation_null --pairs {pairs}`: {pairs} independent pairs for each row. The share of "
        "pairs with p at most 0.05 and at most 0.10, and the value of the distance correlation (dCor) that one pair in "
        "20 exceeds.",
        "",
        "| layers | curves | " + " | ".join(f"{name}, p ≤ .05 | ≤ .10" for name in STATISTICS) + " | dCor of 1 in 20 |",
        "|---|---|" + "---|" * (2 * len(STATISTICS) + 1),
    ]
    for layers in LAYERS:
        generator = np.random.default_rng(layers)
        for name, curve in CURVES.items():
            draws = generator.normal(size=(pairs, 2, layers))
            rows = [{row["statistic"]: row for row in _statistic_rows(curve(x), curve(y))} for x, y in draws]
            shares = [
                f"{np.mean([float(row[statistic]['p']) <= level + 1e-9 for row in rows]):.3f}"
                for statistic in STATISTICS
                for level in (0.05, 0.10)
            ]
            high = np.quantile([float(row["dcor"]["value"]) for row in rows], 0.95)
            lines.append(f"| {layers} | {name} | " + " | ".join(shares) + f" | {high:.2f} |")
            print(lines[-1], flush=True)
    OUT.write_text("\n".join(lines) + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
