"""What the page of the training record says, and the frames that say it."""

from collections import Counter
from collections.abc import Iterable
from functools import cache, partial
from statistics import fmean

import numpy as np
from scipy.stats import pearsonr

from benchmarks.intervals import mean_interval
from benchmarks.pretraining.findings import (
    EVENTS,
    RAW,
    Event,
    event,
    leads,
    mean_by_layer,
    moved,
    overtaking,
    regrets,
    settled_at,
    thirds,
    valley,
    winners,
)
from benchmarks.pretraining.record import TOKENS, Run, known, read_run, seeds
from benchmarks.pretraining.tables import RUNS
from midlayer_encoders.frame.steps import histories
from tests.docs.record_numbers import depth, ends, every_run, over_last, share

PAPER_RULES = ("min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy")


def seed_events(what: str) -> list[Event]:
    (name,) = (name for name in EVENTS if name.startswith(what))
    return [event(EVENTS[name](run)) for run in seeds()]


@cache
def seed_regrets() -> list[dict[str, dict[int, tuple[int, float]]]]:
    return [regrets(run) for run in seeds()]


def lost(*rules: str) -> list[float]:
    """Return the least and the most that rules lose at the end, over the seeds."""
    return ends([list(one[rule].values())[-1][1] for one in seed_regrets() for rule in rules])


def overtaken_since(run: Run) -> float:
    step = overtaking(run)[0]
    assert step is not None
    return step * TOKENS / 1e6


def settling_thirds(name: str) -> list[float]:
    return thirds(mean_by_layer([settled_at(run, name) for run in seeds()]))


def moved_thirds(name: str, since: int) -> list[float]:
    """Return how far each third of the layers moves after a step, in percent of the metric's range."""
    return [100 * way for way in thirds(mean_by_layer([moved(run, name, since) for run in seeds()]))]


@cache
def counted() -> list[float]:
    """Return in how many metrics early layers settle first, of how many; and in how many the middle moves most."""
    every = [history.name for history in histories(seeds()[0].frame.filter(kind="metric", dataset="probe"))]
    names = [name for name in every if not name.startswith("largest") and name != "attention_sink_rate"]
    settling, ways = (
        {name: made(name) for name in names} for made in (settling_thirds, partial(moved_thirds, since=16))
    )
    first, last = ([name for name in names if settling[name][k] == min(settling[name])] for k in (0, 2))
    assert {"dime", "infonce", "dataset_entropy", "effective_rank"} <= set(first)
    assert {"prompt_entropy", RAW, "curvature", "cka"} <= set(last)
    most = Counter(max(range(3), key=ways[name].__getitem__) for name in names)
    return [len(first), len(names), len(last), most[1], most[2], most[0]]


def no_gain_over_the_embeddings() -> list[float]:
    """Check the column of the table: the base's gains are means over its seeds."""
    groups = [seeds(), *([run] for run in known(*RUNS))]
    for runs in groups:
        gains = zip(*(leads(run, over=0) for run in runs), strict=True)
        _, low, high = mean_interval([fmean(gain) for gain in gains])
        assert low < 0 < high
    return []


def at_least_zero(values: Iterable[float]) -> list[float]:
    assert min(values) > 0
    return []


def the_second_seed() -> list[float]:
    """Return the share and the valley of seed 1, both the smallest of the seeds; its blocks overtake first."""
    found = {what: [what(run) for run in seeds()] for what in (share, depth, overtaken_since)}
    assert all(found[what][1] == min(found[what]) for what in found)
    return [found[share][1], found[depth][1]]


def depth_and_advantage() -> list[float]:
    depths, gains = ([what(run) for run in every_run()] for what in (depth, over_last))
    assert over_last(read_run("low-rate")) == max(gains)
    assert over_last(read_run("masked")) == min(gains)
    assert depth(read_run("masked")) == max(depth(run) for run in every_run() if run.steps == 2000)
    correlation = pearsonr(depths, gains)
    return [len(gains), correlation.statistic, *correlation.confidence_interval(0.95)]


def half_times(name: str) -> list[float]:
    """Return when the largest state and the sink rate of a run have half of their final size, in millions of tokens."""
    every = [event(read(read_run(name))) for what, read in EVENTS.items() if what.startswith(("largest", "heads"))]
    return [one.half / 1e6 for one in every]


def asked_blocks(run: Run) -> list[float]:
    """Return what asking for one word adds to the best block, at each stage."""
    asked, plain = (run.scores(recipe).values[:, 1:] for recipe in ("one-word", "plain"))
    return list(np.nanmax(asked, axis=1) - np.nanmax(plain, axis=1))


def gaps(run: Run, since: int) -> list[float]:
    return [one.best - one.last for one in winners(run) if one.step >= since]


def ssm() -> list[float]:
    one = read_run("mamba2").metric(RAW)
    later = one.values[[place for place, step in enumerate(one.steps) if step >= 128]]
    assert (later[-1] > later[0])[1:].all()
    return [*(float(one.values[-1][layer]) for layer in (0, 1, 3, 12)), float(one.values[:, 12].min())]


def state_first() -> list[float]:
    """Return when the largest state has half of its final size, which in every seed is before all others do."""
    halves = [[one.half for one in seed_events(what)] for what in ("largest", "first", "heads", "drop")]
    assert all(state == min(state, *others) for state, *others in zip(*halves, strict=True))
    return [half / 1e6 for half in ends(halves[0])]


def first_over_last(run: Run) -> float:
    end = winners(run)[-1]
    return end.first - end.last


def early_valley() -> list[float]:
    """Return how deep the valley is at 8M tokens, where it is shallowest after, and the tokens seen there, over the seeds."""
    every = [run.metric(RAW) for run in seeds()]
    depths = [
        {step: valley(row) for step, row in zip(one.steps, one.values, strict=True) if step >= 128} for one in every
    ]
    assert {one[128].layer for one in depths} == {1}
    low = [min(one, key=lambda step: one[step].depth) for one in depths]
    return [
        *ends([one[128].depth for one in depths]),
        *ends([one[step].depth for one, step in zip(depths, low, strict=True)]),
        *ends([step * TOKENS / 1e6 for step in low]),
    ]


def lowest_blocks() -> int:
    """Return the number of runs, in each of which dataset entropy has its lowest block at layer 1 or 2."""
    assert {1 + int(run.metric("dataset_entropy").values[-1][1:].argmin()) for run in every_run()} == {1, 2}
    return len(every_run())
