"""Every option of every metric: class and function agree, and the option has an effect where it should."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from midlayer_encoders import metrics
from midlayer_encoders.metrics import METRICS
from midlayer_encoders.metrics._sample_metric import SampleMetric
from tests.metrics.feeding import OPTIONS, Corpus, corpus, value

TEXTS = corpus(texts=17, layers=3, tokens=9, width=6, views=3, seed=5)

CHANGED: dict[str, dict[str, Any]] = {
    "prompt_entropy": {"alpha": 2.0, "normalization": "logN", "center": False, "unit": False},
    "dataset_entropy": {"alpha": 2.0, "normalization": "maxEntropy", "center": True, "unit": True},
    "effective_rank": {"center": True, "unit": True, "epsilon": 0.1},
    "curvature": {"step": 2},
    "infonce": {"temperature": 0.5},
    "lidar": {"views": 2, "delta": 0.5, "exponential": True},
    "dime": {"alpha": 3.0, "permutations": 3, "unit": False, "seed": 1},
    "matrix_entropy": {"alpha": 2.0, "normalization": "logD"},
    "prompt_effective_rank": {"center": True, "unit": True},
    "anisotropy": {},
    "intrinsic_dimension": {"discard": 0.4},
    "alpha_req": {"first": 2, "last": 4, "weighted": False, "center": False},
    "logdet_entropy": {"epsilon": 0.1, "center": True, "unit": False},
    "first_token_share": {},
    "cka": {"unbiased": True},
    "block_influence": {},
    "neighbor_overlap": {"k": 5},
    "half_match": {"center": False},
    "alignment": {"center": False},
    "uniformity": {"t": 1.0, "center": False},
}
"""A non-default value of each option."""

SAMPLED = [name for name, metric in METRICS.items() if issubclass(metric, SampleMetric)]


def halves(text: Tensor) -> tuple[Tensor, Tensor]:
    middle = len(text) // 2
    return text[:middle].mean(dim=0), text[middle:].mean(dim=0)


def of_one_layer(name: str, texts: Corpus, row: int, **options: Any) -> Tensor:
    """Return the function's value for one layer: for each text without padding, all tokens, or all texts."""
    function = getattr(metrics, name)
    before = row - 1
    match name:
        case "prompt_entropy" | "curvature" | "prompt_effective_rank" | "first_token_share":
            values = torch.stack([function(text, **options) for text in texts.texts[row]])
            return values[~values.isnan()].mean()
        case "matrix_entropy":
            return function(torch.cat(texts.texts[row]), **options)  # type: ignore[no-any-return]
        case "block_influence":
            pairs = zip(texts.texts[before], texts.texts[row], strict=True)
            return torch.stack([function(item, other_item) for item, other_item in pairs]).mean()
        case "half_match":
            long_enough = [text for text in texts.texts[row] if len(text) >= 4]
            first, second = zip(*map(halves, long_enough), strict=True)
            return function(torch.stack(first), torch.stack(second), **options)  # type: ignore[no-any-return]
        case "cka" | "neighbor_overlap":
            return function(texts.pooled[before], texts.pooled[row], **options)  # type: ignore[no-any-return]
        case "lidar":
            return function(texts.views[row, : options.pop("views")], **options)  # type: ignore[no-any-return]
        case "infonce" | "dime" | "alignment":
            return function(texts.views[row, 0], texts.views[row, 1], **options)  # type: ignore[no-any-return]
    return function(texts.pooled[row], **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", METRICS)
def test_every_option_is_covered_here(name: str) -> None:
    """A new option must be added above, or its class could ignore it unnoticed."""
    parameters = inspect.signature(getattr(metrics, name)).parameters.values()
    known_values = {parameter.name for parameter in parameters if parameter.default is not parameter.empty} - {
        "mask",
        "method",
    }
    assert known_values == set(CHANGED[name]) - {"views"}


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in METRICS for option in (None, *CHANGED[name])])
def test_class_and_function_agree_for_each_option(name: str, option: str | None) -> None:
    options = OPTIONS.get(name, {}) | ({} if option is None else {option: CHANGED[name][option]})
    actual = value(name, TEXTS, **options)
    rows = [row for row in range(3) if not actual[row].isnan()]
    assert rows == ([1, 2] if name in ("cka", "neighbor_overlap", "block_influence") else [0, 1, 2])
    expected = torch.stack([of_one_layer(name, TEXTS, row, **options).double() for row in rows])
    torch.testing.assert_close(actual[rows], expected, rtol=1e-6, atol=1e-9)
    if option is not None:
        plain = value(name, TEXTS)
        differ = [row for row in rows if not plain[row].isnan()]
        assert ((actual - plain)[differ].abs() > 1e-4).any(), f"{option} changes nothing"


@pytest.mark.parametrize("name", SAMPLED)
def test_seed_draws_another_sample_of_the_requested_size(name: str) -> None:
    """If all texts fit, all are used for any seed; otherwise the seed selects some."""
    all_of_them = value(name, TEXTS)
    if name != "dime":  # its seed also shuffles
        assert torch.equal(value(name, TEXTS, seed=9).nan_to_num(), all_of_them.nan_to_num())
    assert torch.equal(value(name, TEXTS, max_samples=17).nan_to_num(), all_of_them.nan_to_num())
    sample = [value(name, TEXTS, max_samples=9, seed=seed).nan_to_num() for seed in (0, 40, 40)]
    assert not torch.equal(sample[0], all_of_them.nan_to_num())
    assert not torch.equal(sample[0], sample[1])
    assert torch.equal(sample[1], sample[2])


@pytest.mark.parametrize(
    "name", [name for name in METRICS if "method" in inspect.signature(getattr(metrics, name)).parameters]
)
def test_every_method_gives_the_same_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    exact = value(name, TEXTS, method="exact")
    for method in ("auto", "fast"):
        assert torch.equal(value(name, TEXTS, method=method), exact)


@pytest.mark.parametrize("name", [name for name, item in METRICS.items() if item.kind == "tokens"])
def test_padding_on_either_side_and_between_batches_is_ignored(name: str) -> None:
    """Each text alone with padding on the left, compared with all at once with padding on the right."""
    expected = value(name, TEXTS)
    layers = range(len(TEXTS.states))
    metric = METRICS[name](list(layers), **OPTIONS.get(name, {}))
    for place in torch.randperm(17, generator=torch.Generator().manual_seed(1)).tolist():
        extra = place % 4
        states, mask = TEXTS.states[:, place, TEXTS.mask[place]], TEXTS.mask[place][TEXTS.mask[place]]
        filled = torch.full((3, extra, states.shape[-1]), -50.0, dtype=states.dtype)
        states, mask = torch.cat([filled, states], dim=1), torch.cat([torch.zeros(extra, dtype=torch.bool), mask])
        for layer in layers:
            metric.update(states[layer][None], mask[None], index=torch.tensor([place]), layer=layer)
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-9, atol=1e-12, equal_nan=True)
