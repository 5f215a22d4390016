"""Reference implementation of pooling, for tests that compare vectors with states."""

from torch import Tensor, arange


def pooled(tokens: Tensor, pooling: str) -> Tensor:
    """Return the vector of one input from the states of its real tokens, shape ``(T, D)``."""
    weights = arange(1.0, len(tokens) + 1)[:, None]
    return {
        "mean": tokens.mean(0),
        "last": tokens[-1],
        "cls": tokens[0],
        "max": tokens.max(0).values,
        "weightedmean": (tokens * weights).sum(0) / weights.sum(),
    }[pooling]
