"""Every option of the experiments on tokens, against hidden states that the model gives by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from polars.testing import assert_frame_equal
from torch import Tensor

from midlayer_encoders import LayerEncoder
from midlayer_encoders.metrics import prompt_entropy
from midlayer_encoders.paper.extreme_prompts import extreme_prompts, replaced, shortened
from midlayer_encoders.paper.prefix_entropy import entropy_along
from midlayer_encoders.paper.subblocks import subblocks
from midlayer_encoders.paper.theorems import check_theorems
from tests.families import DEPTH
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
LONG = [text for text in TEXTS if text != "short"]


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def states(encoder: LayerEncoder, ids: Sequence[int], layer: int) -> Tensor:
    """Return the hidden states of one text by itself, shape ``(1, T, D)``."""
    with torch.no_grad():
        outputs = encoder[0].model(input_ids=torch.tensor([ids]), output_hidden_states=True)
    return outputs.hidden_states[layer]


def test_every_option_along_a_text(llama: LayerEncoder) -> None:
    options = {"alpha": 2.0, "normalization": "logN"}
    found = entropy_along(llama, LONG, layers=[0, 2], stride=6, max_length=20, dataset="mine", **options)  # type: ignore[arg-type]
    assert set(found["dataset"]) == {"mine"}
    assert found["position"].unique().sort().to_list() == [6, 12, 18]
    for layer, depth, position, value, spread in found.select(
        "layer", "depth", "position", "value", "deviation"
    ).iter_rows():
        ids = [llama.tokenizer(text)["input_ids"][:position] for text in LONG]
        alone = torch.cat([prompt_entropy(states(llama, one, layer), **options) for one in ids]).double()  # type: ignore[arg-type]
        expected = (float(alone.mean()), float(alone.std(correction=0)))
        assert (value, spread) == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert depth == layer / DEPTH


def test_the_encoder_s_own_length_counts_where_it_is_shorter(tiny_folder: Folder) -> None:
    short = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=9)
    assert entropy_along(short, LONG, layers=[1])["position"].max() == 9
    assert subblocks(short, LONG, sites="mlp").equals(subblocks(short, [text[:9] for text in LONG], sites="mlp"))


def test_every_option_of_extreme_prompts(tiny_folder: Folder) -> None:
    """The draws of each amount are the same, and special tokens are neither replaced nor drawn."""
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    texts = [f"[BOS]{text}" for text in LONG]
    encoder.tokenizer.add_special_tokens({"bos_token": "[BOS]"})
    found = extreme_prompts(
        encoder, texts, kinds=["randomness", "resampling", "length"], probabilities=[0.5, 0.9], lengths=[18, 5],
        layers=[2], max_length=18, seed=4, dataset="mine", token_budget=40,
    )  # fmt: skip
    assert (set(found["layer"]), set(found["dataset"])) == ({2}, {"mine"})
    ids = [encoder.tokenizer(text)["input_ids"][:18] for text in texts]
    special = tuple(encoder.tokenizer.all_special_ids)
    assert any(one in special for one in ids[0])
    vocabulary = [one for one in range(99) if one not in special]
    for condition, amount, value in found.select("condition", "amount", "value").iter_rows():
        if condition == "length":
            changed = [shortened(one, int(amount), fixed=special) for one in ids]
        else:
            draw = torch.Generator().manual_seed(4)
            change = partial(replaced, kind=condition, vocabulary=vocabulary, fixed=special, generator=draw)
            changed = [change(one, amount) for one in ids]
        of = "raw" if condition == "length" else "maxEntropy"
        alone = [prompt_entropy(states(encoder, one, 2), normalization=of) for one in changed]  # type: ignore[arg-type]
        assert value == pytest.approx(float(torch.cat(alone).mean()), rel=1e-3), (condition, amount)
    amounts = found.filter(condition="length")["amount"].to_list()
    assert amounts == [5, 18]


def test_every_option_inside_the_blocks(llama: LayerEncoder) -> None:
    options = {"sites": ["mlp", "attention"], "metrics": "curvature", "dataset": "mine"}
    found = subblocks(llama, LONG, max_length=10, **options)  # type: ignore[arg-type]
    columns = found.select("site", "name", "dataset").unique(maintain_order=True).rows()
    assert columns == [("mlp", "curvature", "mine"), ("attention", "curvature", "mine")]
    assert found["layer"].to_list() == [1, 2, 3, 4] * 2
    cut = subblocks(llama, [text[:10] for text in LONG], **options)  # type: ignore[arg-type]
    assert_frame_equal(found, cut, rel_tol=1e-5)


def test_theorems_follow_seed_and_width() -> None:
    one, same, other = (check_theorems(draws=100, width=16, seed=seed) for seed in (3, 3, 4))
    assert one.equals(same)
    assert not one.equals(other)
    printed = one.filter(statement="2.1, as printed", name="right")
    assert printed.select("dataset", "value").rows() == [
        (f"{count} prompts of 16 tokens", count / 16**2) for count in (2, 4, 8, 16)
    ]
