"""Private parts of torchmetrics that `LayerMetric` uses: each test fails when a release renames or changes one."""

import copy
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.wrappers import BootStrapper, MinMaxMetric, Running


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

    def _wrap_update(self, update: Callable[..., None]) -> Callable[..., None]:
        wrapped = super()._wrap_update(update)

        def record_caller(*args: Any, **kwargs: Any) -> None:
            self.calls.append(f"update from {sys._getframe(1).f_globals['__name__']}")
            wrapped(*args, **kwargs)

        return record_caller

    def _wrap_compute(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        wrapped = super()._wrap_compute(compute)
        return lambda: wrapped().reshape(-1)

    def _apply(self, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Metric:
        self.calls.append("apply")
        super()._apply(fn, *args, **kwargs)
        return self

    def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any | None = None) -> None:
        self.calls.append(f"sync {process_group}")
        super()._sync_dist(dist_sync_fn, process_group)


@pytest.fixture
def metric() -> Recorder:
    Recorder.calls.clear()
    return Recorder()


@pytest.mark.parametrize("clone", [lambda metric: metric, copy.deepcopy])
def test_update_and_compute_are_wrapped(metric: Recorder, clone: Callable[[Recorder], Recorder]) -> None:
    metric = clone(metric)
    metric.update(torch.ones(3))
    assert metric.calls == [f"update from {__name__}"]
    assert metric.compute().tolist() == [3.0]


@pytest.mark.parametrize("wrapper", [BootStrapper, MinMaxMetric, Running])
def test_wrapper_updates_a_metric_from_its_own_module(metric: Recorder, wrapper: type) -> None:
    wrapper(metric).update(torch.ones(3))
    assert metric.calls[0] == f"update from {wrapper.__module__}"
    assert wrapper.__module__.startswith("torchmetrics.wrappers.")


def test_conversion_of_the_module_around_a_metric_applies_to_its_states(metric: Recorder) -> None:
    metric.update(torch.ones(3))
    nn.ModuleDict({"metric": metric}).to(torch.bfloat16)
    assert metric.calls[-1] == "apply"
    assert metric.total.dtype == torch.bfloat16


def test_sync_passes_its_group_to_the_overridden_method(metric: Recorder) -> None:
    metric.update(torch.ones(3))
    metric.sync(lambda state, group: [state, state], process_group="a group", distributed_available=lambda: True)
    assert metric.calls[-1] == "sync a group"
    assert metric.total.tolist() == [6.0]


def test_defaults_distinguish_lists_from_tensors(metric: Recorder) -> None:
    assert {name: type(default) for name, default in metric._defaults.items()} == {"total": Tensor, "rows": list}
