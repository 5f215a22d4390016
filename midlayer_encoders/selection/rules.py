"""Rules that choose a layer: pure functions from a model's curves to a layer and the reason for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.curves import ByLayer, Curves
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.validation import check_choice

#: The depth of ``fixed-depth``: the best single one over the reference's models (benchmarks/selection/README.md).
DEPTH = 0.8

_PAPER_METRICS = ("dime", "infonce", "dataset_entropy", "prompt_entropy")


@dataclass(frozen=True)
class Choice:
    """The choice of one rule.

    Attributes:
        rule: name of the rule.
        layer: the chosen layer; ``None`` if the rule cannot choose.
        reason: why the rule chooses it, or cannot choose.
    """

    rule: str
    layer: int | None
    reason: str


class CannotChooseError(OptionError):
    """A rule lacks its input; the message names it."""


def choose(curves: Curves, rule: str) -> tuple[int, str]:
    """Return the layer that a rule chooses, and the reason.

    Args:
        curves: of the model.
        rule: one of ``RULES``.

    Raises:
        CannotChooseError: if the rule lacks its input.

    Example:
        >>> choose(Curves("m", "main", 24, {}, {}, {}), "fixed-depth")
        (19, '0.8 of 24 blocks, the depth with the best record over the reference models')
    """
    return RULES[check_choice("rule", rule, RULES)](curves)


def metrics_of(rule: str) -> tuple[str, ...]:
    """Return the metrics that a rule reads.

    Example:
        >>> metrics_of("min-dataset-entropy"), metrics_of("last")
        (('dataset_entropy',), ())
    """
    check_choice("rule", rule, RULES)
    if rule.startswith("min-"):
        return (rule.removeprefix("min-").replace("-", "_"),)
    return {"valley-midpoint": ("prompt_entropy",), "half-match": ("half_match",)}.get(rule, ())


def _last(curves: Curves) -> tuple[int, str]:
    return curves.num_layers, "the whole model"


def _fixed_depth(curves: Curves) -> tuple[int, str]:
    depth = f"{DEPTH} of {curves.num_layers} blocks"
    return resolve_layer(DEPTH, curves.num_layers), f"{depth}, the depth with the best record over the reference models"


def _lowest(curves: Curves, *, name: str) -> tuple[int, str]:
    curve = _metric(curves, name)
    layer = _argmin(curve)
    return layer, f"{name} is lowest there, {curve[layer]:.3g}{_missing_note(curves, curve)}"


def _argmin(curve: Mapping[int, float]) -> int:
    """Return the layer of the lowest value; the lowest layer of equal ones."""
    return min(curve, key=lambda layer: (curve[layer], layer))


def _valley_midpoint(curves: Curves) -> tuple[int, str]:
    curve = _metric(curves, "prompt_entropy")
    valley = _argmin(curve)
    first = curve[min(curve)]
    last = curve[max(curve)]
    # A valley lies between the ends and a tenth below both; anything else is noise.
    if valley in (min(curve), max(curve)) or curve[valley] > 0.9 * min(first, last):
        raise CannotChooseError(
            f"needs a valley of prompt_entropy between the ends, but its lowest is {curve[valley]:.3g} "
            f"at layer {valley} ({first:.3g} at the first, {last:.3g} at the last)"
        )
    reason = f"halfway from the valley of prompt_entropy, layer {valley}, to the last"
    return round((valley + curves.num_layers) / 2), f"{reason}{_missing_note(curves, curve)}"


def _half_match(curves: Curves) -> tuple[int, str]:
    curve = _metric(curves, "half_match")
    layer = max(curve, key=lambda layer: (curve[layer], -layer))
    return layer, f"half match is highest there, {curve[layer]:.2f}{_missing_note(curves, curve)}"


def _few_labels(curves: Curves) -> tuple[int, str]:
    if not curves.score:
        hint = ": no layer was scored on every task" if curves.tasks else "; give `labels`, or the frame of a sweep"
        raise CannotChooseError(f"needs labels, or scores of every layer{hint}")
    if len(set(curves.score.values())) == 1:
        raise CannotChooseError("needs layers that differ, but all have the same score")
    layer = best_layer(curves.score)
    tasks = next(iter(curves.tasks)) if len(curves.tasks) == 1 else f"{len(curves.tasks)} tasks"
    score = f"{100 * curves.score[layer]:.1f}"
    return layer, f"the score on {tasks} is highest there, {score}{_missing_note(curves, curves.score)}"


def _auto(curves: Curves) -> tuple[int, str]:
    if curves.score and len(set(curves.score.values())) > 1:
        layer, reason = _few_labels(curves)
        return layer, f"few-labels: {reason}"
    layer, reason = _fixed_depth(curves)
    return layer, f"fixed-depth: {reason}"


def _metric(curves: Curves, name: str) -> ByLayer:
    """Return a metric's curve, or raise if it does not distinguish layers."""
    if name not in curves.metrics:
        raise CannotChooseError(f"needs {name}, which was not measured")
    curve = curves.metrics[name]
    if len(curve) < 3:
        raise CannotChooseError(f"needs {name} of 3 layers or more, but got {len(curve)}")
    if len(set(curve.values())) == 1:
        raise CannotChooseError(
            f"needs layers that differ, but {name} is {next(iter(curve.values())):.3g} at all of them"
        )
    return curve


def _missing_note(curves: Curves, curve: Mapping[int, float]) -> str:
    count = sum(layer not in curve for layer in range(1, curves.num_layers + 1))  # some metrics skip layer 0
    return f" ({count} of {curves.num_layers} layers were not measured)" if count else ""


def best_layer(curve: ByLayer) -> int:
    """Return the layer with the highest mean of its neighbors and itself, counted twice, which smooths outliers.

    Example:
        >>> best_layer({0: 0.1, 1: 0.5, 2: 0.1, 3: 0.4, 4: 0.45, 5: 0.4})
        4
    """
    layers = list(curve)
    smooth = {}
    for position, layer in enumerate(layers):
        window = [layer, *layers[max(0, position - 1) : position + 2]]
        smooth[layer] = sum(curve[neighbor] for neighbor in window) / len(window)
    return max(smooth, key=lambda layer: (smooth[layer], -layer))


#: Every rule by name.
RULES: Mapping[str, Callable[[Curves], tuple[int, str]]] = {
    "last": _last,
    "fixed-depth": _fixed_depth,
    **{f"min-{name.replace('_', '-')}": partial(_lowest, name=name) for name in _PAPER_METRICS},
    "valley-midpoint": _valley_midpoint,
    "half-match": _half_match,
    "few-labels": _few_labels,
    "auto": _auto,
}
