"""What the page of the training record says, and the frames that say it."""

from __future__ import annotations

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
from tests.docs.record_numbers import (
    at_layer,
    depth,
    dimension,
    ends,
    every_run,
    highest,
    mean_rate,
    over_last,
    share,
    takes,
)
from tests.docs.stated import Claim

PAGE, REPLICATION = "docs/training.md", "docs/replication.md"
PAPER_RULES = ("min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy")


def _event(what: str) -> list[Event]:
    (name,) = (name for name in EVENTS if name.startswith(what))
    return [event(EVENTS[name](run)) for run in seeds()]


@cache
def _regrets() -> list[dict[str, dict[int, tuple[int, float]]]]:
    return [regrets(run) for run in seeds()]


def _lost(*rules: str) -> list[float]:
    """Return the least and the most that rules lose at the end, over the seeds."""
    return ends([list(one[rule].values())[-1][1] for one in _regrets() for rule in rules])


def _since(run: Run) -> float:
    step = overtaking(run)[0]
    assert step is not None
    return step * TOKENS / 1e6


def _settling(name: str) -> list[float]:
    return thirds(mean_by_layer([settled_at(run, name) for run in seeds()]))


def _ways(name: str, since: int) -> list[float]:
    """Return how far each third of the layers moves after a step, in percent of the metric's range."""
    return [100 * way for way in thirds(mean_by_layer([moved(run, name, since) for run in seeds()]))]


@cache
def _counted() -> list[float]:
    """Return in how many metrics early layers settle first, of how many; and in how many the middle moves most."""
    every = [history.name for history in histories(seeds()[0].frame.filter(kind="metric", dataset="probe"))]
    names = [name for name in every if not name.startswith("largest") and name != "attention_sink_rate"]
    settling, ways = ({name: made(name) for name in names} for made in (_settling, partial(_ways, since=16)))
    first, last = ([name for name in names if settling[name][k] == min(settling[name])] for k in (0, 2))
    assert {"dime", "infonce", "dataset_entropy", "effective_rank"} <= set(first)
    assert {"prompt_entropy", RAW, "curvature", "cka"} <= set(last)
    most = Counter(max(range(3), key=ways[name].__getitem__) for name in names)
    return [len(first), len(names), len(last), most[1], most[2], most[0]]


def _no_gain_over_the_embeddings() -> list[float]:
    """Check the column of the table: the base's gains are means over its seeds."""
    groups = [seeds(), *([run] for run in known(*RUNS))]
    for runs in groups:
        gains = zip(*(leads(run, over=0) for run in runs), strict=True)
        _, low, high = mean_interval([fmean(gain) for gain in gains])
        assert low < 0 < high
    return []


def _at_least_zero(values: Iterable[float]) -> list[float]:
    assert min(values) > 0
    return []


def _the_second_seed() -> list[float]:
    """Return the share and the valley of seed 1, both the smallest of the seeds; its blocks overtake first."""
    found = {what: [what(run) for run in seeds()] for what in (share, depth, _since)}
    assert all(found[what][1] == min(found[what]) for what in found)
    return [found[share][1], found[depth][1]]


def _depth_and_advantage() -> list[float]:
    depths, gains = ([what(run) for run in every_run()] for what in (depth, over_last))
    assert over_last(read_run("low-rate")) == max(gains)
    assert over_last(read_run("masked")) == min(gains)
    assert depth(read_run("masked")) == max(depth(run) for run in every_run() if run.steps == 2000)
    correlation = pearsonr(depths, gains)
    return [len(gains), correlation.statistic, *correlation.confidence_interval(0.95)]


def _halves(name: str) -> list[float]:
    """Return when the largest state and the sink rate of a run have half of their final size, in millions of tokens."""
    every = [event(read(read_run(name))) for what, read in EVENTS.items() if what.startswith(("largest", "heads"))]
    return [one.half / 1e6 for one in every]


def _asked_blocks(run: Run) -> list[float]:
    """Return what asking for one word adds to the best block, at each stage."""
    asked, plain = (run.scores(recipe).values[:, 1:] for recipe in ("one-word", "plain"))
    return list(np.nanmax(asked, axis=1) - np.nanmax(plain, axis=1))


def _gaps(run: Run, since: int) -> list[float]:
    return [one.best - one.last for one in winners(run) if one.step >= since]


def _ssm() -> list[float]:
    one = read_run("mamba2").metric(RAW)
    later = one.values[[place for place, step in enumerate(one.steps) if step >= 128]]
    assert (later[-1] > later[0])[1:].all()
    return [*(float(one.values[-1][layer]) for layer in (0, 1, 3, 12)), float(one.values[:, 12].min())]


def _state_first() -> list[float]:
    """Return when the largest state has half of its final size, which in every seed is before all others do."""
    halves = [[one.half for one in _event(what)] for what in ("largest", "first", "heads", "drop")]
    assert all(state == min(state, *others) for state, *others in zip(*halves, strict=True))
    return [half / 1e6 for half in ends(halves[0])]


