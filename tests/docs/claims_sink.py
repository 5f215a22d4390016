"""What the page of the training record says of the runs with less of a sink, and the frames that say it."""

from __future__ import annotations

from benchmarks.pretraining.record import read_run, seeds
from tests.docs.record_numbers import (
    depth,
    dimension,
    ends,
    every_run,
    highest,
    mean_rate,
    over_first,
    over_last,
    share,
    takes,
)
from tests.docs.stated import Claim

PAGE = "docs/training.md"


def _rate(name: str) -> float:
    return float(mean_rate(read_run(name))[-1])


def _hidden() -> list[float]:
    """Return what the first token has that no later one sees: no head attends to it at any step, and it is the largest."""
    run = read_run("first-hidden")
    assert not mean_rate(run).any()
    assert not run.metric("largest_token").values[-1][1:].any()
    seed = seeds()[1]
    return [highest(run, "largest_state"), share(run), share(seed), takes(run), takes(seed)]


def _one_dimension() -> list[float]:
    found = {
        name: dimension(read_run(name), since=2000) for name in ("one-added", "no-decay", "half-bos", "first-hidden")
    }
    assert found["one-added"] == found["no-decay"] == dimension(seeds()[0], since=362)
    assert found["half-bos"] == found["first-hidden"]
    return [found["no-decay"], found["half-bos"]]


def _few_heads() -> list[float]:
    """Return the most of all heads that the runs with little of a sink have, and what others are ahead of the embeddings by."""
    few = ("no-bos", "half-bos", "own-key", "first-hidden")
    others = [run for run in every_run() if run.told["variant"]["objective"] == "causal"]
    assert {run.name for run in others if run.told["variant"]["blocks"] != "mamba2" and mean_rate(run)[-1] < 0.031} == {
        *few, "low-rate"
    }  # fmt: skip
    return [
        max(over_first(read_run(name)) for name in few),
        max(map(_rate, few)),
        *ends([over_first(run) for run in seeds()]),
        *(over_first(read_run(name)) for name in ("no-decay", "low-rate")),
    ]


CLAIMS = [
    Claim(
        PAGE,
        "{} of all heads turn to the first token (the base {} to {}), and it takes {} nats. Where no later token can see it at all, it still takes {}, and the valley is {} nats deep",
        lambda: [
            _rate("own-key"),
            *ends([float(mean_rate(run)[-1]) for run in seeds()]),
            takes(read_run("own-key")),
            takes(read_run("first-hidden")),
            depth(read_run("first-hidden")),
        ],
    ),
    Claim(
        PAGE,
        "`one-added` and `no-decay` below end with it in {} too, `half-bos` and `first-hidden` in {}",
        _one_dimension,
    ),
    Claim(
        PAGE,
        "({} of the squared norm where `[BOS]` is there, which takes {} nats) and hardly for a sink ({} of all heads)",
        lambda: [share(run := read_run("half-bos")), takes(run), _rate("half-bos")],
    ),
    Claim(
        PAGE,
        "the first token has {}, {} of all heads attend to it, it takes {} nats, and the valley is {} nats deep. The largest state is larger ({})",
        lambda: [
            share(run := read_run("no-decay")),
            _rate("no-decay"),
            takes(run),
            depth(run),
            highest(run, "largest_state"),
        ],
    ),
    Claim(
        PAGE,
        "{} of the heads of its strongest block ({} to {} in the base), {} of all heads, give the first token more than 0.3, and it takes {} nats",
        lambda: [
            highest(run := read_run("one-added"), "attention_sink_rate"),
            *ends([highest(run, "attention_sink_rate") for run in seeds()]),
            _rate("one-added"),
            takes(run),
        ],
    ),
    Claim(
        PAGE,
        "{} of the heads of its strongest block, {} of all. The first token is as long as the base's ({} of the squared norm), takes {} nats, and the valley is {} deep",
        lambda: [
            highest(run := read_run("own-key"), "attention_sink_rate"),
            _rate("own-key"),
            share(run),
            takes(run),
            depth(run),
        ],
    ),
    Claim(
        PAGE,
        "the largest state of every block, {} at most, is its own. It has {} of the squared norm, as the base's seed 1 has ({}), and takes {} nats, about half of that seed's {}",
        _hidden,
    ),
    Claim(
        PAGE,
        "The valley is {} nats deep, {} of it without the first token",
        lambda: [depth(run := read_run("first-hidden")), depth(run, texts="probe-later")],
    ),
    Claim(
        PAGE,
        "(no `[BOS]`: {} points; a first token that none sees: {}; a learned key: {})",
        lambda: [over_last(read_run(name)) for name in ("no-bos", "first-hidden", "own-key")],
    ),
    Claim(
        PAGE,
        "{} points or none in the four runs in which {} of all heads or fewer have the sink (`no-bos`, `half-bos`, `own-key`, `first-hidden`) at the base's rate, where the base has {} to {}. But `no-decay`, with a sink, has {}, and the low rate, with hardly one, {}",
        _few_heads,
    ),
]
