"""The tables of the training record, from its frames.

python -m benchmarks.pretraining.tables        # writes them into benchmarks/results/training.md
python -m benchmarks.pretraining.tables OUT    # prints the tables of runs that run.py wrote into a folder
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from benchmarks.intervals import mean_cell, mean_interval
from benchmarks.pages import table, write_part
from benchmarks.pretraining import record
from benchmarks.pretraining.findings import (
    EVENTS,
    RAW,
    THIRDS,
    event,
    event_layer,
    gained,
    leads,
    lowering,
    moved,
    regrets,
    settled_at,
    thirds,
    valley,
    winners,
)
from benchmarks.pretraining.record import TOKENS, TUNED, Run, known, seeds
from midlayer_encoders.frame.steps import History
from midlayer_encoders.metrics import prompt_entropy

__all__ = ["RUNS", "tables"]

PAGE = Path(__file__).parents[2] / "benchmarks" / "results" / "training.md"

RUNS = {
    "no-bos": "no [BOS]",
    "half-bos": "[BOS] before half of the sequences",
    "gpt-neox": "GPTNeoX blocks",
    "low-rate": "peak rate 5e-4",
    "no-decay": "no weight decay",
    "one-added": "1 added to the softmax denominator",
    "own-key": "a learned key without a value",
    "first-hidden": "first token hidden from later ones",
    "masked": "masked objective, bidirectional",
    "mamba2": "Mamba2 blocks",
    "long": "94M tokens of other text, a longer schedule",
}
"""The runs beside the base, and what is different in each."""
RULE_STEPS = (512, 1024, 2000)
SETTLING = ("prompt_entropy", RAW, "dataset_entropy", "curvature", "infonce", "dime", "effective_rank", "cka")


def tables() -> dict[str, str]:
    """Return every table by the name of its place in the page; that of runs that the record lacks is left out."""
    made = {
        "runs": runs(),
        "formation": formation(),
        "variants": variants(),
        "kinds": kinds(),
        "needed": needed(),
        "stages": stages(),
        "middle": middle(),
        "settling": settling(),
        "rules": rules(),
    }
    return made | ({"finetuning": finetuning()} if known(*TUNED) else {})


def _spread(values: Sequence[float], digits: int) -> str:
    """Return the mean, and the lowest and the highest where there are several."""
    # Adding zero to a rounded value takes the sign from a zero.
    mean, low, high = (
        f"{round(value, digits) + 0.0:.{digits}f}" for value in (fmean(values), min(values), max(values))
    )
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def _millions(values: Sequence[float]) -> str:
    if not all(map(math.isfinite, values)):
        return "not reached"
    mean, *rest = _spread([value / 1e6 for value in values], 0).split(" ", 1)
    return " ".join([f"{mean}M", *rest])


def _layers(found: Sequence[int]) -> str:
    *some, last = map(str, sorted(set(found)))
    return f"{', '.join(some)} or {last}" if some else last


def _groups() -> list[tuple[str, str, list[Run]]]:
    """Return the runs of each row: the base with all its seeds, then the others."""
    base = ("base", f"{len(seeds())} seeds", seeds())
    return [base, *((run.name, RUNS[run.name], [run]) for run in known(*RUNS))]


def runs() -> str:
    """Return what was trained."""
    rows = []
    for name, differs, some in _groups():
        told = some[0].told
        ends = [fmean(run.told["losses"][-20:]) for run in some]
        rows.append([
            name, differs, f"{told['block_parameters'] / 1e6:.1f}M", f"{told['tokens'] / 1e6:.0f}M", _spread(ends, 3),
            _spread([run.held_out for run in some], 3),
        ])  # fmt: skip
    return table(["run", "difference", "block parameters", "tokens", "final loss", "held-out loss"], rows)


def formation() -> str:
    """Return when each thing forms in the base, over its seeds."""
    rows = []
    for words, read in EVENTS.items():
        found = [event(read(run)) for run in seeds()]
        digits = 0 if found[0].final > 10 else 2
        times = [[getattr(one, name) for one in found] for name in ("tenth", "half", "nine_tenths")]
        rows.append([
            words, _layers([one.layer for one in found]), _spread([one.final for one in found], digits), *map(_millions, times)
        ])  # fmt: skip
    return table(["quantity", "layer", "final value", "10 % at", "50 % at", "90 % at"], rows)


def _highest(every: Sequence[History], digits: int = 2) -> str:
    if not every:
        return "–"
    values = [float(np.nanmax(one.values[-1])) for one in every]
    nothing = not any(round(value, digits) for value in values)
    return _spread(values, digits) + ("" if nothing else f" at {_layers([event_layer(one) for one in every])}")


def _valley(some: Sequence[Run], name: str, texts: str = "probe") -> str:
    found = [valley(run.metric(name, texts).values[-1]) for run in some]
    if max(one.depth for one in found) <= 0:
        return "none"
    return f"{_spread([one.depth for one in found], 2)} at {_layers([one.layer for one in found])}"


def variants() -> str:
    """Return what each run has at its end."""
    rows = []
    for name, differs, some in _groups():
        attending = [run.metric("attention_sink_rate") for run in some if run.told["variant"]["blocks"] != "mamba2"]
        rows.append([
            f"{name}: {differs}", _highest([run.metric("first_token_share") for run in some]), _highest(attending),
            _spread([float(np.nanmean(one.values[-1])) for one in attending], 2) if attending else "–",
            _spread([float(np.nanmax(run.metric("largest_state").values[-1])) for run in some], 0),
            _highest([lowering(run) for run in some]), _valley(some, RAW), _valley(some, RAW, "probe-later"),
        ])  # fmt: skip
    head = [
        "run",
        "first token's share",
        "sink rate",
        "sink rate, all heads",
        "largest state",
        "drop in entropy, nats",
        "valley, nats",
        "valley without first token",
    ]
    return table(head, rows)


def kinds() -> str:
    """Return the valley in each way of reading it."""
    ways: dict[str, tuple[str, str]] = {
        "raw": (RAW, "probe"),
        "raw, no first token": (RAW, "probe-later"),
        "normed": (RAW, "probe-normed"),
        "normed, no first token": (RAW, "probe-normed-later"),
        "paper's metric": ("prompt_entropy", "probe"),
        "paper's metric, no first token": ("prompt_entropy", "probe-later"),
    }
    rows = [[name, *(_valley(some, *which) for which in ways.values())] for name, _, some in _groups()]
    return table(["run", *ways], rows)


def needed(shares: Sequence[float] = (0.01, 0.5, 0.7, 0.9, 0.95, 0.98, 0.99, 0.995), tokens: int = 128) -> str:
    """Return both entropies of made-up tokens, whose first one is as long as each share asks."""
    states = torch.randn(16, tokens, 512, generator=torch.Generator().manual_seed(0))
    others = states[:, 1:].square().sum(dim=(1, 2))
    rows: list[list[str]] = [["raw"], ["paper's metric"]]
    for share in shares:
        length = (share / (1 - share) * others).sqrt()
        made = states.clone()
        made[:, 0] *= (length / states[:, 0].norm(dim=1))[:, None]
        rows[0].append(f"{float(prompt_entropy(made, center=False, unit=False).mean()):.2f}")
        rows[1].append(f"{float(prompt_entropy(made).mean()):.2f}")
    return table(["first token's share", *(f"{share:g}" for share in shares)], rows)


def stages() -> str:
    """Return the base's mean scores at each stage, over its seeds, plain and asked for one word."""
    every = [winners(run) for run in seeds()]
    asked = [winners(run, "one-word") for run in seeds()]
    rows = []
    for place, first in enumerate(every[0]):
        found, words = [one[place] for one in every], [one[place] for one in asked]
        rows.append([
            f"{first.step * TOKENS / 1e6:.0f}M", _spread([one.first for one in found], 1),
            f"{_spread([one.best for one in found], 1)} at {_layers([one.layer for one in found])}",
            _spread([one.last for one in found], 1), _spread([one.best - one.first for one in found], 1),
            _spread([one.best - one.last for one in found], 1),
            _spread([max(one.best, one.last) for one in words], 1),
        ])  # fmt: skip
    return table(
        [
            "tokens",
            "embeddings",
            "best middle layer",
            "last",
            "gain over embeddings",
            "gain over last",
            "best with `one-word`",
        ],
        rows,
    )


