"""Metrics that lack texts: left out of a group, but not silently if they were named or if nothing is left."""

import pytest
import torch

from midlayer_encoders.metrics import LayerMetric, TooFewTextsError, make_metrics
from midlayer_encoders.metrics.feeding import compute_metrics, update_views


def fed(*names: str) -> dict[str, LayerMetric]:
    """Return metrics that have the vectors of two texts, too few for ``alpha_req``."""
    metrics = make_metrics(list(names), [0])
    update_views(metrics, [0], [torch.eye(2, 8)], [0, 1], 2)
    return metrics


def test_compute_metrics_of_a_group_leaves_out_what_lacks_texts() -> None:
    assert list(compute_metrics(fed("alpha_req", "anisotropy"), named=False)) == ["anisotropy"]


@pytest.mark.parametrize(("names", "named"), [(["alpha_req", "anisotropy"], True), (["alpha_req"], False)])
def test_compute_metrics_raises_if_named_or_nothing_is_left(names: list[str], named: bool) -> None:
    with pytest.raises(TooFewTextsError, match="Eigenvalues"):
        compute_metrics(fed(*names), named=named)
