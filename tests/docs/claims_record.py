"""What the page of the training record says, and the frames that say it."""

from __future__ import annotations

from statistics import fmean

import numpy as np

from benchmarks.pretraining.findings import (
    EVENTS,
    RAW,
    Event,
    event,
    lowering,
    moved,
    overtaking,
    regrets,
    valley,
    winners,
)
from benchmarks.pretraining.record import TOKENS, Run, known, read_run, seeds
from benchmarks.pretraining.tables import RUNS, THIRDS
from midlayer_encoders.frame import settled
from tests.docs.stated import Claim

PAGE, REPLICATION = "docs/training.md", "docs/replication.md"


def _all() -> list[Run]:
    return [*seeds(), *known(*RUNS)]


def _ends(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _takes(run: Run) -> float:
    """Return what the first token takes from the entropy of raw states, at the layer where that is most."""
    return float(lowering(run).values[-1].max())


def _event(what: str) -> list[Event]:
    (name,) = (name for name in EVENTS if name.startswith(what))
    return [event(EVENTS[name](run)) for run in seeds()]


def _depth(run: Run, name: str = RAW, texts: str = "probe") -> float:
    return valley(run.metric(name, texts).values[-1]).depth


def _highest(run: Run, name: str) -> float:
    return float(np.nanmax(run.metric(name).values[-1]))


def _over_last(run: Run) -> float:
    end = winners(run)[-1]
    return end.best - end.last


def _lost(rule: str) -> float:
    return fmean(list(regrets(run)[rule].values())[-1][1] for run in seeds())


def _since(run: Run) -> float:
    step = overtaking(run)[0]
    assert step is not None
    return step * TOKENS / 1e6


def _one_word() -> float:
    asked, plain = ([run.scores(recipe).values for run in seeds()] for recipe in ("one-word", "plain"))
    lost = np.nanmax(np.mean(plain, axis=0), axis=1) - np.nanmax(np.mean(asked, axis=0), axis=1)
    assert (lost > 0).all()
    return float(lost[-1])


def _settling(name: str) -> list[float]:
    """Return the mean step at which each third of the layers settles, over the seeds."""
    steps = [
        dict(settled(run.frame.filter(name=name, dataset="probe"), within=0.1).select("layer", "step").iter_rows())
        for run in seeds()
    ]
    return [fmean(one[layer] for one in steps for layer in third if layer in one) for third in THIRDS.values()]


def _ways(name: str) -> list[float]:
    path = np.mean([moved(run.metric(name), 16) for run in seeds()], axis=0)
    first, middle, last = (100 * float(np.mean(path[list(third)])) for third in THIRDS.values())
    return [middle, first, last]


def _first_to_settle() -> list[float]:
    """Return nothing but that the metrics which the page names are in the order that it says."""
    for name in ("dime", "infonce", "dataset_entropy", "effective_rank"):
        assert _settling(name)[0] == min(_settling(name)), name
    for name in ("prompt_entropy", RAW, "curvature", "cka"):
        assert _settling(name)[2] == min(_settling(name)), name
    return []


def _nothing_beats_the_embeddings() -> list[float]:
    assert all(winners(run)[-1].first > winners(run)[-1].best for run in known("masked", "mamba2"))
    return []


def _dimension(run: Run, since: int) -> int:
    """Return the one dimension of the largest states of layers 2 to 12 after some steps, all of them the first token's."""
    token, dimension = run.metric("largest_token"), run.metric("largest_dimension")
    later = [place for place, step in enumerate(token.steps) if step >= since]
    assert not token.values[later, 2:].any()
    (found,) = set(dimension.values[later, 2:].flatten().tolist())
    return int(found)


CLAIMS = [
    Claim(
        PAGE,
        "takes {} to {} nats (two seeds) from the entropy of some layer, without it {}",
        lambda: [*_ends([_takes(run) for run in seeds()]), _takes(read_run("no-bos"))],
    ),
    Claim(
        PAGE,
        "(GPTNeoX {}) and learning rate ({} at 5e-4)",
        lambda: [_takes(read_run("gpt-neox")), _takes(read_run("low-rate"))],
    ),
    Claim(
        PAGE,
        "half of its final size at {} to {}M tokens, the share of heads that attend to it at {} to {}M",
        lambda: [end / 1e6 for what in ("largest", "heads") for end in _ends([one.half for one in _event(what)])],
    ),
    Claim(
        PAGE,
        "`[BOS]` ({} nats) and under the masked objective ({}) too",
        lambda: [_depth(read_run(name), texts="probe-later") for name in ("no-bos", "masked")],
    ),
    Claim(
        PAGE,
        "here it has {} to {} %",
        lambda: [100 * end for end in _ends([_highest(run, "first_token_share") for run in seeds()])],
    ),
    Claim(
        PAGE, "beats the last one by {} to {} points in every run", lambda: _ends([_over_last(run) for run in _all()])
    ),
    Claim(
        PAGE,
        "trains the base: {} s on one H200, {} of them training",
        lambda: [
            (told := read_run("base").told)["seconds"],
            told["seconds"] - sum(told[f"{k}_seconds"] for k in ("look", "aside", "stage")),
        ],
    ),
    Claim(
        PAGE,
        "From {}M tokens on the largest state of every layer from 2 to 12 is the first token's, in one dimension of 512: {} in seed 0, {} in seed 1",
        lambda: [362 * TOKENS / 1e6, *(_dimension(run, since=362) for run in seeds()[:2])],
    ),
    Claim(PAGE, "has it in {} too", lambda: [_dimension(read_run("one-added"), since=362)]),
    Claim(
        PAGE,
        "the state takes {} to {} times the tokens, the share {} to {} times",
        lambda: [
            end for what in ("largest", "first") for end in _ends([one.nine_tenths / one.tenth for one in _event(what)])
        ],
    ),
    Claim(
        PAGE,
        "as large in both seeds ({} and {}), the share is not ({} and {})",
        lambda: [end for what in ("largest", "first") for end in _ends([one.final for one in _event(what)])],
    ),
    Claim(PAGE, "{} nats below both ends in seed 0, {} in seed 1", lambda: [_depth(run) for run in seeds()[:2]]),
    Claim(
        PAGE,
        "blocks have the sink too, with more heads ({})",
        lambda: [_highest(read_run("gpt-neox"), "attention_sink_rate")],
    ),
    Claim(
        PAGE,
        "({} at most, where the base has {} to {})",
        lambda: [
            _highest(read_run("low-rate"), "largest_state"),
            *_ends([_highest(run, "largest_state") for run in seeds()]),
        ],
    ),
    Claim(
        PAGE, "base's valley is {} to {} nats deep", lambda: _ends([_depth(run, "prompt_entropy") for run in seeds()])
    ),
    Claim(
        PAGE,
        "no sink (share {}, no head attends to it), and yet the deepest valley of raw states, {} nats at layer {}",
        lambda: [
            _highest(read_run("masked"), "first_token_share"),
            max(map(_depth, _all())),
            valley(read_run("masked").metric(RAW).values[-1]).layer,
        ],
    ),
    Claim(PAGE, "({} nats are left in the paper's metric)", lambda: [_depth(read_run("masked"), "prompt_entropy")]),
    Claim(
        PAGE,
        "{} of the heads of a block attend to the first token ({} to {} in the base), which takes {} nats",
        lambda: [
            _highest(read_run("one-added"), "attention_sink_rate"),
            *_ends([_highest(run, "attention_sink_rate") for run in seeds()]),
            _takes(read_run("one-added")),
        ],
    ),
    Claim(
        PAGE,
        "from {}M (seed 1) or {}M tokens (seed 0) on, by {} and {} points at the end",
        lambda: (
            [_since(run) for run in seeds()[1::-1]]
            + [winners(run)[-1].best - winners(run)[-1].first for run in seeds()[:2]]
        ),
    ),
    Claim(PAGE, "costs points at every stage here, {} at the end", lambda: [_one_word()]),
    Claim(PAGE, "of the sink (no `[BOS]`: {} points)", lambda: [_over_last(read_run("no-bos"))]),
    Claim(PAGE, "has the largest ({})", lambda: [max(map(_over_last, _all()))]),
    Claim(PAGE, "no block beats the embeddings", _nothing_beats_the_embeddings),
    Claim(
        PAGE,
        "they do in DiME, InfoNCE, dataset entropy and effective rank; in both prompt entropies, curvature and CKA",
        _first_to_settle,
    ),
    Claim(PAGE, "({} % of the range against {} and {})", lambda: _ways(RAW)),
    Claim(
        PAGE,
        "lose {} points at the end; the package's `auto`, which takes a depth of 0.8 where nothing says otherwise, {}, the last layer {}",
        lambda: [_lost("min-dime"), _lost("auto"), _lost("last")],
    ),
    Claim(PAGE, "Reading raw states it would cost {}", lambda: [_lost("valley-midpoint (raw)")]),
    Claim(
        REPLICATION,
        "a valley of {} to {} nats at layers {} and {} (two seeds), and a masked one of {} at layer {}, Mamba2 none",
        lambda: [
            *_ends([_depth(run) for run in seeds()]),
            *_ends([valley(run.metric(RAW).values[-1]).layer for run in seeds()]),
            (masked := valley(read_run("masked").metric(RAW).values[-1])).depth,
            masked.layer,
        ],
    ),
    Claim(
        REPLICATION,
        "they are {} to {}, {} and none, at layer 1",
        lambda: [
            *_ends([_depth(run, "prompt_entropy") for run in seeds()]),
            _depth(read_run("masked"), "prompt_entropy"),
        ],
    ),
    Claim(REPLICATION, "in the {} [own runs]", lambda: [_lowest_blocks()]),
]


def _lowest_blocks() -> int:
    """Return the number of runs, in each of which dataset entropy has its lowest block at layer 1 or 2."""
    assert {1 + int(run.metric("dataset_entropy").values[-1][1:].argmin()) for run in _all()} == {1, 2}
    return len(_all())
