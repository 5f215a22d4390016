"""What the pages say of the two fine-tunings of the long run, and the frames that say it."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import mean_interval
from benchmarks.pretraining.findings import RAW, gained, leads, valley, winners
from benchmarks.pretraining.record import TUNED, Run, read_run
from tests.docs.record_numbers import at_layer, depth, ends, mean_rate
from tests.docs.stated import Claim

PAGE, REPLICATION = "docs/training.md", "docs/replication.md"
SIMILAR = 4.0  # of STSBenchmark's five points: its pairs from there on were trained on
LENDING = ("Banking77Classification", "STSBenchmark")  # whose training parts are among the pairs


def _tuned() -> list[Run]:
    return [read_run(name) for name in TUNED]


def _risen(run: Run, name: str, texts: str = "probe") -> NDArray[np.float64]:
    """Return by how much a metric is higher after a tuning, at each block."""
    values = run.metric(name, texts).values
    risen: NDArray[np.float64] = (values[-1] - values[0])[1:]
    return risen


def _valleys() -> list[float]:
    """Return the valley before, and after each tuning: at layer 3 all of them."""
    curves = [_tuned()[0].metric(RAW).values[0], *(run.metric(RAW).values[-1] for run in _tuned())]
    assert {valley(curve).layer for curve in curves} == {3}
    return [valley(curve).depth for curve in curves]


def _gains() -> list[float]:
    """Return what the last layer gains by each tuning, and the intervals over tasks."""
    return [number for run in _tuned() for number in mean_interval(gained(run, 12))]


def _leads() -> list[float]:
    """Return the lead of the best middle layer over the last before and after each tuning, and the intervals over tasks."""
    simcse, supervised = _tuned()
    stages = ((simcse, 0), (simcse, -1), (supervised, -1))
    return [number for run, stage in stages for number in mean_interval(leads(run, over=12, stage=stage))]


def _kinds() -> list[float]:
    found = Counter(read_run("long-supervised").told["kinds"])
    return [*(found[kind] for kind in ("Banking77", "adjacent", "STSBenchmark")), SIMILAR]


def _entropy() -> list[float]:
    """Return the least and the most that the entropy of raw states rises; the paper's rises at every block too."""
    assert all((_risen(run, "prompt_entropy") > 0).all() for run in _tuned())
    found = [end for run in _tuned() for end in ends(list(_risen(run, RAW)))]
    assert min(found) > 0
    return found


def _shares() -> list[float]:
    return [
        float(_tuned()[0].metric("first_token_share").values[0][3]),
        *(at_layer(run, "first_token_share", 3) for run in _tuned()),
    ]


def _falling() -> list[float]:
    """Return where, without the first token, the entropy of raw states falls after SimCSE; after the other tuning nowhere."""
    simcse, supervised = (_risen(run, RAW, "probe-later") for run in _tuned())
    assert supervised.min() > -0.005
    return [*ends([layer for layer, risen in enumerate(simcse, start=1) if risen < 0]), -min(simcse)]


def _left() -> list[float]:
    """Return the valley without the first token, after each tuning and before; the last layer's entropy rises most there."""
    assert all(_risen(run, RAW, "probe-later").argmax() == 11 for run in _tuned())
    before = valley(_tuned()[0].metric(RAW, "probe-later").values[0]).depth
    return [*(depth(run, texts="probe-later") for run in _tuned()), before]


def _heads() -> list[float]:
    simcse, supervised = _tuned()
    rates = simcse.metric("attention_sink_rate").values[:, -3:].mean(axis=1)
    return [*mean_rate(simcse)[[0, -1]], *rates[[0, -1]], mean_rate(supervised)[-1]]


def _dataset_entropy() -> list[float]:
    simcse, supervised = _tuned()
    assert (_risen(supervised, "dataset_entropy") > 0).all()
    fallen = [layer for layer, risen in enumerate(_risen(simcse, "dataset_entropy"), start=1) if risen < 0]
    return [
        simcse.metric("dataset_entropy").values[0][12],
        *(at_layer(run, "dataset_entropy", 12) for run in _tuned()),
        *ends(fallen),
        -min(_risen(simcse, "dataset_entropy")),
    ]


