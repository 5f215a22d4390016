"""Private parts of torchmetrics that `LayerMetric` uses: each test fails when a release renames or changes one."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric


class Recorder(Metric):
    """A metric that records the calls of the methods that `LayerMetric` overrides; its copies share the record."""

    calls: ClassVar[list[str]] = []
    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(1), dist_reduce_fx="sum")
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, rows: Tensor) -> None:
        self.total = self.total + rows.sum()

    def compute(self) -> Tensor:
        return self.total

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = super()._wrap_compute(compute)
        return lambda: wrapped().reshape(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Metric:
        self.calls.append("apply")
        super()._apply(fn, *args, **kwargs)
        return self


@pytest.fixture
def metric() -> Recorder:
    Recorder.calls.clear()
    return Recorder()


@pytest.mark.parametrize("clone", [lambda metric: metric, copy.deepcopy])
def test_compute_is_wrapped(metric: Recorder, clone: Callable[[Recorder], Recorder]) -> None:
    metric = clone(metric)
    metric.update(torch.ones(3))
    assert metric.compute().tolist() == [3.0]


def test_conversion_of_the_module_around_a_metric_applies_to_its_states(metric: Recorder) -> None:
    metric.update(torch.ones(3))
    nn.ModuleDict({"metric": metric}).to(torch.bfloat16)
    assert metric.calls[-1] == "apply"
    assert metric.total.dtype == torch.bfloat16


def test_sync_gathers_an_empty_list_as_an_empty_tensor(metric: Recorder) -> None:
    metric.total += 3
    gathered: list[tuple[int, ...]] = []

    def gather(state: Tensor, group: Any) -> list[Tensor]:
        assert group == "a group"
        gathered.append(tuple(state.shape))
        return [state, state]

    metric.dist_sync_fn = gather
    metric.sync(gather, process_group="a group", distributed_available=lambda: True)
    assert gathered == [(1,), (0,)]
    assert metric.total.tolist() == [6.0]
    assert metric.rows.tolist() == []
