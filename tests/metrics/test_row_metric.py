"""The memory of metrics of pooled rows is bounded."""

import torch
from torch import Tensor

from midlayer_encoders.metrics._layer_metric import copy_if_view
from tests.metrics.feeding import make


def rows(n: int, d: int) -> Tensor:
    generator = torch.Generator().manual_seed(n)
    return 3.0 + torch.randn(n, d, generator=generator) * torch.arange(1, d + 1) ** -0.5


def test_memory_is_bounded_by_the_width() -> None:
    metric = make("dataset_entropy", [0])
    for batch in rows(20_000, 4).split(500):
        metric.update(batch, layer=0)
    assert sum(map(len, metric.rows_0)) <= 1024
    assert [tuple(moment.shape) for moment in metric.sums_0] == [(1, 5, 5)]


def test_view_of_token_states_does_not_keep_them_in_memory() -> None:
    states = torch.randn(4, 100, 8)
    assert copy_if_view(states[:, 0]).untyped_storage().nbytes() == 4 * 8 * 4
    pooled = states.mean(dim=1)
    assert copy_if_view(pooled).data_ptr() == pooled.data_ptr(), "a tensor that owns its memory is not copied"