def _invariance() -> list[float]:
    simcse, supervised = _tuned()
    change = _risen(supervised, "infonce")
    risen = [layer for layer, value in enumerate(_risen(simcse, "infonce"), start=1) if value > 0]
    assert risen == list(range(risen[0], risen[-1] + 1))
    return [
        simcse.metric("infonce").values[0][12], *(at_layer(run, "infonce", 12) for run in _tuned()),
        *ends(list(-change[8:])), np.abs(change[:8]).max(), *ends(risen)
    ]  # fmt: skip


def _of_others(run: Run) -> tuple[float, float, float]:
    """Return what the last layer gains on the tasks that lend no pairs, and the interval over them."""
    tasks = sorted(run.frame.filter(kind="score")["dataset"].unique())
    gains = dict(zip(tasks, gained(run, 12), strict=True))
    assert set(LENDING) < set(tasks)
    return mean_interval([gain for task, gain in gains.items() if task not in LENDING])


def _tasks() -> list[float]:
    assert {winners(run)[-1].layer for run in _tuned()} == {11}
    others = [_of_others(run) for run in _tuned()]
    return [*(gain for gain, _, _ in others), *(end for _, *both in others for end in both), *_leads()]


def _fig13() -> list[float]:
    simcse, supervised = _tuned()
    lowered = [int((_risen(run, "infonce") < 0).sum()) for run in _tuned()]
    return [
        *(value for name in ("prompt_entropy", "dataset_entropy", "infonce") for value in (
            simcse.metric(name).values[0][12], *(at_layer(run, name, 12) for run in (simcse, supervised))
        )),
        *lowered, *_gains(),
    ]  # fmt: skip


CLAIMS = [
    Claim(
        REPLICATION,
        "(the paper's metric, last layer: {} to {} and {} nats); dataset entropy of the last layer {} to {} and {}; InfoNCE of the last layer {} to {} and {}, lower at {} of 12 blocks after SimCSE, at {} after supervised tuning; the last layer gains {} points on six tasks (95 % interval over them {} to {}) and {} ({} to {})",
        _fig13,
    ),
    Claim(
        PAGE,
        "the last layer gains {} points (SimCSE; 95 % interval over the six tasks {} to {}) and {} (labeled pairs; {} to {}), and the valley is {} and {} nats deep",
        lambda: [*_gains(), *_valleys()[1:]],
    ),
    Claim(
        PAGE,
        "has {} batches of two questions with one intent (Banking77's training part, a pair of each of its 77 intents), {} of 256 pairs of adjacent sentences of the novels, and {} of pairs rated {} of 5 or more",
        _kinds,
    ),
    Claim(
        PAGE,
        "in raw states (by {} to {} nats after SimCSE, {} to {} after supervised tuning) and in the paper's metric",
        _entropy,
    ),
    Claim(PAGE, "the first token, it falls at layers {} to {} after SimCSE, by {} at most", _falling),
    Claim(PAGE, "stays at layer 3, {} nats deep before, {} and {} after", _valleys),
    Claim(PAGE, "the first token's share there ({}; {} and {})", _shares),
    Claim(
        PAGE, "remains without the first token, {} and {} nats instead of {}, because the last layer rises most", _left
    ),
    Claim(PAGE, "({} of all to {}; in the last three blocks {} to {}) and fewer after supervised tuning ({})", _heads),
    Claim(
        PAGE,
        "({} to {} and {}). It rises at every block after supervised tuning; after SimCSE, it falls at layers {} to {}, by {} at most",
        _dataset_entropy,
    ),
    Claim(
        PAGE,
        "InfoNCE of the last layer falls from {} to {} and {}. Supervised tuning lowers it by {} to {} at layers 9 to 12, and changes it by {} at most before; SimCSE raises it at layers {} to {}",
        _invariance,
    ),
    Claim(
        PAGE,
        "The last layer gains {} and {} points on the four tasks that contribute no pairs (95 % intervals over them {} to {} and {} to {}). The best of layers 1 to 11 led the last by {} points (over six tasks {} to {}); afterward it leads by {} ({} to {}) and {} ({} to {}), at layer 11",
        _tasks,
    ),
]
