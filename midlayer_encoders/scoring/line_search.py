"""The line search of L-BFGS-B for many problems side by side: Moré and Thuente's, as MINPACK-2 and SciPy have it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

_DECREASE, _CURVATURE, _WIDTH = 1e-3, 0.9, 0.1  # as L-BFGS-B sets them
_LARGEST = 1e10


@dataclass
class LineSearch:
    """Where each of P searches stands: the best step ``x``, the other end of its interval ``y``, and the next ``step``.

    ``f`` are values of the function, ``g`` its slopes along the direction.
    """

    step: Floats
    f_start: Floats
    g_start: Floats
    x: Floats
    fx: Floats
    gx: Floats
    y: Floats
    fy: Floats
    gy: Floats
    low: Floats
    high: Floats
    width: Floats
    width_before: Floats
    bracketed: Flags
    first_stage: Flags

    @classmethod
    def start(cls, step: Floats, f: Floats, g: Floats) -> LineSearch:
        """Return searches that begin with a step each, at points with values ``f`` and slopes ``g``."""
        zero, count = np.zeros_like(step), len(step)
        return cls(
            step=step.copy(), f_start=f.copy(), g_start=g.copy(), x=zero.copy(), fx=f.copy(), gx=g.copy(),
            y=zero.copy(), fy=f.copy(), gy=g.copy(), low=zero.copy(), high=5 * step,
            width=np.full(count, _LARGEST), width_before=np.full(count, 2 * _LARGEST),
            bracketed=np.zeros(count, dtype=bool), first_stage=np.ones(count, dtype=bool),
        )  # fmt: skip

    def put(self, where: Flags, other: LineSearch) -> None:
        """Replace the searches at ``where`` by others, in place."""
        for one in fields(self):
            getattr(self, one.name)[where] = getattr(other, one.name)[where]

    def kept(self, places: npt.NDArray[Any]) -> LineSearch:
        """Return the searches at some places."""
        return LineSearch(*(getattr(self, one.name)[places] for one in fields(self)))

    def advance(self, f: Floats, g: Floats) -> Flags:
        """Take the values and slopes at ``step``, choose the next steps, and return which searches are over.

        Those that are over keep their step: it is one that decreases enough, or the best that can be had.
        """
        slope = _DECREASE * self.g_start
        wanted = self.f_start + self.step * slope
        self.first_stage &= ~((f <= wanted) & (g >= 0))
        stuck = self.bracketed & ((self.step <= self.low) | (self.step >= self.high))
        stuck |= self.bracketed & (self.high - self.low <= _WIDTH * self.high)
        stuck |= (self.step == _LARGEST) & (f <= wanted) & (g <= slope)
        stuck |= (self.step == 0) & ((f > wanted) | (g >= slope))
        over = stuck | ((f <= wanted) & (np.abs(g) <= -_CURVATURE * self.g_start))
        before = self.kept(np.arange(len(f)))
        # In the first stage a function less its wanted decrease predicts the step, where that is not reached yet.
        shift = np.where(self.first_stage & (f <= self.fx) & (f > wanted), slope, 0.0)
        self._shift(-shift)
        with np.errstate(all="ignore"):  # of the four cases of a step only one is taken
            self.step, self.bracketed = self._interval(f - before.step * shift, g - shift)
        self._shift(shift)
        self._bound()
        self.put(over, before)
        return over

    def _shift(self, slope: Floats) -> None:
        self.fx, self.fy = self.fx + self.x * slope, self.fy + self.y * slope
        self.gx, self.gy = self.gx + slope, self.gy + slope

    def _interval(self, f: Floats, g: Floats) -> tuple[Floats, Flags]:
        """Move the ends of the intervals, and return the next steps and which searches have bracketed a minimum."""
        step, x, fx, gx = self.step, self.x, self.fx, self.gx
        higher = f > fx
        opposite = ~higher & (np.sign(g) * np.sign(gx) < 0)
        flatter = ~higher & ~opposite & (np.abs(g) < np.abs(gx))

        theta = 3 * (fx - f) / (step - x) + gx + g
        root = _root(theta, gx, g)
        # First case: a higher value brackets the minimum.
        gamma = np.where(step < x, -root, root)
        cubic = x + ((gamma - gx) + theta) / (((gamma - gx) + gamma) + g) * (step - x)
        square = x + (gx / ((fx - f) / (step - x) + gx)) / 2 * (step - x)
        first = np.where(np.abs(cubic - x) <= np.abs(square - x), cubic, cubic + (square - cubic) / 2)
        # Second: slopes of opposite signs bracket it too.
        gamma = np.where(step > x, -root, root)
        cubic = step + ((gamma - g) + theta) / (((gamma - g) + gamma) + gx) * (x - step)
        secant = step + g / (g - gx) * (x - step)
        second = np.where(np.abs(cubic - step) > np.abs(secant - step), cubic, secant)
        # Third: the slope gets flatter.
        ratio = ((gamma - g) + theta) / ((gamma + (gx - g)) + gamma)
        edge = np.where(step > x, self.high, self.low)
        cubic = np.where((ratio < 0) & (gamma != 0), step + ratio * (x - step), edge)
        nearer = np.where(np.abs(cubic - step) < np.abs(secant - step), cubic, secant)
        limit = step + 0.66 * (self.y - step)
        nearer = np.where(step > x, np.minimum(limit, nearer), np.maximum(limit, nearer))
        farther = np.where(np.abs(cubic - step) > np.abs(secant - step), cubic, secant)
        third = np.where(self.bracketed, nearer, np.clip(farther, self.low, self.high))
        # Fourth: it does not.
        theta = 3 * (f - self.fy) / (self.y - step) + self.gy + g
        gamma = np.where(step > self.y, -1, 1) * _root(theta, self.gy, g)
        cubic = step + ((gamma - g) + theta) / (((gamma - g) + gamma) + self.gy) * (self.y - step)
        fourth = np.where(self.bracketed, cubic, edge)

        chosen = np.select([higher, opposite, flatter], [first, second, third], fourth)
        self.y = np.select([higher, opposite], [step, x], self.y)
        self.fy = np.select([higher, opposite], [f, fx], self.fy)
        self.gy = np.select([higher, opposite], [g, gx], self.gy)
        self.x, self.fx, self.gx = np.where(higher, x, step), np.where(higher, fx, f), np.where(higher, gx, g)
        return chosen, self.bracketed | higher | opposite

    def _bound(self) -> None:
        """Halve intervals that shrink too slowly, and keep the steps inside their bounds."""
        span, inside = np.abs(self.y - self.x), self.bracketed
        slow = inside & (span >= 0.66 * self.width_before)
        self.step = np.where(slow, self.x + 0.5 * (self.y - self.x), self.step)
        self.width_before = np.where(inside, self.width, self.width_before)
        self.width = np.where(inside, span, self.width)
        ahead = self.step - self.x
        self.low = np.where(inside, np.minimum(self.x, self.y), self.step + 1.1 * ahead)
        self.high = np.where(inside, np.maximum(self.x, self.y), self.step + 4 * ahead)
        self.step = np.clip(self.step, 0, _LARGEST)
        outside = (self.step <= self.low) | (self.step >= self.high)
        narrow = self.high - self.low <= _WIDTH * self.high
        self.step = np.where(inside & (outside | narrow), self.x, self.step)


def _root(theta: Floats, one: Floats, other: Floats) -> Floats:
    """Return the root in the minimizer of a cubic, scaled so that nothing overflows."""
    scale = np.maximum(np.abs(theta), np.maximum(np.abs(one), np.abs(other)))
    inside = (theta / scale) ** 2 - (one / scale) * (other / scale)
    return np.asarray(scale * np.sqrt(np.maximum(inside, 0)))
