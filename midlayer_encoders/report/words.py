"""What the page says in words and large numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

import polars as pl

from midlayer_encoders.frame import Baselines, Curve, Series, Summary
from midlayer_encoders.report.ticks import duration, number, signed

__all__ = ["baseline_words", "confirmed_words", "tiles", "verdict"]


def verdict(found: Summary, metrics: Mapping[str, Sequence[Series]]) -> str:
    """Return the finding in a sentence or two."""
    if not found.tasks:
        layers = {layer for many in metrics.values() for series in many for layer in series.layers}
        return f"{_count(len(metrics), 'metric')} at {_count(len(layers), 'layer')}; no task was scored."
    average = found.average
    if average is None:
        return f"{_count(len(found.tasks), 'task')} scored, none of the layers on all of them."
    on = found.tasks[0].name if len(found.tasks) == 1 else f"average over {len(found.tasks)} tasks"
    if len(average.points) == 1:
        return f"Layer {_of(found, average.best_layer)} scores {number(average.best)} on {on}; no other was scored."
    last = "the last layer" if average.last_layer == found.num_layers else f"layer {average.last_layer}"
    if average.best_layer == average.last_layer:
        return f"No layer scores more than {last}: {number(average.last)} on {on}."
    best = f"Layer {_of(found, average.best_layer)} scores {number(average.best)} on {on}"
    if number(average.gain) == number(0.0):
        return f"{best}, as much as {last}."
    return f"{best}, {number(average.gain)} points more than {last} ({number(average.last)})."


def baseline_words(found: Summary, baselines: Baselines) -> list[str]:
    """Return where each baseline is ahead of every layer, which a reader should know before cutting a model."""
    return [line for name, scores in baselines.items() for line in _one_baseline(found, scores, name)]


def _one_baseline(found: Summary, baselines: Mapping[str, float], name: str) -> list[str]:
    ahead = [task.name for task in found.tasks if 100 * baselines.get(task.name, -math.inf) > task.best]
    if not baselines:
        return []
    if not ahead:
        return [f"{name} is behind the best layer on {_every(len(baselines))}."]
    share = f" ({len(ahead)} of {len(baselines)} tasks)" if len(baselines) > 1 else ""
    return [f"{name} is ahead of every layer on {', '.join(ahead[:6])}{', …' if len(ahead) > 6 else ''}{share}."]


def confirmed_words(frame: pl.DataFrame) -> list[str]:
    """Return mteb's own scores beside those of all layers together, a line for each task that has some.

    Example:
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> pair = ("score", 0.7), ("confirmed", 0.71)
        >>> rows = [("m", "main", 1, 0.5, kind, "STS", "spearman", value) for kind, value in pair]
        >>> confirmed_words(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
        ['STS, confirmed by mteb: layer 1 71.0 (70.0 together).']
    """
    keys = ["dataset", "layer", "value"]
    both = frame.filter(kind="confirmed").select(keys).join(
        frame.filter(kind="score").select(keys), on=["dataset", "layer"], suffix="_together"
    )  # fmt: skip
    lines = []
    for (task,), rows in both.group_by("dataset", maintain_order=True):
        each = (
            f"layer {layer} {number(100 * mteb)} ({number(100 * together)} together)"
            for _, layer, mteb, together in rows.sort("layer").iter_rows()
        )
        lines.append(f"{task}, confirmed by mteb: {', '.join(each)}.")
    return lines


def tiles(
    found: Summary,
    parameters: Mapping[int, int],
    seconds: Mapping[int, float],
    first: Sequence[tuple[str, str, str]] = (),
) -> str:
    """Return the large numbers: what comes ``first``, best layer, gain, and what the best layer saves."""
    average = found.average
    if average is None:
        return ""
    shown = [*first, ("Best layer", _of(found, average.best_layer), f"{number(average.best)} points")]
    if average.best_layer != average.last_layer:
        against = f"{number(average.best)} instead of {number(average.last)}"
        shown.append(("Gain in points", signed(average.gain), against))
        shown += _saving("Parameters", average, parameters, lambda count: f"{count / 1e6:,.1f} M")
        shown += _saving("Time", average, seconds, duration)
    return f'<dl class="tiles">{"".join(_tile(*one) for one in shown)}</dl>'


def _saving(
    what: str, average: Curve, costs: Mapping[int, float], write: Callable[[float], str]
) -> list[tuple[str, str, str]]:
    best, last = costs.get(average.best_layer), costs.get(average.last_layer)
    if best is None or last is None or last <= 0:
        return []
    percent = signed(100 * (best / last - 1), 0)
    return [(what, f"{percent} %", f"{write(best)} instead of {write(last)}")]


def _tile(name: str, value: str, below: str) -> str:
    words = f'<dd class="big">{escape(value)}</dd><dd class="soft">{escape(below)}</dd>'
    return f"<div><dt>{escape(name)}</dt>{words}</div>"


def _of(found: Summary, layer: int) -> str:
    return f"{layer} of {found.num_layers}" if found.num_layers else str(layer)


def _count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _every(count: int) -> str:
    return "the task" if count == 1 else "both tasks" if count == 2 else f"all {count} tasks"
