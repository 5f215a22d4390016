"""The figures of the training record, from its frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from benchmarks.panels import Axis, Dots, Level, Line, Panel, Part, Rule, amount_axis, draw, layer_axis, value_axis
from benchmarks.pretraining.entropy_map import headline
from benchmarks.pretraining.findings import (
    EVENTS,
    RAW,
    event,
    mean_by_layer,
    moved,
    regrets,
    settled_at,
    valley,
    winners,
)
from benchmarks.pretraining.record import TOKENS, TUNED, Run, known, read_run, seeds
from midlayer_encoders.frame.steps import History

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figures"]

LAST = 12
FROM = 16  # the first step on a logarithmic axis: 1M tokens
STAGES = (128, 256, 512, 1024, 2000)


def figures() -> dict[str, Figure]:
    """Return every figure by the name of its file; those of runs that the record lacks are left out."""
    made = {
        "valley": headline(),
        "formation": formation(),
        "ingredients": beside("no-bos", "half-bos", "gpt-neox", "no-decay", "low-rate"),
        "objectives": objectives(),
        "sink": beside("one-added", "own-key", "first-hidden"),
        "first_token": first_token(),
        "scores": scores(),
        "overtaking": overtaking(),
        "layers": layers_move(),
        "rules": rules(),
        "losses": losses(),
    }
    if known("long"):
        made |= {"valley_long": headline(("long",)), "long": long_run()}
    if known(*TUNED):
        made["finetuning"] = finetuning()
    return made


def _tokens_axis(runs: Sequence[Run]) -> Axis:
    return amount_axis("tokens seen", [FROM * TOKENS, max(run.steps for run in runs) * TOKENS])


def _over_tokens(one: History, values: Sequence[float], label: str = "", style: int = 0) -> Line:
    kept = [(step * TOKENS, value) for step, value in zip(one.steps, values, strict=True) if step >= FROM]
    x, y = zip(*kept, strict=True)
    return Line(x, tuple(map(float, y)), label, style)


def _over_layers(values: Sequence[float], label: str = "", style: int = 0) -> Line:
    return Line(tuple(range(len(values))), tuple(map(float, values)), label, style)


def formation() -> Figure:
    """Return what forms, at its layer, over the tokens: a curve for each seed."""
    runs, panels = seeds(), []
    for words, read in EVENTS.items():
        lines = []
        for number, run in enumerate(runs):
            one, found = read(run), event(read(run))
            lines.append(_over_tokens(one, one.values[:, one.layers.index(found.layer)], f"seed {number}", number))
        panels.append(Panel(words, _tokens_axis(runs), value_axis(lines), tuple(lines)))
    return draw(panels, columns=2, size=(4.2, 2.4))


def beside(*names: str) -> Figure:
    """Return runs beside the base's seeds: heads that attend to the first token, its share, and the entropy at the end."""
    runs = [(run, 0) for run in seeds()] + [(run, style) for style, run in enumerate(known(*names), start=1)]
    labels = ["base: each seed" if place == 0 else run.name if style else "" for place, (run, style) in enumerate(runs)]

    def over(metric: str, of_layers: Callable[..., NDArray[np.float64]]) -> tuple[Line, ...]:
        return tuple(
            _over_tokens(one := run.metric(metric), of_layers(one.values, axis=1), label, style)
            for (run, style), label in zip(runs, labels, strict=True)
        )

    across = _tokens_axis(seeds())
    rates, shares = over("attention_sink_rate", np.nanmean), over("first_token_share", np.nanmax)
    by_layer = tuple(
        _over_layers(run.metric(RAW).values[-1], label, style) for (run, style), label in zip(runs, labels, strict=True)
    )
    panels = (
        Panel("sink rate, mean of all blocks", across, value_axis(rates), rates),
        Panel("first token's share, highest layer", across, Axis("", 0, 1), shares),
        Panel("prompt entropy of raw states at the end, nats", layer_axis(LAST), value_axis(by_layer), by_layer),
    )
    return draw(panels, columns=3, size=(3.7, 2.9))


def objectives() -> Figure:
    """Return the entropy by layer at some steps: causal, masked, state-space, each with and without the first token."""
    runs = known("base", "masked", "mamba2")
    words = {"base": "causal", "masked": "masked", "mamba2": "state-space (Mamba2)"}
    every = [run.metric(RAW, texts) for run in runs for texts in ("probe", "probe-later")]
    up = value_axis([_over_layers(one.values[one.steps.index(step)]) for one in every for step in STAGES])
    panels = []
    for texts, note in (("probe", ""), ("probe-later", ", first token left out")):
        for run in runs:
            one = run.metric(RAW, texts)
            lines = tuple(
                _over_layers(one.values[one.steps.index(step)], f"{step * TOKENS / 1e6:.0f}M tokens", number)
                for number, step in enumerate(STAGES)
            )
            panels.append(Panel(words[run.name] + note, layer_axis(LAST), up, lines, ordered=len(STAGES)))
    return draw(panels, columns=len(runs), size=(3.5, 2.5))


