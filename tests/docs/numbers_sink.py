"""What the page of the training record says of the runs with less of a sink, and the frames that say it."""

from benchmarks.pretraining.findings import event_layer
from benchmarks.pretraining.record import read_run, seeds
from tests.docs.record_numbers import at_layer, dimension, ends, highest, mean_rate, share, takes


def rate(name: str) -> float:
    return float(mean_rate(read_run(name))[-1])


def hidden_token() -> list[float]:
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


def one_dimension() -> list[float]:
    found = {
        name: dimension(read_run(name), since=2000) for name in ("one-added", "no-decay", "half-bos", "first-hidden")
    }
    assert found["one-added"] == found["no-decay"] == dimension(seeds()[0], since=362)
    assert found["half-bos"] == found["first-hidden"]
    return [found["no-decay"], found["half-bos"], dimension(read_run("own-key"), since=2000)]
