"""The token experiments, compared with hidden states of one text at a time."""

from collections.abc import Sequence
from functools import partial

import polars as pl
import pytest
import torch
from polars.testing import assert_frame_equal
from torch import Tensor

from benchmarks.paper import token_experiments
from benchmarks.paper.sites import block_sites
from benchmarks.paper.token_experiments import (
    PROBABILITIES,
    REPLACEMENTS,
    entropy_along,
    extreme_prompts,
    replaced,
    shortened,
    subblocks,
)
from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.metrics import prompt_effective_rank, prompt_entropy
from midlayer_encoders.models.anatomy import find_anatomy
from tests.support.families import DEPTH
from tests.support.tiny_folders import TEXTS, Folder

LONG = [text for text in TEXTS if text != "short"]
PRE_NORM = ["residual_in", "attention_in", "attention", "residual_mid", "mlp_in", "mlp", "residual_out"]
SITES = {
    "Llama": PRE_NORM,
    "GPT2": PRE_NORM,
    "GPTNeoX": [site for site in PRE_NORM if site != "residual_mid"],  # attention and MLP are parallel
    "BERT": [*PRE_NORM[:3], "attention_sum", *PRE_NORM[3:6], "mlp_sum", "residual_out"],
    "Mamba": ["residual_in", "attention_in", "attention", "residual_out"],
}


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.fixture(scope="module")
def bert(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("BERT"), -1, device="cpu")


def hidden_states(encoder: LayerEncoder, ids: Sequence[int], layer: int) -> Tensor:
    """Return the hidden states of a single text, shape ``(1, T, D)``."""
    with torch.no_grad():
        outputs = encoder[0].model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return outputs.hidden_states[layer]


# --- along a text -----------------------------------------------------------------------------------------------------


def test_batches_do_not_change_the_frame(llama: LayerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = entropy_along(llama, LONG, stride=3, dataset="solutions")
    monkeypatch.setattr(token_experiments, "_TOKEN_BUDGET", 64)
    single = entropy_along(llama, LONG, stride=3, dataset="solutions")
    assert single.columns == [*FRAME_SCHEMA, "position", "deviation", "texts"]
    assert set(single["dataset"]) == {"solutions"}
    assert_frame_equal(single, whole, rel_tol=1e-3, abs_tol=1e-4)


@pytest.mark.parametrize("layer", [1, 2])
def test_one_pass_equals_a_pass_per_prefix(layer: int, llama: LayerEncoder) -> None:
    frame = entropy_along(llama, LONG, stride=5).filter(layer=layer)
    assert set(frame["depth"]) == {layer / DEPTH}
    for position, texts, value, deviation in frame.select("position", "texts", "value", "deviation").iter_rows():
        ids = [llama.tokenizer(text[:position])["input_ids"] for text in LONG if len(text) >= position]
        assert texts == len(ids)
        separate = torch.cat([prompt_entropy(hidden_states(llama, text_ids, layer)) for text_ids in ids]).double()
        expected = (float(separate.mean()), float(separate.std(correction=0)))
        assert (value, deviation) == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert frame["position"].max() == 5 * (max(map(len, LONG)) // 5)  # a token is a character


def test_bidirectional_model_is_refused(bert: LayerEncoder) -> None:
    with pytest.raises(OptionError, match=r"must hold a causal model.* attends to the last"):
        entropy_along(bert, LONG)


def test_length_limits_of_encoder_and_experiment_both_apply(tiny_folder: Folder, llama: LayerEncoder) -> None:
    short = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=9)
    assert entropy_along(short, LONG)["position"].max() == 9
    assert entropy_along(llama, LONG, stride=6, max_length=20)["position"].unique().sort().to_list() == [6, 12, 18]
    assert subblocks(short, LONG).equals(subblocks(short, [text[:9] for text in LONG]))


def test_short_texts_and_models_are_refused(llama: LayerEncoder, tiny_folder: Folder) -> None:
    for experiment in (entropy_along, extreme_prompts, subblocks):
        with pytest.raises(OptionError, match=r"3 tokens or more each, but 'ab' has 2\. Leave it out"):
            experiment(llama, [LONG[0], "ab"])
        with pytest.raises(OptionError, match="`texts` must hold 2 texts or more, but got 1"):
            experiment(llama, LONG[:1])
        with pytest.raises(OptionError, match="3 blocks or more"):
            experiment(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), LONG)


# --- extreme prompts --------------------------------------------------------------------------------------------------


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_tokens_are_replaced_with_their_probability_and_special_tokens_stay(kind: str) -> None:
    ids = [1, *range(10, 1010), 2]
    replace_tokens = partial(replaced, ids, kind=kind, vocabulary=range(5000, 6000), fixed=(1, 2))
    assert replace_tokens(0.0, generator=generator()) == ids
    for probability in (0.25, 1.0):
        new_ids = replace_tokens(probability, generator=generator())
        assert (new_ids[0], new_ids[-1], len(new_ids)) == (1, 2, len(ids))
        changed = [new for old, new in zip(ids, new_ids, strict=True) if old != new]
        assert len(changed) == pytest.approx(1000 * probability, abs=45)
        if kind == "randomness":
            assert all(5000 <= token < 6000 for token in changed)
        else:
            assert set(changed) <= set(ids[1:-1])
            assert (len(set(changed)) == 1) == (kind == "repetition")


def test_higher_probability_replaces_a_superset_of_tokens() -> None:
    ids = list(range(10, 210))
    replace_tokens = partial(replaced, ids, kind="randomness", vocabulary=range(5000, 6000))
    few, more = (replace_tokens(probability, generator=generator(3)) for probability in (0.3, 0.6))
    assert all(new == later for old, new, later in zip(ids, few, more, strict=True) if old != new)


