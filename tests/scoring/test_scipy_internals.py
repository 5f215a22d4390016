"""The line search of SciPy that the classifiers use: the test fails when a release renames or changes it."""

import math

import pytest
from scipy.optimize._dcsrch import DCSRCH

DECREASE, SLOPE = 1e-3, 0.9


def value_and_slope(step: float) -> tuple[float, float]:
    """A function that falls from 1 at 0 to its minimum at 2 and then rises steeply."""
    return math.cosh(step - 2) / math.cosh(2), math.sinh(step - 2) / math.cosh(2)


@pytest.mark.parametrize("step", [1e-3, 0.5, 6.0, 50.0])
def test_line_search_ends_at_a_step_that_satisfies_the_wolfe_conditions(step: float) -> None:
    start, start_slope = value_and_slope(0)
    search = DCSRCH(None, None, ftol=DECREASE, gtol=SLOPE, xtol=0.1, stpmin=0, stpmax=1e10)
    assert search._iterate(step, start, start_slope, b"START") == (step, start, start_slope, b"FG")
    tasks = []
    while not tasks or (tasks[-1] == b"FG" and len(tasks) < 50):
        tried = step
        step, _, _, task = search._iterate(step, *value_and_slope(step), b"FG")
        tasks.append(task)
    assert tasks[-1].startswith(b"CONVERGENCE")
    assert step == tried
    value, slope = value_and_slope(step)
    assert value <= start + DECREASE * step * start_slope
    assert abs(slope) <= SLOPE * -start_slope
