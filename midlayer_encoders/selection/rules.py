"""The rules: each a pure function from a model's curves to a layer, with the reason in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import ByLayer, Curves
from midlayer_encoders.validation import check_choice

__all__ = [
    "DEPTH",
    "RULES",
    "CannotChooseError",
    "Choice",
    "best_layer",
    "check_rule",
    "choose",
    "made_for_texts",
    "metrics_of",
]

DEPTH = 0.8
"""The depth of ``fixed-depth``: the best single one over the reference's models (benchmarks/selection/README.md)."""

_MORE = 0.15
"""How much more half match a last layer that was made for comparing texts has than any layer up to ``DEPTH``.

Untrained models have at most 0.09 more, 0.14 with three blocks, MiniLM at least 0.28 (benchmarks/selection/README.md).
"""

_PAPER = ("dime", "infonce", "dataset_entropy", "prompt_entropy")


@dataclass(frozen=True)
class Choice:
    """What one rule says.

    Attributes:
        rule: its name.
        layer: what it chooses; ``None`` where it cannot.
        reason: why, or why not, in words.
    """

    rule: str
    layer: int | None
    reason: str


class CannotChooseError(OptionError):
    """A rule that has not what it needs; the message says what that is."""


def choose(found: Curves, rule: str) -> tuple[int, str]:
    """Return the layer that a rule chooses, and why.

    Args:
        found: the model's curves.
        rule: one of ``RULES``, or ``min-`` and the paper's metrics joined by ``+``, which are ranked together.

    Raises:
        CannotChooseError: saying what the rule lacks.

    Example:
        >>> choose(Curves("m", "main", 24, {}, {}, {}), "fixed-depth")
        (19, '0.8 of 24 blocks, the depth with the best record over the reference models')
    """
    check_rule(rule)
    return RULES[rule](found) if rule in RULES else _lowest_ranks(found, names=_ranked(rule))


def check_rule(rule: str, *, argument: str = "rule") -> None:
    """Raise an :class:`OptionError` unless there is such a rule."""
    if (
        not isinstance(rule, str)
        or not rule.startswith("min-")
        or "+" not in rule
        or not set(_ranked(rule)) <= set(_PAPER)
    ):
        check_choice(argument, rule, RULES)


def _ranked(rule: str) -> tuple[str, ...]:
    """Return the metrics in the name of a rule that takes the lowest."""
    return tuple(part.replace("-", "_") for part in rule.removeprefix("min-").split("+"))


def metrics_of(rule: str) -> tuple[str, ...]:
    """Return the metrics that a rule reads.

    Example:
        >>> metrics_of("min-dime+dataset-entropy"), metrics_of("last")
        (('dime', 'dataset_entropy'), ())
    """
    check_rule(rule)
    known = {"valley-midpoint": ("prompt_entropy",), "half-match": ("half_match",), "auto": ("half_match",)}
    return _ranked(rule) if rule.startswith("min-") else known.get(rule, ())


def _last(found: Curves) -> tuple[int, str]:
    return found.num_layers, "the model as it comes"


def _fixed_depth(found: Curves) -> tuple[int, str]:
    return _depth_layer(
        found
    ), f"{DEPTH} of {found.num_layers} blocks, the depth with the best record over the reference models"


def _depth_layer(found: Curves) -> int:
    return round(DEPTH * found.num_layers)


def _lowest(found: Curves, *, name: str) -> tuple[int, str]:
    curve = _metric(found, name)
    layer = min(curve, key=lambda one: (curve[one], one))
    return layer, f"{name} is lowest there, {curve[layer]:.3g}{_missing(found, curve)}"


def _lowest_ranks(found: Curves, *, names: tuple[str, ...]) -> tuple[int, str]:
    every = [_metric(found, name) for name in names]
    shared = [layer for layer in every[0] if all(layer in curve for curve in every)]
    if len(shared) < 3:
        raise CannotChooseError(f"needs layers on which {' and '.join(names)} were all measured, but got {len(shared)}")
    ranks = dict.fromkeys(shared, 0)
    for curve in every:
        for rank, layer in enumerate(sorted(shared, key=lambda one: (curve[one], one))):
            ranks[layer] += rank
    layer = min(shared, key=lambda one: (ranks[one], one))
    words = " and ".join(names)
    return layer, f"the ranks of {words} are lowest there on average{_missing(found, dict.fromkeys(shared, 0.0))}"


def _valley_midpoint(found: Curves) -> tuple[int, str]:
    curve = _metric(found, "prompt_entropy")
    valley = min(curve, key=lambda one: (curve[one], one))
    first, last = curve[min(curve)], curve[max(curve)]
    # An end is no valley, and neither is a dip in noise: it must lie a tenth below both ends.
    if valley in (min(curve), max(curve)) or curve[valley] > 0.9 * min(first, last):
        raise CannotChooseError(
            f"needs a valley of prompt_entropy between the ends, but its lowest is {curve[valley]:.3g} "
            f"at layer {valley} ({first:.3g} at the first, {last:.3g} at the last)"
        )
    layer = round((valley + found.num_layers) / 2)
    return layer, f"halfway from the valley of prompt_entropy, layer {valley}, to the last{_missing(found, curve)}"


