"""Metrics in torchmetrics' wrappers, converted modules, and views without an index."""

import pytest
import torch
from torchmetrics.wrappers import BootStrapper, ClasswiseWrapper, MetricTracker, MinMaxMetric, Running

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import METRICS
from tests.metrics.feeding import corpus, feed, make, value

LAYERS = [3, 8]
VALUES = value("anisotropy", corpus(layers=2))


def update(wrapper: torch.nn.Module) -> None:
    """Update a wrapped metric of pooled vectors with both layers of a corpus, in two batches."""
    for batch in torch.arange(13).split(7):
        for row, layer in enumerate(LAYERS):
            wrapper.update(corpus(layers=2).pooled[row, batch], layer=layer)  # type: ignore[operator]


def test_bootstrapper_draws_the_rows_of_each_update() -> None:
    wrapper = BootStrapper(make("anisotropy", LAYERS), num_bootstraps=40, raw=True, sampling_strategy="multinomial")
    torch.manual_seed(0)
    update(wrapper)
    torch.manual_seed(0)
    draws = [make("anisotropy", LAYERS) for _ in range(40)]
    for batch in torch.arange(13).split(7):
        for row, layer in enumerate(LAYERS):
            for metric in draws:
                drawn = torch.multinomial(torch.ones(len(batch)), len(batch), replacement=True)
                metric.update(corpus(layers=2).pooled[row, batch][drawn], layer=layer)
    expected = torch.stack([metric.compute() for metric in draws])
    torch.testing.assert_close(wrapper.compute()["raw"], expected, rtol=0, atol=0)
    assert wrapper.compute()["std"].shape == (2,)


def test_tracker_and_classwise_wrapper_give_the_values() -> None:
    tracker = MetricTracker(make("anisotropy", LAYERS), maximize=True)
    for _ in range(2):
        tracker.increment()
        update(tracker)
    torch.testing.assert_close(tracker.compute_all(), VALUES.expand(2, 2))
    by_layer = ClasswiseWrapper(make("anisotropy", LAYERS), labels=["layer_3", "layer_8"])
    update(by_layer)
    assert list(by_layer.compute()) == ["anisotropy_layer_3", "anisotropy_layer_8"]
    torch.testing.assert_close(torch.stack(list(by_layer.compute().values())), VALUES)


def test_torchmetrics_refuses_what_counts_updates_or_needs_one_number() -> None:
    min_max = MinMaxMetric(make("anisotropy", LAYERS))
    update(min_max)
    with pytest.raises(RuntimeError, match="should be a float or scalar tensor"):
        min_max.compute()
    with pytest.raises(ValueError, match="`full_state_update` set to `False` but got True"):
        Running(make("anisotropy", LAYERS))
    with pytest.raises(
        RuntimeError, match="``merge_state`` is not supported for metrics with ``full_state_update=True``"
    ):
        make("curvature", LAYERS).merge_state(make("curvature", LAYERS))


@pytest.mark.parametrize("name", METRICS)
def test_set_dtype_leaves_the_states_in_float64(name: str) -> None:
    texts = corpus()
    batches = list(torch.arange(13).split(7))
    expected = feed(make(name, range(3)), texts, batches).compute()
    metric = feed(make(name, range(3)), texts, batches[:1]).set_dtype(torch.float16)
    actual = feed(metric, texts, batches[1:]).compute()  # type: ignore[arg-type]
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


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
