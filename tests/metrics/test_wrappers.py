"""Metrics inside torchmetrics' wrappers, the old order of arguments, and refused types."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor
from torchmetrics.wrappers import BootStrapper, MinMaxMetric, Running

from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.metrics import METRICS, PromptEntropy
from midlayer_encoders.metrics.token_metrics import WaitingTokenMetric
from tests.metrics.feeding import Corpus, corpus, feed, make
from tests.metrics.test_uniformity import uniformity_by_definition

COMPARING = [name for name in METRICS if make(name, [0])._compares]
LAYERS = [3, 8]


def draws(seed: int, texts: int, updates: int, bootstraps: int) -> np.ndarray:
    """Return the rows that BootStrapper draws, shape ``(updates, bootstraps, texts)``."""
    torch.manual_seed(seed)
    rows = [torch.multinomial(torch.ones(texts), texts, replacement=True) for _ in range(updates * bootstraps)]
    return torch.stack(rows).reshape(updates, bootstraps, texts).numpy()


def mean_cosine(rows: np.ndarray) -> float:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = unit @ unit.T
    return float((cosines.sum() - np.trace(cosines)) / (len(rows) * (len(rows) - 1)))


def first_share(states: np.ndarray, mask: np.ndarray) -> float:
    energy = np.where(mask, (states**2).sum(axis=2), 0.0)
    return float((energy[:, 0] / energy.sum(axis=1)).mean())


def bootstrapped(name: str, texts: Corpus) -> Tensor:
    """Return the values of each bootstrap sample, shape ``(4, 2)``, after two batches of two layers."""
    wrapper = BootStrapper(make(name, LAYERS), num_bootstraps=4, raw=True, sampling_strategy="multinomial")
    torch.manual_seed(5)
    for batch in (slice(0, 6), slice(6, 12)):
        for row, layer in enumerate(LAYERS):
            if name == "first_token_share":
                wrapper.update(texts.states[row, batch], texts.mask[batch], layer=layer)
            else:
                wrapper.update(texts.pooled[row, batch], layer=layer)
    return wrapper.compute()["raw"]


@pytest.mark.parametrize("name", ["anisotropy", "uniformity", "first_token_share"])
def test_bootstrap_samples_have_the_values_of_the_drawn_texts(name: str) -> None:
    texts = corpus(texts=12)
    with torch.random.fork_rng():
        actual = bootstrapped(name, texts)
        rows = draws(5, 6, 4, 4)  # the updates are batch 0 at both layers, then batch 1 at both
    for sample in range(4):
        for column in range(2):
            drawn = np.concatenate([rows[column, sample], 6 + rows[2 + column, sample]])
            if name != "first_token_share":
                oracle = mean_cosine if name == "anisotropy" else uniformity_by_definition
                expected = oracle(texts.pooled[column].numpy()[drawn])
            else:
                expected = first_share(texts.states[column].numpy()[drawn], texts.mask.numpy()[drawn])
            assert float(actual[sample, column]) == pytest.approx(expected, rel=1e-10)


def test_bootstrap_calls_that_would_draw_the_wrong_texts_are_refused() -> None:
    texts = corpus()
    for name in ("anisotropy", "intrinsic_dimension"):
        wrapper = BootStrapper(make(name, LAYERS), num_bootstraps=2)
        with pytest.raises(OptionError, match="BootStrapper needs the tensors first, then `layer` as a keyword"):
            wrapper.update(3, texts.pooled[0])
        with pytest.raises(OptionError, match="BootStrapper needs the tensors first"):
            wrapper.update(layer=3, embeddings=texts.pooled[0])
    with pytest.raises(OptionError, match="`index` must be None in a BootStrapper of IntrinsicDimension"):
        wrapper.update(texts.pooled[0], layer=3, index=torch.arange(13))
    for name in COMPARING:
        compared = "two layers" if make(name, [0]).kind not in ("views", "copies") else "the views"
        with pytest.raises(MidlayerError, match=f"compares {compared} of the same texts. Draw the texts yourself"):
            BootStrapper(make(name, LAYERS), num_bootstraps=2).update(texts.pooled[0], layer=3)


@pytest.mark.parametrize("name", METRICS)
def test_old_order_of_arguments_gives_the_same_values_with_a_warning(name: str) -> None:
    texts = corpus()
    index = torch.arange(13)
    old, new = make(name, range(3)), feed(make(name, range(3)), texts, [index])
    for layer in range(3):
        calls: list[tuple[tuple[Tensor, ...], dict[str, int]]] = {
            "tokens": [((texts.states[layer], texts.mask), {})],
            "pooled": [((texts.pooled[layer],), {})],
            "views": [((rows,), {"view": view}) for view, rows in enumerate(texts.views[layer])],
        }[old.kind.replace("copies", "views")]
        for tensors, options in calls:
            with pytest.warns(DeprecationWarning, match=r"is now `update\(states, layer=layer\)`"):
                old.update(layer, *tensors, **options, index=index)
    torch.testing.assert_close(old.compute(), new.compute(), rtol=0, atol=0, equal_nan=True)


def test_old_order_works_in_forward_and_in_copies() -> None:
    rows = corpus().pooled[0]
    plain = make("anisotropy", [0])
    for metric in (plain, copy.deepcopy(plain), pickle.loads(pickle.dumps(plain))):
        with pytest.warns(DeprecationWarning, match="0.4 will remove the old order"):
            value = metric(0, rows)
        assert float(value) == pytest.approx(mean_cosine(rows.numpy()))
        assert float(metric.compute()) == float(value)


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


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("call", ["update", "forward"])
def test_running_window_holds_the_last_updates_of_all_layers(
    call: str, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WaitingTokenMetric, "_waits", lambda *_: waits)
    texts = corpus(texts=12)
    wrapper = Running(PromptEntropy(LAYERS), window=4)  # two batches of two layers
    expected = PromptEntropy(LAYERS)
    for start in (0, 4, 8):
        batch = slice(start, start + 4)
        for row, layer in enumerate(LAYERS):
            getattr(wrapper, call)(texts.states[row, batch], texts.mask[batch], layer=layer)
            if start:
                expected.update(texts.states[row, batch], texts.mask[batch], layer=layer)
    torch.testing.assert_close(wrapper.compute(), expected.compute(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["anisotropy", "uniformity"])
def test_running_window_of_stored_vectors_raises(name: str) -> None:
    texts = corpus()
    wrapper = Running(make(name, [0]), window=2)
    wrapper.update(texts.pooled[0], layer=0)
    with pytest.raises(MidlayerError, match="must be at least 2, but there are 0"):
        wrapper.compute()


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


def test_min_max_needs_a_metric_of_one_layer() -> None:
    texts = corpus()
    wrapper = MinMaxMetric(make("anisotropy", [4]))
    values = []
    for row in range(3):
        wrapper.update(texts.pooled[row], layer=4)
        values.append(float(wrapper.compute()["raw"]))
    assert (float(wrapper.compute()["min"]), float(wrapper.compute()["max"])) == (min(values), max(values))
    several = MinMaxMetric(make("anisotropy", LAYERS))
    for row, layer in enumerate(LAYERS):
        several.update(texts.pooled[row], layer=layer)
    with pytest.raises(RuntimeError, match="should be a float or scalar tensor"):
        several.compute()