def _first_over_last(run: Run) -> float:
    end = winners(run)[-1]
    return end.first - end.last


def _early_valley() -> list[float]:
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


CLAIMS = [
    Claim(
        PAGE,
        "lowers the entropy by {} nats, compared with {} to {} in the base (three seeds)",
        lambda: [takes(read_run("no-bos")), *ends([takes(run) for run in seeds()])],
    ),
    Claim(
        PAGE,
        "The base's valleys are {}, {} and {} nats deep; without the first token, {}, {} and {} remain, at layer {} or {}",
        lambda: [
            *(depth(run, texts=texts) for texts in ("probe", "probe-later") for run in seeds()),
            *ends([valley(run.metric(RAW, "probe-later").values[-1]).layer for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "also appears without `[BOS]` ({}) and with the masked objective ({})",
        lambda: [depth(read_run(name), texts="probe-later") for name in ("no-bos", "masked")],
    ),
    Claim(
        PAGE,
        "which lowers the entropy by {} nats, but almost no valley ({})",
        lambda: [takes(read_run("low-rate")), depth(read_run("low-rate"))],
    ),
    Claim(
        PAGE,
        "in the base it has {} to {} %",
        lambda: [100 * end for end in ends([highest(run, "first_token_share") for run in seeds()])],
    ),
    Claim(
        PAGE,
        "Over {} runs, the best of layers 1 to 11 beats it by {} points on average (95 % interval {} to {}), the embeddings by {} ({} to {})",
        lambda: [
            len(every_run()),
            *(number for gap in (over_last, _first_over_last) for number in mean_interval(list(map(gap, every_run())))),
        ],
    ),
    Claim(PAGE, "# the base: {} s", lambda: [read_run("base").told["seconds"]]),
    Claim(PAGE, "the largest state is the first to reach half of its final value ({} to {}M)", _state_first),
    Claim(
        PAGE,
        "without weight decay, the share ({}M) precedes the state ({}M)",
        lambda: [event(read(read_run("no-decay"))).half / 1e6 for read in list(EVENTS.values())[:2]],
    ),
    Claim(PAGE, "heads and state reach half together ({} to {}M)", lambda: ends(_halves("gpt-neox"))),
    Claim(PAGE, "the strongest block's heads ({}M) precede the state ({}M)", lambda: _halves("long")[::-1]),
    Claim(
        PAGE,
        "leaves a valley of {} to {} nats at 8M tokens, at layer 1, before any first token is dominant. It shrinks to {} to {} by {} to {}M",
        _early_valley,
    ),
    Claim(
        PAGE,
        "At layer 7, the seeds have {}, {} and {}",
        lambda: [at_layer(run, "first_token_share", 7) for run in seeds()],
    ),
    Claim(
        PAGE,
        "over blocks 2 and 3 ({}, then {}), in seed 2 in block 2 alone ({}, then {})",
        lambda: [
            *(at_layer(seeds()[0], "largest_state", layer) for layer in (2, 3)),
            *(at_layer(seeds()[2], "largest_state", layer) for layer in (1, 2)),
        ],
    ),
    Claim(
        PAGE,
        "From {}M tokens on, the largest state of every layer from 2 to 12 is the first token's, in one dimension of 512: {} in seed 0, {} in seed 1, {} in seed 2",
        lambda: [362 * TOKENS / 1e6, *(dimension(run, since=362) for run in seeds())],
    ),
    Claim(
        PAGE,
        "the sink rate takes {} to {} times the tokens, the state {} to {}, the share {} to {}",
        lambda: [
            end
            for what in ("heads", "largest", "first")
            for end in ends([one.nine_tenths / one.tenth for one in _event(what)])
        ],
    ),
    Claim(
        PAGE,
        "more heads ({} in one block, {} of all; base: {} to {} of all)",
        lambda: [
            highest(read_run("gpt-neox"), "attention_sink_rate"),
            float(mean_rate(read_run("gpt-neox"))[-1]),
            *ends([float(mean_rate(run)[-1]) for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "a dominant first token ({}) but hardly a sink ({} of all heads), and no valley: the largest value of any state is {} (base: {} to {})",
        lambda: [
            highest(run := read_run("low-rate"), "first_token_share"),
            float(mean_rate(run)[-1]),
            highest(run, "largest_state"),
            *ends([highest(run, "largest_state") for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "base's valley is {} to {} nats deep, at layer 1 (the first record's causal model: 0.12, and without `[BOS]` here {})",
        lambda: [*ends([depth(run, "prompt_entropy") for run in seeds()]), depth(read_run("no-bos"), "prompt_entropy")],
    ),
    Claim(
        PAGE,
        "no sink (share {}, no head above 0.3), and yet the deepest valley of raw states at {}M tokens, {} nats at layer {}",
        lambda: [
            highest(read_run("masked"), "first_token_share"),
            2000 * TOKENS / 1e6,
            max(depth(run) for run in every_run() if run.steps == 2000),
            valley(read_run("masked").metric(RAW).values[-1]).layer,
        ],
    ),
    Claim(
        PAGE,
        "After the final norm rescales the tokens, {} nats remain, and {} if tokens are centered",
        lambda: [depth(read_run("masked"), texts="probe-normed"), depth(read_run("masked"), "prompt_entropy")],
    ),
    Claim(
        PAGE,
        "{} nats at the embeddings, {} at layer 1, {} at layer 3 and {} at the last. It collapses at 2M tokens ({} at the last layer)",
        _ssm,
    ),
    Claim(
        PAGE,
        "and all of seed 1's ({} nats, at layer 1 instead of {})",
        lambda: [depth(seeds()[1], texts="probe-later"), valley(seeds()[1].metric(RAW).values[-1]).layer],
    ),
    Claim(
        PAGE,
        "{} to {} points in the three seeds, and {} to {} in the one run without `[BOS]` at the same stages",
        lambda: [*ends([gap for run in seeds() for gap in _gaps(run, 512)]), *ends(_gaps(read_run("no-bos"), 512))],
    ),
    Claim(
        PAGE,
        "from {}M (seed 1), {}M (seed 0) or {}M tokens (seed 2) on.",
        lambda: [_since(seeds()[number]) for number in (1, 0, 2)],
    ),
    Claim(
        PAGE,
        "(by {} to {} points in three seeds) and costs {} to {} from 8M tokens on, {} to {} at the end",
        lambda: [
            *ends([_asked_blocks(run)[0] for run in seeds()]),
            *ends([-gain for run in seeds() for gain in _asked_blocks(run)[1:]]),
            *ends([-_asked_blocks(run)[-1] for run in seeds()]),
        ],
    ),
    Claim(PAGE, "also beat the last layer", lambda: _at_least_zero(map(_first_over_last, every_run()))),
    Claim(PAGE, "No gain over the embeddings has an interval that excludes zero", _no_gain_over_the_embeddings),
    Claim(
        PAGE, "seed 1 has the smallest share ({}) and the smallest valley ({}), but overtakes first", _the_second_seed
    ),
    Claim(
        PAGE,
        "the low rate, which has none, has the largest, and the masked model, which has the deepest valley at 131M tokens, the smallest. Over the {} runs, depth and gain correlate at {} (95 % interval {} to {})",
        _depth_and_advantage,
    ),
    Claim(
        PAGE,
        "**Early layers settle first** in {} of the {} metrics: DiME, InfoNCE, dataset entropy and effective rank among those shown. In seven",
        lambda: _counted()[:2],
    ),
    Claim(
        REPLICATION,
        "in the base model of [training.md](training.md), {} of {} metrics settle first in the early layers, {} in the last; {} move most in the middle, {} in the last layers",
        lambda: _counted()[:5],
    ),
    Claim(PAGE, "**The middle moves most** in {} of the {},", lambda: [_counted()[3], _counted()[1]]),
    Claim(PAGE, "The last layers move most in {}, the early ones in {}", lambda: _counted()[4:]),
    Claim(PAGE, "({} % of the range against {} and {})", lambda: [(ways := _ways(RAW, since=16))[1], ways[0], ways[2]]),
    Claim(PAGE, "layers 1 to 4 move most there ({}, {} and {} %)", lambda: _ways(RAW, since=128)),
    Claim(
        PAGE,
        "lose {} to {} points at the end in the three seeds; `auto`, here a relative depth of 0.8, loses {} to {}, the last layer {} to {}",
        lambda: [*_lost(*PAPER_RULES), *_lost("auto"), *_lost("last")],
    ),
    Claim(PAGE, "On raw states, it would lose {} to {}", lambda: _lost("valley-midpoint (raw)")),
    Claim(
        REPLICATION,
        "a valley of {} to {} nats at layers {} and {} (three seeds; {} after 604M tokens, most of it due to the first token), a masked model one of {} at layer {}, and Mamba2 none",
        lambda: [
            *ends([depth(run) for run in seeds()]),
            *ends([valley(run.metric(RAW).values[-1]).layer for run in seeds()]),
            depth(read_run("long")),
            (masked := valley(read_run("masked").metric(RAW).values[-1])).depth,
            masked.layer,
        ],
    ),
    Claim(
        REPLICATION,
        "these valleys are {} to {}, {} and none, at layer 1",
        lambda: [*ends([depth(run, "prompt_entropy") for run in seeds()]), depth(read_run("masked"), "prompt_entropy")],
    ),
    Claim(REPLICATION, "in the {} [training runs]", lambda: [_lowest_blocks()]),
]


def _lowest_blocks() -> int:
    """Return the number of runs, in each of which dataset entropy has its lowest block at layer 1 or 2."""
    assert {1 + int(run.metric("dataset_entropy").values[-1][1:].argmin()) for run in every_run()} == {1, 2}
    return len(every_run())
