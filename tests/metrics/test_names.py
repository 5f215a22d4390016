"""Names of metrics: one for each, aliases from other papers, and names of the last release."""

from typing import Any

import pytest
import torch

from midlayer_encoders import metrics
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import (
    ALIASES,
    METRICS,
    PAPER_METRICS,
    EffectiveRank,
    LiDAR,
    effective_rank,
    lidar,
    make_metrics,
)
from midlayer_encoders.metrics.feeding import num_passes
from tests.metrics import oracles
from tests.metrics.feeding import corpus, feed
from tests.metrics.oracles import random_rows


def test_make_metrics_accepts_all_paper_and_names() -> None:
    assert list(make_metrics("all", [0, 1])) == list(METRICS)
    assert tuple(make_metrics("paper", [0, 1])) == PAPER_METRICS
    assert len(PAPER_METRICS) == 7
    assert list(make_metrics("lidar", [0])) == ["lidar"]
    assert make_metrics(["curvature"], [0, 4])["curvature"].layers == (0, 4)


@pytest.mark.parametrize("names", ["curvatur", ["lidar", "curvatur"]])
def test_make_metrics_suggests_names(names: str | list[str]) -> None:
    with pytest.raises(OptionError, match="Did you mean 'prompt_entropy', 'dataset_entropy' or 'matrix_entropy'"):
        make_metrics(["entropy"], layers=[0])
    with pytest.raises(OptionError, match="Did you mean 'curvature'"):
        make_metrics(names, [0])


@pytest.mark.parametrize(
    ("names", "match"),
    [
        ([], "^`metrics` must be .* but got none"),
        (["all"], "^`metrics` must be one of .* but got 'all'"),
        (None, "^`metrics` must be .* but got None. Write a list of names"),
        ([3], "^`metrics` must be one of .* but got 3"),
        ({"curvature"}, "^`metrics` must be .* Write a list of names"),
    ],
)
def test_make_metrics_expects_a_name(names: list[str], match: str) -> None:
    with pytest.raises(OptionError, match=match):
        make_metrics(names, [0])


ENTROPY = {"alpha": 1.0, "normalization": "raw", "method": "auto"}
SAMPLE = {"max_samples": 1000, "seed": 0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "prompt_entropy": {**ENTROPY, "center": True, "unit": True},
    "dataset_entropy": {**ENTROPY, "center": False, "unit": False},
    "effective_rank": {"center": False, "unit": False, "epsilon": 0.0, "method": "exact"},
    "curvature": {"step": 1},
    "infonce": {**SAMPLE, "temperature": 0.1},
    "lidar": {"views": 16, "max_samples": 500, "delta": 1e-4, "exponential": False, "method": "auto"},
    "dime": {**SAMPLE, "alpha": 1.0, "permutations": 10, "unit": True, "method": "auto"},
    "matrix_entropy": ENTROPY,
    "prompt_effective_rank": {"center": False, "unit": False, "method": "exact"},
    "anisotropy": {},
    "intrinsic_dimension": {**SAMPLE, "discard": 0.1},
    "alpha_req": {"first": 3, "last": 100, "weighted": True, "center": True, "method": "exact"},
    "logdet_entropy": {"epsilon": 0.5, "center": False, "unit": True, "method": "auto"},
    "first_token_share": {},
    "cka": {**SAMPLE, "unbiased": False},
    "block_influence": {},
    "neighbor_overlap": {**SAMPLE, "k": 10},
    "half_match": {**SAMPLE, "center": True},
    "alignment": {**SAMPLE, "center": True, "views": 2},
    "uniformity": {**SAMPLE, "t": 2.0, "center": True},
}
"""Values of other papers and releases can be compared only with the same options."""


@pytest.mark.parametrize("name", METRICS)
def test_defaults_are_those_of_published_values(name: str) -> None:
    metric = METRICS[name]([0, 1])
    attributes = [option for option in DEFAULTS[name] if option not in metric.options]
    assert {**metric.options, **{option: getattr(metric, option) for option in attributes}} == DEFAULTS[name]


@pytest.mark.parametrize("name", METRICS)
def test_metric_and_function_share_a_name_and_a_module(name: str) -> None:
    metric = METRICS[name]
    assert metric.__name__.lower() == name.replace("_", "")
    assert metric.__module__ == getattr(metrics, name).__module__


@pytest.mark.parametrize(("n", "d"), [(7, 4), (4, 7)])
def test_rankme_is_the_effective_rank_with_an_epsilon(n: int, d: int) -> None:
    rows = random_rows(n, d)
    rows[:, 0] = rows[:, 1]  # a zero singular value also has a share of epsilon
    expected = oracles.effective_rank(rows, epsilon=1e-7)  # equations 1 and 2 of Garrido et al. (2023)
    torch.testing.assert_close(effective_rank(rows, epsilon=1e-7), expected, rtol=1e-10, atol=0)
    assert abs(float(effective_rank(rows) - expected)) > 1e-7
    padded, mask = torch.cat([rows, torch.full((3, d), torch.nan)]), torch.arange(n + 3) < n
    torch.testing.assert_close(effective_rank(padded, mask=mask, epsilon=1e-7), expected, rtol=1e-10, atol=0)
    metric = make_metrics("rankme", [0])["rankme"]
    assert isinstance(metric, EffectiveRank)
    metric.update(rows, layer=0)
    torch.testing.assert_close(metric.compute()[0], expected, rtol=1e-10, atol=0)


def test_exp_lidar_is_the_exponential_of_lidar_for_any_number_of_views() -> None:
    texts = corpus(views=3)
    metric = make_metrics(["exp_lidar", "lidar"], range(3), views=3)["exp_lidar"]
    assert isinstance(metric, LiDAR)
    expected = torch.stack([lidar(views).exp() for views in texts.views])
    torch.testing.assert_close(feed(metric, texts, [torch.arange(13)]).compute(), expected)
    assert num_passes("exp_lidar", views=5) == 6


def test_aliases_are_not_separate_metrics() -> None:
    assert not set(ALIASES) & set(METRICS)
    assert all(name in METRICS for name, _ in ALIASES.values())
