"""The class of a metric returns the same as its function, for all options."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from midlayer_encoders import metrics
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.metrics.sample_metrics import LEAST_TOKENS, half_means
from tests.metrics.feeding import Corpus, corpus, feed, make
from tests.metrics.test_layer_metric import FIRST_IS_NAN, ROWS

BOTH = [False, True]
ENTROPY = {
    "alpha": [0.5, 1.0, 2.0],
    "normalization": ["raw", "maxEntropy", "logN", "logD", "logNlogD"],
    "method": ["auto", "exact"],
}
PREPARED = {"center": BOTH, "unit": BOTH}
GRID: dict[str, dict[str, list[object]]] = {
    "prompt_entropy": ENTROPY | PREPARED,
    "dataset_entropy": ENTROPY | PREPARED,
    "effective_rank": {"epsilon": [0.0, 1e-3], "method": ["auto", "exact"]} | PREPARED,
    "curvature": {"step": [1, 2]},
    "infonce": {"temperature": [0.1, 1.0]},
    "lidar": {"delta": [1e-4, 1.0], "exponential": BOTH, "method": ["auto", "exact"]},
    "dime": {
        "alpha": [0.5, 1.0, 2.0],
        "permutations": [1, 4],
        "seed": [0, 7],
        "unit": BOTH,
        "method": ["auto", "exact"],
    },
    "matrix_entropy": ENTROPY,
    "prompt_effective_rank": {"method": ["auto", "exact"]} | PREPARED,
    "anisotropy": {},
    "intrinsic_dimension": {"discard": [0.0, 0.1, 0.5]},
    "alpha_req": {"first": [1, 2], "last": [4, 100], "weighted": BOTH, "center": BOTH, "method": ["auto", "exact"]},
    "logdet_entropy": {"epsilon": [0.1, 0.5], "method": ["auto", "exact"]} | PREPARED,
    "first_token_share": {},
    "cka": {"unbiased": BOTH},
    "block_influence": {},
    "neighbor_overlap": {"k": [1, 4]},
    "half_match": {"center": BOTH},
    "alignment": {"center": BOTH},
    "uniformity": {"t": [0.5, 2.0], "center": BOTH},
}


def combinations() -> Iterator[tuple[str, dict[str, object]]]:
    for name, grid in GRID.items():
        for chosen in itertools.product(*grid.values()):
            yield name, dict(zip(grid, chosen, strict=True))


def by_function(name: str, texts: Corpus, **options: object) -> Tensor:
    """Return the value of the pure function for each layer, with all texts at once."""
    function: Callable[..., Tensor] = getattr(metrics, name)
    kind, layers = METRICS[name].kind, range(len(texts.states))
    if name in FIRST_IS_NAN:
        rows, extra = (texts.states, {"mask": texts.mask}) if kind == "tokens" else (texts.pooled, {})
        pairs = [function(rows[layer - 1], rows[layer], **extra, **options).mean() for layer in layers[1:]]
        return torch.stack([torch.tensor(torch.nan, dtype=torch.float64), *pairs])
    if name == "half_match":
        long = texts.mask.sum(dim=1) >= LEAST_TOKENS
        return torch.stack(
            [function(*half_means(states[long], texts.mask[long]), **options) for states in texts.states]
        )
    if name == "matrix_entropy":
        return torch.stack([function(states[texts.mask], **options) for states in texts.states])
    if kind == "tokens":
        return torch.stack([function(states, texts.mask, **options).nanmean() for states in texts.states])
    if kind == "pooled":
        return torch.stack([function(rows, **options) for rows in texts.pooled])
    inputs = [(views,) if name == "lidar" else views[:2] for views in texts.views]
    return torch.stack([function(*views, **options) for views in inputs])


@cache
def shifted(count: int, width: int) -> Corpus:
    """Return a corpus whose vectors have a mean, so that the order of centering and scaling matters."""
    texts = corpus(texts=count, width=width, layers=2)
    texts.pooled.add_(0.5)
    return texts


@pytest.mark.parametrize(("name", "options"), list(combinations()), ids=str)
def test_function_and_class_agree(name: str, options: dict[str, object]) -> None:
    sizes = [(13, 5), (6, 9), (1300, 5)] if name in ROWS else [(13, 5), (6, 9)]  # many rows are folded into a matrix
    for count, width in sizes:
        texts = shifted(count, width)
        batches = torch.arange(count).split(300 if count > 13 else 4)
        values = feed(make(name, range(2), **options), texts, batches).compute()
        expected = by_function(name, texts, **options)
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", METRICS)
def test_every_option_of_the_function_is_covered(name: str) -> None:
    parameters = inspect.signature(getattr(metrics, name)).parameters.values()
    assert {parameter.name for parameter in parameters if parameter.default is not parameter.empty} - {"mask"} == set(
        GRID[name]
    )


@pytest.mark.parametrize("option", ["center", "unit", "epsilon", "alpha", "step"])
@pytest.mark.parametrize("name", METRICS)
def test_option_that_the_function_lacks_is_refused(name: str, option: str) -> None:
    if option in GRID[name]:
        assert make(name, [0, 1], **{option: 1})
        return
    with pytest.raises((TypeError, ValueError), match=option):
        make(name, [0, 1], **{option: 1})


@pytest.mark.parametrize("name", sorted(set(ROWS) - {"alpha_req", "anisotropy"}))  # a spectrum of zeros has no slope
def test_identical_rows_have_no_spread_once_folded(name: str) -> None:
    same = torch.full((1300, 5), 0.3, dtype=torch.float64) * torch.arange(1.0, 6.0)
    metric = make(name, [0], center=True)
    for batch in same.split(300):
        metric.update(batch, layer=0)
    assert metric.compute().tolist() == [float(getattr(metrics, name)(same, center=True))] == [0.0]