def middle() -> str:
    """Return each run's scores at the end, and the gains of the best middle layer with intervals over tasks."""

    def gain(some: Sequence[Run], over: int) -> str:
        by_task = zip(*(leads(run, over=over) for run in some), strict=True)
        return mean_cell([fmean(seeds_of_task) for seeds_of_task in by_task], ".1f")

    rows = []
    for name, _, some in _groups():
        ends = [winners(run)[-1] for run in some]
        rows.append([
            name, _spread([one.first for one in ends], 1),
            f"{_spread([one.best for one in ends], 1)} at {_layers([one.layer for one in ends])}",
            _spread([one.last for one in ends], 1), gain(some, 0), gain(some, 12),
        ])  # fmt: skip
    head = ["run", "embeddings", "best middle layer", "last", "gain over embeddings", "gain over last"]
    return table(head, rows)


def settling() -> str:
    """Return when the base's layers settle, and how far they move, over its seeds."""
    rows = []
    for name in SETTLING:
        steps = zip(*(thirds(settled_at(run, name)) for run in seeds()), strict=True)
        ways = zip(*(thirds(moved(run, name, since=16)) for run in seeds()), strict=True)
        rows.append([
            name,
            *(_millions([step * TOKENS for step in third]) for third in steps),
            *(_spread([100 * way for way in third], 0) for third in ways),
        ])  # fmt: skip
    return table(["metric", *(f"{third} settle" for third in THIRDS), *(f"{third} move, %" for third in THIRDS)], rows)


