"""L-BFGS for many convex functions at once; each follows the path of SciPy's L-BFGS-B without bounds."""

from collections.abc import Callable

import torch
from torch import Tensor

_PAIRS = 10  # remembered steps and gradient changes, SciPy's default
_EPS = torch.finfo(torch.float64).eps
_VALUE_TOLERANCE = 64 * _EPS  # scikit-learn's
_MAX_TRIALS = 50  # of a line search, scikit-learn's
_MIN_DECREASE = 1e-3  # of a line search, relative to the initial slope, as in L-BFGS-B
_MAX_SLOPE = 0.9
_IDLE = 0.125  # share of finished problems at which the others are copied


def minimize_lbfgs(
    objective: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    *,
    max_iterations: int,
    tolerance: float,
    largest: Callable[[Tensor, Tensor], Tensor] = lambda _, gradients: gradients.abs().amax(dim=1),
) -> Tensor:
    """Return the minimizer of each of P convex functions, shape ``(P, K)``.

    A problem ends when ``largest`` of its gradient is at most the tolerance, its value decreases by no more than
    rounding, or its line search fails.

    Args:
        objective: maps the numbers of A problems and a point of each ``(A, K)`` to values ``(A,)`` and gradients.
        start: initial points, shape ``(P, K)``, float64.
        max_iterations: largest number of iterations of a problem.
        tolerance: for the gradient.
        largest: maps the numbers of problems and their gradients to the numbers compared with the tolerance.
    """
    minimizers = start.clone()
    problems = _Problems(start)
    finished = torch.zeros(len(start), dtype=torch.bool, device=start.device)
    while len(finished):
        trial = problems.point + problems.step[:, None] * problems.direction
        value, gradient = objective(problems.number, trial)
        decrease = problems.value - value
        accepted, failed = problems.search(value, (gradient * problems.direction).sum(dim=1))
        problems.move((accepted & ~finished).nonzero()[:, 0], trial, value, gradient)
        converged = (largest(problems.number, gradient) <= tolerance) | (
            decrease <= _VALUE_TOLERANCE * value.abs().clamp(min=1)
        )
        finished |= failed | (accepted & (converged | (problems.iterations >= max_iterations)))
        if finished.all() or finished.double().mean() >= _IDLE:
            minimizers[problems.number[finished]] = problems.point[finished]
            problems.keep(~finished)
            finished = finished[~finished]
    return minimizers


