"""Accuracy of intervals of metrics: `OMP_NUM_THREADS=1 python benchmarks/halves.py > benchmarks/results/halves.md`.

The true value is the spread of the difference of two models over many draws of the texts. Half-sampling and the
bootstrap with replacement estimate it from one draw.
"""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from torch import Tensor

from midlayer_encoders.comparing.compare import half_width, random_halves
from midlayer_encoders.metrics import (
    alpha_req,
    anisotropy,
    dataset_entropy,
    dime,
    effective_rank,
    infonce,
    intrinsic_dimension,
    lidar,
    logdet_entropy,
)

TEXTS, WIDTH, VIEWS = 120, 48, 4
DRAWS, LOOKED_AT, RESAMPLES = 200, 20, 50
Z = 1.959964
Model = tuple[Tensor, Tensor]  # vectors (N, D) and views (V, N, D)

METRICS: dict[str, Callable[[Model], Tensor]] = {
    "dataset_entropy": lambda one: dataset_entropy(one[0]),
    "effective_rank": lambda one: effective_rank(one[0]),
    "anisotropy": lambda one: anisotropy(one[0]),
    "intrinsic_dimension": lambda one: intrinsic_dimension(one[0]),
    "alpha_req": lambda one: alpha_req(one[0]),
    "logdet_entropy": lambda one: logdet_entropy(one[0]),
    "infonce": lambda one: infonce(one[1][0], one[1][1]),
    "lidar": lambda one: lidar(one[1]),
    "dime": lambda one: dime(one[1][0], one[1][1], permutations=3),
}


def models(generator: torch.Generator) -> tuple[Model, Model]:
    """Return two models' vectors of the same random texts: a linear one, and one that saturates."""
    scale = torch.arange(1, WIDTH + 1, dtype=torch.float64) ** -0.6
    texts = torch.randn(TEXTS, WIDTH, dtype=torch.float64, generator=generator)
    first = texts * scale + 0.5
    second = torch.tanh(2 * texts * scale * torch.linspace(1, 0.4, WIDTH, dtype=torch.float64)) + 0.2
    made = []
    for vectors, noise in ((first, 0.3), (second, 0.2)):
        jitter = torch.randn(VIEWS, TEXTS, WIDTH, dtype=torch.float64, generator=generator)
        made.append((vectors, vectors + noise * scale * jitter))
    return made[0], made[1]


def difference(name: str, pair: tuple[Model, Model], at: Tensor) -> float:
    first, second = ((vectors[at], views[:, at]) for vectors, views in pair)
    return float(METRICS[name](second) - METRICS[name](first))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [models(generator) for _ in range(DRAWS)]
    everything = torch.arange(TEXTS)
    print("# Intervals over texts: half-sampling and the bootstrap\n")
    print(
        f"`python benchmarks/halves.py`, Python {platform.python_version()}, torch {torch.__version__}: the difference of "
        f"two synthetic models on {TEXTS} texts of width {WIDTH}, with {VIEWS} views. The true standard deviation is over "
        f"{DRAWS} draws of the texts; each method is applied to {LOOKED_AT} of them with {RESAMPLES} resamples. `se` is a "
        "method's mean standard error relative to the true one (1 is exact, more is conservative); `shift` is the distance of "
        "the mean of its resamples from the value, in true standard deviations."
    )
    print("\n| metric | true sd | halves: se | bootstrap: se | bootstrap: shift |\n|---|---|---|---|---|")
    for name in METRICS:
        truth = torch.tensor([difference(name, pair, everything) for pair in draws])
        sd, halved, booted, shifts = float(truth.std()), [], [], []
        for place in range(LOOKED_AT):
            pair = draws[place]
            halves = torch.tensor([difference(name, pair, at) for at in random_halves(TEXTS, RESAMPLES, seed=place)])
            halved.append(float(half_width(halves, TEXTS)) / Z)
            drawn = torch.randint(TEXTS, (RESAMPLES, TEXTS), generator=generator)
            again = torch.tensor([difference(name, pair, at) for at in drawn])
            booted.append(float(again.std()))
            shifts.append(float(again.mean() - truth[place]))
        half, boot, shift = (sum(many) / LOOKED_AT / sd for many in (halved, booted, shifts))
        print(f"| {name} | {sd:.4g} | {half:.2f} | {boot:.2f} | {shift:+.1f} |", flush=True)


if __name__ == "__main__":
    main()