def rules() -> str:
    """Return what each rule would have lost at stages of the base, and the layers it points at, over the seeds."""
    every = [regrets(run) for run in seeds()]
    rows = []
    for rule in every[0]:
        chosen = [_layers([one[rule][step][0] for one in every]) for step in RULE_STEPS]
        points = [_spread([one[rule][step][1] for one in every], 1) for step in RULE_STEPS]
        rows.append([f"`{rule}`", *(f"{some} at {layers}" for some, layers in zip(points, chosen, strict=True))])
    return table(["rule", *(f"{step * TOKENS / 1e6:.0f}M" for step in RULE_STEPS)], rows)


def finetuning(layers: Sequence[int] = (1, 3, 6, 9, 12)) -> str:
    """Return metrics and scores before and after each fine-tuning, and the interval of a score's change over tasks."""
    rows = []
    for name in (RAW, "prompt_entropy", "dataset_entropy", "infonce", "lidar", "anisotropy", "score"):
        for run in known(*TUNED):
            one = run.scores() if name == "score" else run.metric(name)
            digits = 1 if name == "score" else 2
            ends = [(one.values[0][one.layers.index(k)], one.values[-1][one.layers.index(k)]) for k in layers]
            cells = [f"{before:.{digits}f} → {after:.{digits}f}" for before, after in ends]
            if name == "score":
                changes = (mean_interval(gained(run, k))[1:] for k in layers)
                cells = [f"{cell} ({low:.1f} to {high:.1f})" for cell, (low, high) in zip(cells, changes, strict=True)]
            rows.append([name, run.told["tuning"], *cells])
    return table(["metric", "tuning", *(f"layer {k}" for k in layers)], rows)


def main() -> None:
    if folder := sys.argv[1:]:
        record.RESULTS = Path(folder[0])
        print(*(f"{name}\n\n{made}" for name, made in tables().items()), sep="\n")
        return
    for name, made in tables().items():
        write_part(PAGE, name, made)


if __name__ == "__main__":
    main()
