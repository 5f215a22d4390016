"""Metrics in one torchmetrics collection with compute groups give the same as each metric alone."""

import pytest
import torch
from torch import Tensor
from torchmetrics import MetricCollection

from midlayer_encoders.metrics import METRICS, LayerMetric
from midlayer_encoders.metrics.token_metrics import TokenMetric
from tests.metrics.feeding import Corpus, corpus, feed, make
from tests.metrics.test_layer_metric import SAMPLES

KINDS = ["tokens", "pooled", "views", "copies"]
MORE: list[tuple[str, dict[str, object]]] = [
    ("prompt_entropy", {"center": False}),
    ("prompt_entropy", {}),
    ("curvature", {"step": 2}),
    ("effective_rank", {"unit": True, "center": True}),
    ("logdet_entropy", {"unit": False}),
    ("cka", {"max_samples": 30}),
    ("infonce", {"max_samples": 30, "seed": 5}),
    ("alignment", {"center": False}),
    ("uniformity", {"t": 1.0}),
]
"""The same metrics with other options, one of them twice."""


def together(kind: str) -> dict[str, LayerMetric]:
    """Return every metric of a kind, on samples small enough to be capped."""
    capped = {name: {"max_samples": 40} if name in SAMPLES else {} for name in METRICS}
    combined = [*capped.items(), *MORE]
    return {
        f"{name}_{i}": make(name, [0, 1], **o) for i, (name, o) in enumerate(combined) if METRICS[name].kind == kind
    }


def same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, numbers in expected.items():
        output = f"{name}: {actual[name].tolist()} is not {numbers.tolist()}"
        torch.testing.assert_close(actual[name], numbers, rtol=1e-12, atol=1e-12, equal_nan=True, msg=output)


def fed(collection: MetricCollection, kind: str, texts: Corpus, batches: list[Tensor]) -> dict[str, Tensor]:
    """Return the values of a collection fed like one metric."""
    as_metric = next(iter(collection.values(copy_state=False)))
    for batch in batches:
        for layer in as_metric.layers:
            if kind == "tokens":
                collection.update(texts.states[layer, batch], texts.mask[batch], index=batch, layer=layer)
            elif kind == "pooled":
                collection.update(texts.pooled[layer, batch], index=batch, layer=layer)
            else:
                for view in range(texts.views.shape[1]):
                    collection.update(texts.views[layer, view, batch], view=view, index=batch, layer=layer)
    return collection.compute()


def alone(kind: str, texts: Corpus, batches: list[Tensor]) -> dict[str, Tensor]:
    return {name: feed(metric, texts, batches).compute() for name, metric in together(kind).items()}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_collection_gives_the_same_as_each_metric(kind: str) -> None:
    texts, second = corpus(texts=1300, layers=2), corpus(texts=60, layers=2, seed=1)
    batches, few = list(torch.arange(1300).split(500)), list(torch.arange(60).split(25))
    collection = MetricCollection(together(kind), compute_groups=True)
    same(fed(collection, kind, texts, batches), alone(kind, texts, batches))
    copy = collection.clone()
    collection.reset()
    same(fed(collection, kind, second, few), alone(kind, second, few))
    same(copy.compute(), alone(kind, texts, batches))
    assert all(len(group) == 1 for group in collection.compute_groups.values())


def test_short_texts_do_not_make_metrics_seem_equal() -> None:
    texts = corpus(texts=20, layers=2)
    texts.mask[:5, 1:] = False  # the first batch: one token each
    batches = list(torch.arange(20).split(5))
    collection = MetricCollection(together("tokens"))
    same(fed(collection, "tokens", texts, batches), alone("tokens", texts, batches))


def test_pending_sums_do_not_make_metrics_seem_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, batches = corpus(texts=20, layers=2), list(torch.arange(20).split(5))
    expected = alone("tokens", texts, batches)
    monkeypatch.setattr(TokenMetric, "_waits", lambda *_: True)
    same(fed(MetricCollection(together("tokens")), "tokens", texts, batches), expected)