def _half_match(found: Curves) -> tuple[int, str]:
    curve = _metric(found, "half_match")
    layer = max(curve, key=lambda one: (curve[one], -one))
    return layer, f"the halves of a text find each other best there, {curve[layer]:.2f}{_missing(found, curve)}"


def _few_labels(found: Curves) -> tuple[int, str]:
    if not found.score:
        raise CannotChooseError(
            "needs labels, or scores of every layer"
            + (": no layer was scored on every task" if found.tasks else "; give `labels`, or the frame of a sweep")
        )
    if len(set(found.score.values())) == 1:
        raise CannotChooseError("needs layers that differ, but all have the same score")
    layer = best_layer(found.score)
    words = next(iter(found.tasks)) if len(found.tasks) == 1 else f"{len(found.tasks)} tasks"
    return layer, f"the score on {words} is highest there, {100 * found.score[layer]:.1f}{_missing(found, found.score)}"


def made_for_texts(found: Curves) -> bool:
    """Return whether the last layer of a model was made for comparing texts, as far as half match tells.

    It must be highest there, and well above the layers that would be taken otherwise: it must close at least half of
    what they lack. A high value alone says nothing: in an untrained causal model the second half of a text has seen the
    first, and the halves find each other from the first block on.

    Example:
        >>> made_for_texts(Curves("m", "main", 3, {"half_match": {0: 0.2, 1: 0.3, 2: 0.4, 3: 0.9}}, {}, {}))
        True
        >>> made_for_texts(Curves("m", "main", 3, {"half_match": {0: 0.2, 1: 0.8, 2: 0.8, 3: 0.9}}, {}, {}))
        False
    """
    curve = found.metrics.get("half_match", {})
    last = curve.get(found.num_layers)
    before = {layer: value for layer, value in curve.items() if layer < found.num_layers}
    others = [value for layer, value in before.items() if layer <= _depth_layer(found)]
    if last is None or not others or last <= max(before.values()):
        return False
    return last - max(others) >= _MORE and 1 - last <= (1 - max(others)) / 2


def _auto(found: Curves) -> tuple[int, str]:
    if found.score and len(set(found.score.values())) > 1:
        layer, reason = _few_labels(found)
        return layer, f"few-labels: {reason}"
    if "half_match" in found.metrics and len(set(found.metrics["half_match"].values())) > 1:
        layer, reason = _half_match(found)
        if made_for_texts(found):
            return layer, f"half-match: {reason}, so the last layer seems made for comparing texts"
        fixed, words = _fixed_depth(found)
        return fixed, f"fixed-depth: {words}; {reason.replace('there', f'at layer {layer}')}, no case for the last"
    layer, reason = _fixed_depth(found)
    return layer, f"fixed-depth: {reason}; half match was not measured, so it looks no further"


def _metric(found: Curves, name: str) -> ByLayer:
    """Return a metric's curve, or raise why it does not tell layers apart."""
    if name not in found.metrics:
        raise CannotChooseError(f"needs {name}, which was not measured")
    curve = found.metrics[name]
    if len(curve) < 3:
        raise CannotChooseError(f"needs {name} of 3 layers or more, but got {len(curve)}")
    if len(set(curve.values())) == 1:
        raise CannotChooseError(
            f"needs layers that differ, but {name} is {next(iter(curve.values())):.3g} at all of them"
        )
    return curve


def _missing(found: Curves, curve: ByLayer) -> str:
    count = sum(layer not in curve for layer in range(1, found.num_layers + 1))  # a first layer may have no value
    return f" ({count} of {found.num_layers} layers were not measured)" if count else ""


def best_layer(curve: ByLayer) -> int:
    """Return the layer with the highest mean of itself, twice, and its neighbors: one lucky layer does not win.

    Example:
        >>> best_layer({0: 0.1, 1: 0.5, 2: 0.1, 3: 0.4, 4: 0.45, 5: 0.4})
        4
    """
    layers = list(curve)
    smooth = {}
    for place, layer in enumerate(layers):
        near = [curve[layer], *(curve[one] for one in layers[max(0, place - 1) : place + 2])]
        smooth[layer] = sum(near) / len(near)
    return max(smooth, key=lambda one: (smooth[one], -one))


RULES: Mapping[str, Callable[[Curves], tuple[int, str]]] = {
    "last": _last,
    "fixed-depth": _fixed_depth,
    **{f"min-{name.replace('_', '-')}": partial(_lowest, name=name) for name in _PAPER},
    "min-dime+dataset-entropy": partial(_lowest_ranks, names=("dime", "dataset_entropy")),
    "min-dime+infonce+dataset-entropy+prompt-entropy": partial(_lowest_ranks, names=_PAPER),
    "valley-midpoint": _valley_midpoint,
    "half-match": _half_match,
    "few-labels": _few_labels,
    "auto": _auto,
}
"""Every rule by name."""
