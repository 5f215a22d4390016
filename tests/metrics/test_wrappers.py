"""Refused wrappers of torchmetrics, the old order of arguments, and refused types."""

import pytest
import torch
from torchmetrics.wrappers import BootStrapper, MinMaxMetric, Running

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.metrics import METRICS
from tests.metrics.feeding import corpus, feed, make

LAYERS = [3, 8]


@pytest.mark.parametrize("wrapper", [BootStrapper, MinMaxMetric, Running])
def test_wrappers_are_refused(wrapper: type) -> None:
    with pytest.raises(MidlayerError, match="Anisotropy must not be wrapped: torchmetrics' wrappers treat each update"):
        wrapper(make("anisotropy", LAYERS)).update(corpus().pooled[0], layer=3)


@pytest.mark.parametrize("name", METRICS)
def test_types_other_than_float64_are_refused(name: str) -> None:
    metric = make(name, range(3))
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        with pytest.raises(OptionError, match=f"`dst_type` must be torch.float64, .* but got {dtype}"):
            metric.set_dtype(dtype)
    values = feed(metric.set_dtype(torch.float64), corpus(), [torch.arange(13)]).compute()
    torch.testing.assert_close(
        values, feed(make(name, range(3)), corpus(), [torch.arange(13)]).compute(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", [name for name in METRICS if make(name, [0]).kind in ("views", "copies")])
def test_views_without_an_index_are_refused_with_the_cure(name: str) -> None:
    with pytest.raises(OptionError, match=r"`index` must be the position .* but got None. Pass index=torch.arange"):
        make(name, [0]).update(torch.ones(2, 2), layer=0, view=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", METRICS)
def test_converting_the_module_that_holds_a_metric_leaves_the_states_unchanged(name: str, dtype: torch.dtype) -> None:
    texts = corpus()
    batches = list(torch.arange(13).split(7))
    expected = feed(make(name, range(3)), texts, batches).compute()
    module = torch.nn.ModuleDict({"metric": feed(make(name, range(3)), texts, batches[:1])})
    module.to(dtype)
    actual = feed(module["metric"], texts, batches[1:]).compute()  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
