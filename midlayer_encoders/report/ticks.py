"""Where the ticks of an axis go, and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, TypeAlias

__all__ = [
    "Cost",
    "amount",
    "cost_words",
    "duration",
    "layer_ticks",
    "number",
    "padded",
    "signed",
    "significant",
    "value_ticks",
]

Cost: TypeAlias = Literal["parameters", "milliseconds", "bytes"]
"""What an encoder costs."""


_STEPS = (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 2.5, 5.0, 10.0)
_LAYER_STEPS = (1, 2, 4, 5, 6, 8, 10, 12, 16, 20, 25, 40, 50, 100, 200)


def padded(values: Iterable[float], pad: float = 0.08) -> tuple[float, float]:
    """Return a range that holds the values with a little room, never of width 0.

    Example:
        >>> padded([10.0, 20.0], pad=0.1), padded([5.0])
        ((9.0, 21.0), (4.75, 5.25))
    """
    held = list(values)
    low, high = min(held), max(held)
    # Rounding noise of a constant must not become a curve.
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.05 * abs(high) or 1.0
        return low - room, high + room
    return low - pad * (high - low), high + pad * (high - low)


def value_ticks(low: float, high: float, most: int) -> list[tuple[float, str]]:
    """Return round values inside a range, about ``most`` and at least two, each with its text.

    Example:
        >>> value_ticks(43.1, 58.7, 4), value_ticks(-0.0003, 25_000, 2)
        ([(45.0, '45'), (50.0, '50'), (55.0, '55')], [(0.0, '0'), (20000.0, '20k')])
    """
    rough = (high - low) / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [step * power for step in _STEPS]
    place = next(place for place, step in enumerate(steps) if step >= rough * (1 - 1e-9))
    multiples = _multiples(low, high, steps[place])
    while len(multiples) < 2:  # the range is wide enough for the finest, a tenth of the power below it
        place -= 1
        multiples = _multiples(low, high, steps[place])
    return [(k * steps[place], _tick(k * steps[place], steps[place])) for k in multiples]


def _multiples(low: float, high: float, step: float) -> range:
    return range(math.ceil(low / step), math.floor(high / step) + 1)


def _tick(value: float, step: float) -> str:
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= max(unit, 1e4) and step >= unit / 1e3:
            return _minus(f"{value / unit:.6g}") + letter
    if value and step < 1e-4:
        return _minus(f"{value:.3g}").replace("e−0", "e−")
    # One digit more where the step is a quarter of a power of ten.
    digits = max(0, -math.floor(math.log10(step)))
    digits += not math.isclose(round(step, digits), step, rel_tol=1e-6)
    return _minus(f"{value:.{digits}f}") if value else "0"


def layer_ticks(num_layers: int, most: int) -> list[int]:
    """Return whole layers from 0 to ``num_layers``, evenly spaced, at most ``most`` and the last when there is room.

    Example:
        >>> layer_ticks(30, 7), layer_ticks(24, 4), layer_ticks(2, 8)
        ([0, 5, 10, 15, 20, 25, 30], [0, 8, 16, 24], [0, 1, 2])
    """
    fitting = [step for step in _LAYER_STEPS if num_layers // step + 1 <= most] or [max(num_layers, 1)]
    step = fitting[0]
    # A step that lands on the last layer is worth being a little coarser.
    step = next((one for one in fitting if num_layers % one == 0 and one <= 2 * step), step)
    return list(range(0, num_layers + 1, step))


def number(value: float | None, digits: int = 1) -> str:
    """Return a number for a reader; a dash where there is none.

    Example:
        >>> number(61.24), number(-0.5), number(None), number(float("nan"))
        ('61.2', '−0.5', '–', 'NaN')
    """
    if value is None:
        return "–"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else _minus(f"{value}").replace("inf", "∞")
    return _minus(f"{value:.{digits}f}")


def significant(value: float, digits: int = 4, *, sign: bool = False, zeros: bool = False) -> str:
    """Return a number of unknown size for a reader; ``zeros`` keeps those at the end, for columns.

    Example:
        >>> significant(-2 / 3), significant(0.5, 3, sign=True), significant(1.5, zeros=True), significant(1e5)
        ('−0.6667', '+0.5', '1.500', '1e+05')
    """
    if not math.isfinite(value):
        return number(value)
    return _minus(f"{value:{'+' if sign else ''}{'#' if zeros and value else ''}.{digits}g}").removesuffix(".")


def amount(value: float) -> str:
    """Return a positive amount of any size for a reader.

    Example:
        >>> amount(22_713_216), amount(1.24e9), amount(30_000), amount(1536), amount(0.01234)
        ('22.7M', '1.24B', '30k', '1536', '0.0123')
    """
    for least, unit, letter in ((1e9, 1e9, "B"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / unit:.3g}{letter}"
    return f"{value:.{4 if value >= 1e3 else 3}g}"


def cost_words(costs: Mapping[Cost, float]) -> str:
    """Return what an encoder costs, as far as it is known.

    Example:
        >>> cost_words({"parameters": 22_713_216, "milliseconds": 1.25})
        '22.7M parameters, 1.25 ms per text'
    """
    words = {"parameters": "parameters", "milliseconds": "ms per text", "bytes": "bytes per vector"}
    return ", ".join(f"{amount(value)} {words[cost]}" for cost, value in costs.items())


def duration(seconds: float) -> str:
    """Return a time for a reader.

    Example:
        >>> duration(0.01234), duration(3.0)
        ('12.3 ms', '3 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def signed(value: float, digits: int = 1) -> str:
    """Return a difference with its sign.

    Example:
        >>> signed(4.26), signed(-0.31), signed(0.0)
        ('+4.3', '−0.3', '0.0')
    """
    text = _minus(f"{value:+.{digits}f}")
    return text[1:] if float(f"{value:.{digits}f}") == 0 else text


def _minus(text: str) -> str:
    return text.replace("-", "−")
