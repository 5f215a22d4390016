"""Many parallel problems take the same path as SciPy's L-BFGS-B for each alone."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor

from midlayer_encoders.sweeping.scoring.lbfgs import minimize_lbfgs

K = 12
CURVED = torch.linspace(1, 300, 6, dtype=torch.float64)  # the curvature of each problem's valley


def valley(places: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Rosenbrock's function in K dimensions, with a valley that bends more from problem to problem."""
    points = points.clone().requires_grad_()
    bent = CURVED[places][:, None]
    values = (bent * (points[:, 1:] - points[:, :-1] ** 2) ** 2 + (1 - points[:, :-1]) ** 2).sum(dim=1)
    (gradients,) = torch.autograd.grad(values.sum(), points)
    return values.detach(), gradients


def of_scipy(problem: int, start: Tensor, **options: Any) -> Any:
    def value(point: np.ndarray[Any, Any]) -> tuple[float, np.ndarray[Any, Any]]:
        values, gradients = valley(torch.tensor([problem]), torch.from_numpy(point)[None])
        return values.item(), gradients[0].numpy()

    return minimize(value, start.numpy(), jac=True, method="L-BFGS-B", options={"maxls": 50, **options})


@pytest.mark.long
@pytest.mark.parametrize("iterations", [1, 2, 7, 25, 60])
def test_iterates_match_scipy(iterations: int) -> None:
    start = torch.randn(len(CURVED), K, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    process = minimize_lbfgs(valley, start, max_iterations=iterations, tolerance=1e-9)
    assert process.isfinite().all()
    for problem, point in enumerate(start):
        expected = of_scipy(problem, point, maxiter=iterations, gtol=1e-9, ftol=64 * np.finfo(float).eps)
        # A bent valley is chaotic: after many iterations, rounding differences dominate.
        torch.testing.assert_close(
            process[problem], torch.from_numpy(expected.x), rtol=0, atol=10 ** (iterations / 12 - 9)
        )


def test_each_problem_stops_by_its_own_gradient() -> None:
    start = torch.full((len(CURVED), K), 0.9, dtype=torch.float64)
    start[2] = 1  # at the minimum already
    evaluated: list[int] = []

    def counted(places: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        evaluated.append(len(places))
        return valley(places, points)

    process = minimize_lbfgs(counted, start, max_iterations=500, tolerance=1e-5)
    _, gradients = valley(torch.arange(len(CURVED)), process)
    assert gradients.abs().amax() <= 1e-5
    torch.testing.assert_close(process, torch.ones_like(process), rtol=0, atol=1e-4)
    assert process[2].equal(start[2])
    assert evaluated[0] == len(CURVED)
    assert evaluated[-1] < len(CURVED)


def test_unbounded_function_stays_in_place() -> None:
    def flat(places: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        return points.new_full((len(places),), torch.nan), torch.ones_like(points)

    start = torch.zeros(2, 3, dtype=torch.float64)
    assert minimize_lbfgs(flat, start, max_iterations=5, tolerance=1e-5).equal(start)