class _Problems:
    """The state of A problems; every attribute has a row for each. The first trial is the initial point."""

    def __init__(self, start: Tensor) -> None:
        count, size = start.shape
        self.number = torch.arange(count, device=start.device)
        self.point = start.clone()
        self.value = start.new_full((count,), torch.inf)
        # Rows 0 to 9 are steps, 10 to 19 the changes of the gradient over them, 20 the gradient.
        self.memory = start.new_zeros(count, 2 * _PAIRS + 1, size)
        self.num_pairs = torch.zeros_like(self.number)
        self.iterations = torch.full_like(self.number, -1)
        self.direction = torch.zeros_like(start)
        self.slope, self.step = start.new_zeros(2, count)  # at the start of the line search, and its next trial
        self.trials = torch.zeros_like(self.number)
        self.low, self.high = start.new_zeros(2, count, 3)  # step, value and slope at the ends of the interval

    def keep(self, rows: Tensor) -> None:
        """Remove the other problems."""
        for name, values in vars(self).items():
            setattr(self, name, values[rows])

    def search(self, value: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
        """Return which problems accept their trial, and which line searches fail; the others get another trial."""
        self.trials += 1
        decreased = value <= self.value + self.step * _MIN_DECREASE * self.slope
        accepted = decreased & (slope.abs() <= -_MAX_SLOPE * self.slope)
        failed = ~accepted & ((self.trials >= _MAX_TRIALS) | ~value.isfinite() | (self.slope >= 0))
        if not (accepted | failed).all():
            trial = torch.stack([self.step, value, slope], dim=1)
            self.step = _next_step(self.low, trial, self.high[:, 0])
            above, crossed = value > self.low[:, 1], slope * self.low[:, 2] < 0
            self.high = torch.where(above[:, None], trial, torch.where(crossed[:, None], self.low, self.high))
            self.low = torch.where(above[:, None], self.low, trial)
        return accepted, failed

    def move(self, rows: Tensor, trial: Tensor, value: Tensor, gradient: Tensor) -> None:
        """Move the problems in some rows to their trial points, and start a line search along a new direction there."""
        step, change = trial[rows] - self.point[rows], gradient[rows] - self.memory[rows, -1]
        # A step along which the slope decreases carries no information.
        useful = (step * change).sum(dim=1) > -_EPS * self.slope[rows] * self.step[rows]
        slots = self.num_pairs[rows] % _PAIRS
        self.memory[rows[useful], slots[useful]] = step[useful]
        self.memory[rows[useful], slots[useful] + _PAIRS] = change[useful]
        self.memory[rows, -1] = gradient[rows]
        self.num_pairs[rows] += useful
        self.iterations[rows] += 1
        self.point[rows], self.value[rows] = trial[rows], value[rows]
        direction, slope = self._directions()
        self.direction[rows], self.slope[rows] = direction[rows], slope[rows]
        length = torch.where((self.iterations == 0) & (slope < 0), (-slope).sqrt(), 1)
        self.step[rows], self.trials[rows] = 1 / length[rows], 0
        self.low[rows] = torch.stack([torch.zeros_like(slope), value, slope], dim=1)[rows]
        self.high[rows] = torch.inf

    def _directions(self) -> tuple[Tensor, Tensor]:
        """Return minus the approximate inverse Hessian times the gradient, ``(A, K)``, and the slopes along it.

        In the compact form of Byrd, Nocedal and Schnabel (1994), equation 3.1, which needs two passes over the memory.
        """
        ages = torch.arange(_PAIRS - 1, -1, -1, device=self.point.device)
        slots = (self.num_pairs[:, None] - 1 - ages) % _PAIRS  # from the oldest to the newest
        order = torch.cat([slots, slots + _PAIRS, torch.full_like(slots[:, :1], 2 * _PAIRS)], dim=1)
        rows = torch.arange(len(order), device=order.device)[:, None, None]
        products = torch.bmm(self.memory, self.memory.mT)[rows, order[:, :, None], order[:, None]]
        cross = products[:, :_PAIRS, _PAIRS:-1]  # of steps and changes
        squares = products[:, _PAIRS:-1, _PAIRS:-1]
        curvatures = cross.diagonal(dim1=1, dim2=2)
        triangle = cross.triu() + torch.diag_embed((self.num_pairs[:, None] <= ages).to(cross))
        scale = torch.where(self.num_pairs > 0, curvatures[:, -1] / squares[:, -1, -1], 1)[:, None, None]
        inner = torch.linalg.solve_triangular(triangle, products[:, :_PAIRS, -1:], upper=True)
        outer = (torch.diag_embed(curvatures) + scale * squares) @ inner - scale * products[:, _PAIRS:-1, -1:]
        outer = torch.linalg.solve_triangular(triangle.mT, outer, upper=False)
        weights = -torch.cat([outer, -scale * inner, scale], dim=1)[..., 0]
        by_slot = torch.zeros_like(weights).scatter(1, order, weights)
        return torch.bmm(by_slot[:, None], self.memory)[:, 0], (weights * products[:, :, -1]).sum(dim=1)


def _next_step(best: Tensor, trial: Tensor, high: Tensor) -> Tensor:
    """Return the step that follows a trial in the line search of Moré and Thuente (1994), section 4.

    Args:
        best: the best step before the trial, its value and slope, shape ``(A, 3)``.
        trial: the same of the trial.
        high: the other end of the interval that holds the minimum; infinite if it is unknown.
    """
    (low, low_value, low_slope), (step, value, slope) = best.unbind(dim=1), trial.unbind(dim=1)
    above, crossed, bracketed = value > low_value, slope * low_slope < 0, high.isfinite()
    width = step - low
    # The cubic through both points has its minimum at a share of the way from the lower one to the other.
    theta = 3 * (low_value - value) / width + low_slope + slope
    gamma = (theta.square() - low_slope * slope).clamp(min=0).sqrt() * torch.where(above, width, -width).sign()
    near, far = torch.where(above, low_slope, slope), torch.where(above, slope, low_slope)
    share = (gamma - near + theta) / (2 * gamma - near + far)
    cubic = torch.where(above, low + share * width, step - share * width)
    parabola = low + low_slope / ((low_value - value) / width + low_slope) / 2 * width
    inside = torch.where((cubic - low).abs() < (parabola - low).abs(), cubic, (cubic + parabola) / 2)
    secant = step - slope / (slope - low_slope) * width
    across = torch.where((cubic - step).abs() > (secant - step).abs(), cubic, secant)
    # Before the minimum: the closer of both if an interval with the minimum is known, else the farther.
    to_cubic = torch.where(share < 0, (cubic - step).abs(), torch.inf)
    to_secant = (secant - step).abs()
    jump = torch.where(bracketed, torch.minimum(to_cubic, to_secant), torch.maximum(to_cubic, to_secant))
    least = torch.where(bracketed | (low == 0), 0, 1.1 * width.abs())
    most = torch.where(bracketed, 0.66 * (high - step).abs(), 4 * width.abs())
    beyond = step + width.sign() * jump.clamp(min=least, max=most)
    return torch.where(above, inside, torch.where(crossed, across, beyond))