def first_token() -> Figure:
    """Return what is left of the valley without the first token, after the norm, and as the paper measures."""
    runs = known(
        "base",
        "base-seed1",
        "base-seed2",
        "long",
        "no-bos",
        "low-rate",
        "one-added",
        "own-key",
        "first-hidden",
        "masked",
    )
    ways = {
        "raw states": (RAW, "probe"),
        "raw, without the first token": (RAW, "probe-later"),
        "after the final norm": (RAW, "probe-normed"),
        "centered, unit length (the paper's)": ("prompt_entropy", "probe"),
    }
    curves = {
        run.name: [
            _over_layers(run.metric(*which).values[-1], name, number)
            for number, (name, which) in enumerate(ways.items())
        ]
        for run in runs
    }
    up = value_axis([line for lines in curves.values() for line in lines])
    panels = tuple(Panel(name, layer_axis(LAST), up, tuple(lines)) for name, lines in curves.items())
    return draw(panels, columns=5, size=(2.5, 2.3))


def scores() -> Figure:
    """Return the mean score by layer at some stages; a ring at the best."""
    runs = known("base", "no-bos", "own-key", "first-hidden")
    drawn: dict[str, list[Part]] = {}
    for run in runs:
        one, parts = run.scores(), drawn.setdefault(run.name, [])
        for number, step in enumerate(STAGES):
            if step not in one.steps:  # of a brief run
                continue
            row = one.values[one.steps.index(step)].tolist()
            parts.append(_over_layers(row, f"{step * TOKENS / 1e6:.0f}M tokens", number))
            best = max(range(len(row)), key=row.__getitem__)
            parts.append(Dots((best,), (row[best],), "ring", style=number))
    up = value_axis([part for parts in drawn.values() for part in parts])
    panels = tuple(
        Panel(f"{name}: mean of six tasks", layer_axis(LAST), up, tuple(parts), ordered=len(STAGES))
        for name, parts in drawn.items()
    )
    return draw(panels, columns=2, size=(4.2, 2.7))


def overtaking() -> Figure:
    """Return for the seeds of the base how far the best middle layer lies above the embeddings and the last layer."""
    runs = seeds()
    panels = []
    for words, other in (("the embeddings", "first"), ("the last layer", "last")):
        lines = []
        for number, run in enumerate(runs):
            found = [one for one in winners(run) if one.step]
            x = tuple(one.step * TOKENS for one in found)
            lines.append(Line(x, tuple(one.best - getattr(one, other) for one in found), f"seed {number}", number))
        parts: tuple[Part, ...] = (Level(0.0, ""), *lines) if other == "first" else tuple(lines)
        across = amount_axis("tokens seen", x)
        panels.append(Panel(f"best middle layer, points over {words}", across, value_axis(lines), parts))
    return draw(panels, columns=2, size=(4.2, 2.5))


def layers_move() -> Figure:
    """Return when layers settle and how far they move, mean over the seeds of the base."""
    names = ("prompt_entropy", RAW, "dataset_entropy", "curvature", "infonce")
    settling, moving = [], []
    for number, name in enumerate(names):
        steps = mean_by_layer([settled_at(run, name) for run in seeds()])
        settling.append(_over_layers([step * TOKENS / 1e6 for step in steps.values()], name, number))
        ways = mean_by_layer([moved(run, name, since=FROM) for run in seeds()])
        moving.append(_over_layers([100 * way for way in ways.values()], name, number))
    panels = (
        Panel("settled from, M tokens", layer_axis(LAST), value_axis(settling), tuple(settling)),
        Panel("way from 1M tokens on, % of the range", layer_axis(LAST), value_axis(moving), tuple(moving)),
    )
    return draw(panels, columns=2, size=(4.4, 2.8))


def rules() -> Figure:
    """Return what each rule loses to the best layer at each stage, mean over the seeds of the base."""
    shown = ("last", "fixed-depth", "min-infonce", "min-prompt-entropy", "half-match", "valley-midpoint (raw)")
    every = [regrets(run) for run in seeds()]
    lines = []
    for number, rule in enumerate(shown):
        steps = [step for step in every[0][rule] if step]
        points = tuple(float(np.mean([one[rule][step][1] for one in every])) for step in steps)
        lines.append(Line(tuple(step * TOKENS for step in steps), points, rule, number))
    panel = Panel(
        "points below the best layer", amount_axis("tokens seen", lines[0].x), value_axis(lines), tuple(lines)
    )
    return draw([panel], size=(6.4, 3.0))


