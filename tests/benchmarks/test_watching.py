"""What the record measures beside the callback, against the same numbers made from the states of hooks."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.pretraining import watching
from benchmarks.pretraining.corpus import PAD, read_tokenizer, train_tokenizer
from benchmarks.pretraining.models import VARIANTS, LanguageModel, Pretraining, Size, Variant, language_model, pl
from benchmarks.pretraining.tasks import padded
from benchmarks.pretraining.watching import MEASURED, Aside
from midlayer_encoders.metrics import make_metrics
from tests.callbacks.training import ADVICE
from tests.metrics.feeding import Corpus, feed

pytestmark = ADVICE
DRAW = random.Random(5)
TEXTS = ["".join(DRAW.choices("abcdefghijklm nopq rst", k=length)) for length in range(6, 30)]
VIEWS = [[text[cut:] + " x" for text in TEXTS] for cut in (1, 2, 3)]
LAYERS = range(3)


def made(variant: Variant) -> LanguageModel:
    """Return a model whose states are unlike from layer to layer, and huge where there is padding."""
    model = language_model(variant, Size(blocks=2, width=64, vocab=320, length=64))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.backbone.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    model.backbone.get_input_embeddings().weight.data[PAD] *= 1000
    return model


@dataclass(frozen=True)
class Looked:
    """A model, what measured it, and the values over the layers by kind and name."""

    model: LanguageModel
    aside: Aside
    found: dict[tuple[str, str], dict[int, float]]


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Looked]:
    folder = tmp_path_factory.mktemp("data")
    train_tokenizer(TEXTS, 300).backend_tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = read_tokenizer(folder, bos=True)

    @cache
    def look(name: str) -> Looked:
        model = made(VARIANTS[name])
        aside = Aside([0], TEXTS, VIEWS, tokenizer, sinks=8)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(watching, "BATCH_TOKENS", 600)  # several batches, some of texts and views
            return Looked(model, aside, values(aside, model))

    return look


def values(aside: Aside, model: LanguageModel) -> dict[tuple[str, str], dict[int, float]]:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    actual: dict[tuple[str, str], dict[int, float]] = {}
    for row in aside.look(trainer, Pretraining(model, VARIANTS["base"])):
        assert row["depth"] == row["layer"] / 2
        by_layer = actual.setdefault((row["dataset"], row["name"]), {})
        assert row["layer"] not in by_layer
        by_layer[row["layer"]] = row["value"]
    return actual


@torch.no_grad()
def states_of(backbone: Any, ids: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return the raw states of every layer, by hooks, ``(L, N, T, D)``, and the mask ``(N, T)``."""
    saved: list[Tensor] = []
    parts = [backbone.get_input_embeddings(), *backbone.layers]  # GPTNeoX's dropout after the embeddings is 0
    hooks = [
        part.register_forward_hook(lambda _, __, out: saved.append(out if isinstance(out, Tensor) else out[0]))
        for part in parts
    ]
    inputs = padded(ids, torch.device("cpu"))
    backbone(**inputs, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(saved), inputs["attention_mask"].bool()


def entropy_of_raw_states(states: Tensor, mask: Tensor) -> float:
    """Return the mean over texts of the entropy of the eigenvalues of their Gram matrix, of states as they are."""
    actual = []
    for text, real in zip(states, mask, strict=True):
        shares = torch.linalg.svdvals(text[real].double()) ** 2
        shares = shares / shares.sum()
        shares = shares[shares > 0]
        actual.append(float(-(shares * shares.log()).sum()))
    return sum(actual) / len(actual)


@pytest.mark.parametrize("name", ["base", "gpt-neox"])
def test_every_kind_is_the_package_s_metric_of_its_states(name: str, looked: Callable[[str], Looked]) -> None:
    actual, backbone = looked(name).found, looked(name).model.backbone.eval()
    expected = {"largest_state", "largest_token", "largest_dimension", "prompt_entropy_raw", "attention_sink_rate"}
    assert {item for kind, item in actual if kind == "probe"} == expected
    raw, mask = states_of(backbone, looked(name).aside.ids)
    with torch.no_grad():
        normed = (backbone.norm if name == "base" else backbone.final_layer_norm)(raw)
    kinds = {"probe": raw, "probe-later": raw[:, :, 1:], "probe-normed": normed, "probe-normed-later": normed[:, :, 1:]}
    assert {kind for kind, _ in actual} == kinds.keys()
    for kind, states in kinds.items():
        real = mask[:, 1:] if "later" in kind else mask
        pooled = (states * real[..., None]).sum(2) / real.sum(1)[:, None]
        views = pooled[:, len(TEXTS) :].unflatten(1, (len(VIEWS), len(TEXTS)))
        corpus = Corpus(states[:, : len(TEXTS)], real[: len(TEXTS)], pooled[:, : len(TEXTS)], views)
        for layer in LAYERS:
            entropy = entropy_of_raw_states(corpus.states[layer], corpus.mask)
            assert actual[kind, "prompt_entropy_raw"][layer] == pytest.approx(entropy, rel=1e-4), (kind, layer)
        if kind == "probe":
            continue
        every = make_metrics(MEASURED, LAYERS, views=len(VIEWS))
        if kind != "probe-normed":
            every.pop("first_token_share")  # says nothing without the first token, and raw the callback has it
        assert {name for item, name in actual if item == kind} == {*every, "prompt_entropy_raw"}
        for item, metric in every.items():
            values = dict(zip(LAYERS, feed(metric, corpus, [torch.arange(len(TEXTS))]).compute().tolist(), strict=True))
            assert actual[kind, item] == pytest.approx(values, rel=1e-3, abs=1e-5, nan_ok=True), (kind, item)


def test_the_largest_state_is_found_with_its_token_and_its_dimension(looked: Callable[[str], Looked]) -> None:
    actual, backbone = looked("base").found, looked("base").model.backbone.eval()
    states, mask = states_of(backbone, looked("base").aside.ids[: len(TEXTS)])
    for layer in LAYERS:
        all_values = [
            (abs(value), token, dimension)
            for text, real in zip(states[layer], mask, strict=True)
            for token, state in enumerate(text[real].tolist())
            for dimension, value in enumerate(state)
        ]
        largest = max(all_values, key=lambda item: item[0])
        names = ("largest_state", "largest_token", "largest_dimension")
        assert [actual["probe", name][layer] for name in names] == pytest.approx(largest)


@pytest.mark.parametrize("name", ["base", "gpt-neox"])
def test_sink_rates_are_those_of_each_text_alone(name: str, looked: Callable[[str], Looked]) -> None:
    backbone = made(VARIANTS[name]).backbone.eval()
    backbone.set_attn_implementation("eager")
    rates = torch.zeros(2)
    for ids in looked(name).aside.ids[:8]:
        with torch.no_grad():
            attentions = backbone(input_ids=torch.tensor([ids]), output_attentions=True).attentions
        for layer, attention in enumerate(attentions):
            rates[layer] += (attention[0, :, :, 0].mean(-1) > 0.3).float().mean() / 8  # of the heads
    assert 0 < rates.sum() < 2, "some sink, some do not"
    assert looked(name).found["probe", "attention_sink_rate"] == pytest.approx(dict(enumerate(rates.tolist(), 1)))


def test_a_second_measurement_is_equal_and_leaves_the_model_as_it_was(looked: Callable[[str], Looked]) -> None:
    model, aside = looked("base").model.train(), looked("base").aside
    model.backbone.layers[1].eval()
    modes = {module: module.training for module in model.backbone.modules()}
    usual, figure = model.backbone.config._attn_implementation, torch.get_rng_state()
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    for item, by_layer in values(aside, model).items():
        assert by_layer == pytest.approx(looked("base").found[item], rel=1e-3, abs=1e-5, nan_ok=True), (
            item
        )  # another batch
    assert {module: module.training for module in model.backbone.modules()} == modes
    assert model.backbone.config._attn_implementation == usual == "sdpa"
    assert torch.equal(torch.get_rng_state(), figure)
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
