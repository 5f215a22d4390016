"""Spectral metrics of pooled rows are exact for any number of rows, and their memory is bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from midlayer_encoders.metrics._layer_metric import owned
from midlayer_encoders.metrics.row_metrics import RowMetric
from tests.metrics.feeding import make
from tests.metrics.test_layer_metric import ROWS

OPTIONS = {name: [{}] for name in ROWS} | {
    "dataset_entropy": [{}, {"center": True}, {"unit": True}, {"center": True, "unit": True}],
    "anisotropy": [{}],
}


def rows(n: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return 3.0 + torch.randn(n, d, generator=generator) * torch.arange(1, d + 1) ** -0.5


@pytest.mark.parametrize(("name", "options"), [(name, options) for name in ROWS for options in OPTIONS[name]])
def test_folding_many_rows_into_a_matrix_gives_the_same_value(name: str, options: dict[str, object]) -> None:
    from midlayer_encoders import metrics

    many = rows(1500, 6)
    metric = make(name, [0], **options)
    for batch in many.split(400):
        metric.update(batch, layer=0)
    assert isinstance(metric, RowMetric)
    assert metric.count.tolist() == [1200], "three batches are folded, the fourth is stored as rows"
    assert sum(map(len, metric.rows_0)) == 300
    expected = getattr(metrics, name)(many.double(), **({"first": 1} if name == "alpha_req" else {}), **options)
    torch.testing.assert_close(metric.compute()[0], expected, rtol=1e-10, atol=1e-12)


def test_memory_is_bounded_by_the_width() -> None:
    metric = make("dataset_entropy", [0])
    for batch in rows(20_000, 4).split(500):
        metric.update(batch, layer=0)
    assert sum(map(len, metric.rows_0)) <= 1024
    assert [tuple(moment.shape) for moment in metric.moment_0] == [(1, 4, 4)]


def test_view_of_token_states_does_not_keep_them_in_memory() -> None:
    states = torch.randn(4, 100, 8)
    assert owned(states[:, 0]).untyped_storage().nbytes() == 4 * 8 * 4
    pooled = states.mean(dim=1)
    assert owned(pooled).data_ptr() == pooled.data_ptr(), "a tensor that owns its memory is not copied"
