"""Numbers of the training record's runs that its pages state."""

import numpy as np

from benchmarks.pretraining.findings import RAW, lowering, valley, winners
from benchmarks.pretraining.record import Run


def ends(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def takes(run: Run) -> float:
    """Return what the first token takes from the entropy of raw states, at the layer where that is most."""
    return float(lowering(run).values[-1].max())


def depth(run: Run, name: str = RAW, texts: str = "probe") -> float:
    return valley(run.metric(name, texts).values[-1]).depth


def highest(run: Run, name: str) -> float:
    return float(np.nanmax(run.metric(name).values[-1]))


def share(run: Run) -> float:
    """Return the first token's share of the squared norm, at the layer where it is most."""
    return highest(run, "first_token_share")


def dimension(run: Run, since: int) -> int:
    """Return the one dimension of the largest states of layers 2 to 12 after some steps, all of them the first token's."""
    token, place = run.metric("largest_token"), run.metric("largest_dimension")
    later = [number for number, step in enumerate(token.steps) if step >= since]
    assert not token.values[later, 2:].any()
    (found,) = set(place.values[later, 2:].flatten().tolist())
    return int(found)


def over_last(run: Run) -> float:
    """Return by how many points the best of layers 1 to 11 is ahead of the last at the end."""
    end = winners(run)[-1]
    return end.best - end.last
