"""What the pages say of the two fine-tunings of the long run, and the frames that say it."""

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import mean_interval
from benchmarks.pretraining.findings import RAW, gained, leads, valley, winners
from benchmarks.pretraining.record import TUNED, Run, read_run
from tests.docs.record_numbers import at_layer, depth, ends, mean_rate

SIMILAR = 4.0  # of STSBenchmark's five points: its pairs from there on were trained on
LENDING = ("Banking77Classification", "STSBenchmark")  # whose training parts are among the pairs


def tuned() -> list[Run]:
    return [read_run(name) for name in TUNED]


def metric_rise(run: Run, name: str, texts: str = "probe") -> NDArray[np.float64]:
    """Return by how much a metric is higher after a tuning, at each block."""
    values = run.metric(name, texts).values
    risen: NDArray[np.float64] = (values[-1] - values[0])[1:]
    return risen


def valleys() -> list[float]:
    """Return the valley before, and after each tuning: at layer 3 all of them."""
    curves = [tuned()[0].metric(RAW).values[0], *(run.metric(RAW).values[-1] for run in tuned())]
    assert {valley(curve).layer for curve in curves} == {3}
    return [valley(curve).depth for curve in curves]


def last_layer_gains() -> list[float]:
    """Return what the last layer gains by each tuning, and the intervals over tasks."""
    return [number for run in tuned() for number in mean_interval(gained(run, 12))]


def middle_leads() -> list[float]:
    """Return the lead of the best middle layer over the last before and after each tuning, and the intervals over tasks."""
    simcse, supervised = tuned()
    stages = ((simcse, 0), (simcse, -1), (supervised, -1))
    return [number for run, stage in stages for number in mean_interval(leads(run, over=12, stage=stage))]


def kinds() -> list[float]:
    found = Counter(read_run("long-supervised").told["kinds"])
    return [*(found[kind] for kind in ("Banking77", "adjacent", "STSBenchmark")), SIMILAR]


def entropy_rise() -> list[float]:
    """Return the least and the most that the entropy of raw states rises; the paper's rises at every block too."""
    assert all((metric_rise(run, "prompt_entropy") > 0).all() for run in tuned())
    found = [end for run in tuned() for end in ends(list(metric_rise(run, RAW)))]
    assert min(found) > 0
    return found


def shares() -> list[float]:
    return [
        float(tuned()[0].metric("first_token_share").values[0][3]),
        *(at_layer(run, "first_token_share", 3) for run in tuned()),
    ]


def falling() -> list[float]:
    """Return where, without the first token, the entropy of raw states falls after SimCSE; after the other tuning nowhere."""
    simcse, supervised = (metric_rise(run, RAW, "probe-later") for run in tuned())
    assert supervised.min() > -0.005
    return [*ends([layer for layer, risen in enumerate(simcse, start=1) if risen < 0]), -min(simcse)]


def left() -> list[float]:
    """Return the valley without the first token, after each tuning and before; the last layer's entropy rises most there."""
    assert all(metric_rise(run, RAW, "probe-later").argmax() == 11 for run in tuned())
    before = valley(tuned()[0].metric(RAW, "probe-later").values[0]).depth
    return [*(depth(run, texts="probe-later") for run in tuned()), before]


def heads() -> list[float]:
    simcse, supervised = tuned()
    rates = simcse.metric("attention_sink_rate").values[:, -3:].mean(axis=1)
    return [*mean_rate(simcse)[[0, -1]], *rates[[0, -1]], mean_rate(supervised)[-1]]


def dataset_entropy() -> list[float]:
    simcse, supervised = tuned()
    assert (metric_rise(supervised, "dataset_entropy") > 0).all()
    fallen = [layer for layer, risen in enumerate(metric_rise(simcse, "dataset_entropy"), start=1) if risen < 0]
    return [
        simcse.metric("dataset_entropy").values[0][12],
        *(at_layer(run, "dataset_entropy", 12) for run in tuned()),
        *ends(fallen),
        -min(metric_rise(simcse, "dataset_entropy")),
    ]


def invariance() -> list[float]:
    simcse, supervised = tuned()
    change = metric_rise(supervised, "infonce")
    risen = [layer for layer, value in enumerate(metric_rise(simcse, "infonce"), start=1) if value > 0]
    assert risen == list(range(risen[0], risen[-1] + 1))
    return [
        simcse.metric("infonce").values[0][12], *(at_layer(run, "infonce", 12) for run in tuned()),
        *ends(list(-change[8:])), np.abs(change[:8]).max(), *ends(risen)
    ]  # fmt: skip


def of_others(run: Run) -> tuple[float, float, float]:
    """Return what the last layer gains on the tasks that lend no pairs, and the interval over them."""
    tasks = sorted(run.frame.filter(kind="score")["dataset"].unique())
    gains = dict(zip(tasks, gained(run, 12), strict=True))
    assert set(LENDING) < set(tasks)
    return mean_interval([gain for task, gain in gains.items() if task not in LENDING])


def task_gains() -> list[float]:
    assert {winners(run)[-1].layer for run in tuned()} == {11}
    others = [of_others(run) for run in tuned()]
    return [*(gain for gain, _, _ in others), *(end for _, *both in others for end in both), *middle_leads()]


def fig13() -> list[float]:
    simcse, supervised = tuned()
    lowered = [int((metric_rise(run, "infonce") < 0).sum()) for run in tuned()]
    return [
        *(value for name in ("prompt_entropy", "dataset_entropy", "infonce") for value in (
            simcse.metric(name).values[0][12], *(at_layer(run, name, 12) for run in (simcse, supervised))
        )),
        *lowered, *last_layer_gains(),
    ]  # fmt: skip