def losses() -> Figure:
    """Return the training loss, a mean of 16 steps, and the held-out loss."""
    parts: list[Part] = []
    for number, run in enumerate(known("base", "no-bos", "gpt-neox", "masked", "mamba2")):
        parts.append(_loss(run, number))
        held = {int(step) * TOKENS: loss for step, loss in run.told["held_out"].items() if int(step)}
        parts.append(Dots(tuple(held), tuple(held.values()), "ring", style=number))
    panel = Panel("loss, nats a token (points: held out)", _tokens_axis(seeds()), value_axis(parts), tuple(parts))
    return draw([panel], size=(6.4, 3.2))


def _loss(run: Run, style: int = 0) -> Line:
    smooth = pl.Series(run.told["losses"]).rolling_mean(16, min_samples=1).to_list()[FROM - 1 :]
    return Line(tuple((FROM + place) * TOKENS for place in range(len(smooth))), tuple(smooth), run.name, style)


def long_run() -> Figure:
    """Return the long run beside the base's first seed: its loss, whole and where a new command began, and how it goes on."""
    run, base = read_run("long"), read_run("base")
    across = _tokens_axis([run])

    def over(title: str, lines: Sequence[Line], up: Axis | None = None, *rest: Part) -> Panel:
        return Panel(title, across, up or value_axis(lines), (*rest, *lines))

    def both(read: Callable[[Run], History], made: Callable[[NDArray[np.float64]], float]) -> list[Line]:
        every = [(one, read(one), style) for style, one in enumerate((run, base))]
        return [_over_tokens(one, [made(row) for row in one.values], of.name, style) for of, one, style in every]

    shares = both(lambda one: one.metric("first_token_share"), np.nanmax)
    rates = both(lambda one: one.metric("attention_sink_rate"), np.nanmean)
    depths = both(lambda one: one.metric(RAW), lambda row: valley(row).depth)
    found = winners(run)
    seen = tuple(one.step * TOKENS for one in found)
    won = [
        Line(seen, tuple(one.best - getattr(one, other) for one in found), f"over {words}", style)
        for style, (words, other) in enumerate((("the embeddings", "first"), ("the last layer", "last")), start=2)
    ]
    panels = (
        over("loss, nats a token", [_loss(run), _loss(base, 1)]),
        *_seam(run),
        over("first token's share, highest layer", shares, Axis("", 0, 1)),
        over("sink rate, mean of all blocks", rates),
        over("depth of the valley, nats", depths),
        over("long: best middle layer, points", won, None, Level(0.0, "")),
    )
    return draw(panels, columns=3, size=(3.6, 2.5))


def _seam(run: Run, steps: int = 100) -> list[Panel]:
    """Return the loss of each step before and after the first at which a run was paused, nothing where it was not."""
    paused = [one["to"] for one in run.told["sessions"][:-1]]
    if not paused:
        return []
    inside = range(max(0, paused[0] - steps), min(paused[0] + steps, run.steps))
    line = Line(tuple(step + 1 for step in inside), tuple(run.told["losses"][step] for step in inside))
    ticks = tuple((tick, f"{tick:,}") for tick in (inside[0] + 1, paused[0], inside[-1] + 1))
    across = Axis("step", inside[0] + 1, inside[-1] + 1, ticks)
    return [Panel("loss of each step around the pause", across, value_axis([line]), (Rule(paused[0] + 0.5), line))]


def finetuning() -> Figure:
    """Return the long run before and after each fine-tuning: five metrics and the mean score, by layer."""
    titles = {
        RAW: "prompt entropy of raw states, nats",
        "prompt_entropy": "prompt entropy, the paper's, nats",
        "dataset_entropy": "dataset entropy, nats",
        "infonce": "InfoNCE, nats (lower: more invariant)",
        "anisotropy": "anisotropy",
        "score": "mean of six tasks",
    }
    runs, panels = known(*TUNED), []
    for name, title in titles.items():
        every = [run.scores() if name == "score" else run.metric(name) for run in runs]
        after = (
            _over_layers(one.values[-1], run.told["tuning"], k)
            for k, (run, one) in enumerate(zip(runs, every, strict=True))
        )
        lines = (_over_layers(every[0].values[0], "before", 4), *after)
        panels.append(Panel(title, layer_axis(LAST), value_axis(lines), lines))
    return draw(panels, columns=3, size=(3.5, 2.5))