def test_prefixes_keep_the_special_tokens_at_the_end() -> None:
    assert shortened([5, 6, 7, 8], 3) == [5, 6, 7]
    assert shortened([1, 5, 6, 7, 2], 3, fixed=(1, 2)) == [1, 5, 2]


@pytest.mark.long
def test_extreme_prompts_are_means_over_single_prompts(tiny_folder: Folder) -> None:
    """The draws are the same for each amount, and special tokens are neither replaced nor drawn."""
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    texts = [f"[BOS]{text}" for text in LONG]
    encoder.tokenizer.add_special_tokens({"bos_token": "[BOS]"})
    frame = extreme_prompts(encoder, texts, max_length=18, seed=4)
    assert frame.columns == [*FRAME_SCHEMA, "condition", "amount"]
    amounts = {
        condition: part["amount"].unique().sort().to_list() for (condition,), part in frame.group_by("condition")
    }
    assert amounts == {**{kind: list(PROBABILITIES) for kind in REPLACEMENTS}, "length": [8, 16]}
    assert len(frame) == (3 * len(PROBABILITIES) + 2) * (DEPTH + 1)
    ids = [encoder.tokenizer(text)["input_ids"][:18] for text in texts]
    special = tuple(encoder.tokenizer.all_special_ids)
    assert any(token in special for token in ids[0])
    vocabulary = [token for token in range(99) if token not in special]
    for condition, amount, value in frame.filter(layer=2).select("condition", "amount", "value").iter_rows():
        if condition == "length":
            changed = [shortened(text_ids, int(amount), fixed=special) for text_ids in ids]
        else:
            change = partial(replaced, kind=condition, vocabulary=vocabulary, fixed=special, generator=generator(4))
            changed = [change(text_ids, amount) for text_ids in ids]
        normalization = "raw" if condition == "length" else "maxEntropy"
        states = [hidden_states(encoder, text_ids, 2) for text_ids in changed]
        separate = [prompt_entropy(text_states, normalization=normalization) for text_states in states]  # type: ignore[arg-type]
        assert value == pytest.approx(float(torch.cat(separate).mean()), rel=1e-3), (condition, amount)


def test_repeated_token_has_no_entropy_in_the_embeddings(llama: LayerEncoder) -> None:
    repeated = extreme_prompts(llama, LONG, max_length=16).filter(layer=0, condition="repetition", amount=1.0)
    assert repeated["value"].item() == 0


def test_draws_are_seeded_and_independent_of_batches(llama: LayerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = extreme_prompts(llama, LONG, max_length=16)
    other_item = extreme_prompts(llama, LONG, max_length=16, seed=1)
    monkeypatch.setattr(token_experiments, "_TOKEN_BUDGET", 60)
    assert_frame_equal(extreme_prompts(llama, LONG, max_length=16), frame, rel_tol=1e-4, abs_tol=1e-5)
    figure = pl.col("condition") == "randomness"
    assert (
        frame.filter(figure, layer=2, amount=0.5)["value"][0]
        != other_item.filter(figure, layer=2, amount=0.5)["value"][0]
    )


def test_special_tokens_of_bert_stay(bert: LayerEncoder) -> None:
    frame = extreme_prompts(bert, LONG, max_length=16)
    assert set(frame["condition"]) == {*REPLACEMENTS, "length"}
    assert frame["value"].is_finite().all()


def test_prompts_of_growing_length_need_long_texts(llama: LayerEncoder) -> None:
    with pytest.raises(OptionError, match="`texts` must hold 2 texts or more of 64 tokens, but got 0"):
        extreme_prompts(llama, LONG, max_length=64)


# --- inside the blocks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SITES)
def test_every_site_of_every_block_is_measured_in_one_pass(
    name: str, tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = LayerEncoder(tiny_folder(name), -1, device="cpu")
    monkeypatch.setattr(token_experiments, "_TOKEN_BUDGET", 80)
    frame = subblocks(encoder, TEXTS)
    assert frame.columns == [*FRAME_SCHEMA, "site"]
    assert frame["site"].unique(maintain_order=True).to_list() == SITES[name]
    assert len(frame) == 2 * DEPTH * len(SITES[name])
    before = frame.filter(pl.col("layer") > 1, site="residual_in")["value"].to_torch()
    after = frame.filter(pl.col("layer") < DEPTH, site="residual_out")["value"].to_torch()
    torch.testing.assert_close(before, after)
    for site in SITES[name]:
        for metric, value in metrics_of_site(encoder, layer=2, site=site).items():
            row = frame.filter(site=site, layer=2, name=metric)
            assert row["value"].item() == pytest.approx(value, rel=2e-3, abs=1e-4)


def metrics_of_site(encoder: LayerEncoder, *, layer: int, site: str) -> dict[str, float]:
    """Return the metrics of one site of one block, read by a hook, one text at a time."""
    model = encoder[0].model
    block = find_anatomy(model).block(model, layer)
    place = block_sites(block, model.config)[site]
    states: list[Tensor] = []
    module = block.get_submodule(place.module)
    if place.side == "input":
        hook = module.register_forward_pre_hook(
            lambda _m, args, kwargs: states.append((args or (kwargs["hidden_states"],))[0]), with_kwargs=True
        )
    else:
        hook = module.register_forward_hook(
            lambda _m, _a, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
    with torch.no_grad():
        for text in TEXTS:
            model(**encoder.tokenizer(text, return_tensors="pt", return_token_type_ids=False))
    hook.remove()
    functions = {"prompt_entropy": prompt_entropy, "prompt_effective_rank": prompt_effective_rank}
    return {
        name: float(torch.stack([function(text_states).squeeze() for text_states in states]).double().mean())
        for name, function in functions.items()
    }
