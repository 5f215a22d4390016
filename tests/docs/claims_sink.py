"""What the page of the training record says of the runs with less of a sink, and the frames that say it."""

from __future__ import annotations

from benchmarks.pretraining.findings import event_layer
from benchmarks.pretraining.record import read_run, seeds
from tests.docs.record_numbers import at_layer, depth, dimension, ends, highest, mean_rate, share, takes
from tests.docs.stated import Claim

PAGE = "docs/training.md"


def _rate(name: str) -> float:
    return float(mean_rate(read_run(name))[-1])


def _hidden() -> list[float]:
    """Return what the first token has that no later one sees: no head attends to it at any step, and it is the largest."""
    run = read_run("first-hidden")
    assert not mean_rate(run).any()
    assert not run.metric("largest_token").values[-1][1:].any()
    layer = event_layer(run.metric("first_token_share"))
    return [
        highest(run, "largest_state"),
        layer,
        share(run),
        *ends([at_layer(seed, "first_token_share", layer) for seed in seeds()]),
        takes(run),
        *ends(list(map(takes, seeds()))),
    ]


def _one_dimension() -> list[float]:
    found = {
        name: dimension(read_run(name), since=2000) for name in ("one-added", "no-decay", "half-bos", "first-hidden")
    }
    assert found["one-added"] == found["no-decay"] == dimension(seeds()[0], since=362)
    assert found["half-bos"] == found["first-hidden"]
    return [found["no-decay"], found["half-bos"], dimension(read_run("own-key"), since=2000)]


CLAIMS = [
    Claim(
        PAGE,
        "{} of all heads attend to the first token (base: {} to {}), and it lowers the entropy by {} nats. If it is hidden from all later tokens, it still lowers the entropy by {}, and the valley is {} nats deep ({} without it)",
        lambda: [
            _rate("own-key"),
            *ends([float(mean_rate(run)[-1]) for run in seeds()]),
            takes(read_run("own-key")),
            takes(hidden := read_run("first-hidden")),
            depth(hidden),
            depth(hidden, texts="probe-later"),
        ],
    ),
    Claim(
        PAGE,
        "`one-added` and `no-decay` below also end in {}, `half-bos` and `first-hidden` in {}, `own-key` in {}",
        _one_dimension,
    ),
    Claim(
        PAGE,
        "the first token has {} of the squared norm, below the base's {} to {}, lowers the entropy by {} nats, and is hardly a sink ({} of all heads)",
        lambda: [share(run := read_run("half-bos")), *ends(list(map(share, seeds()))), takes(run), _rate("half-bos")],
    ),
    Claim(
        PAGE,
        "the first token has {} of the squared norm, {} of all heads attend to it, it lowers the entropy by {} nats, and the valley is {} nats deep. The largest state is larger ({})",
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
        "{} of the heads of its strongest block ({} to {} in the base), {} of all heads, give the first token more than 0.3, and it lowers the entropy by {} nats",
        lambda: [
            highest(run := read_run("one-added"), "attention_sink_rate"),
            *ends([highest(run, "attention_sink_rate") for run in seeds()]),
            _rate("one-added"),
            takes(run),
        ],
    ),
    Claim(
        PAGE,
        "{} of the heads of its strongest block, {} of all, attend to the first token. Its share is within the base's range ({} of the squared norm), its largest state is smaller ({}), it lowers the entropy by {} nats, and the valley is {} nats deep",
        lambda: [
            highest(run := read_run("own-key"), "attention_sink_rate"),
            _rate("own-key"),
            share(run),
            highest(run, "largest_state"),
            takes(run),
            depth(run),
        ],
    ),
    Claim(
        PAGE,
        "it has the largest state of every block, {} at most. It is dominant from layer {} on, where it has {} of the squared norm (the base's seeds: {} to {}), and lowers the entropy by {} nats (base: {} to {})",
        _hidden,
    ),
    Claim(
        PAGE,
        "The valley, at layer 1, is {} nats deep, and {} without the first token",
        lambda: [depth(run := read_run("first-hidden")), depth(run, texts="probe-later")],
    ),
]
