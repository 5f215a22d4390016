from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
import torch
from torch import Tensor

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.metrics import Normalization, prompt_entropy
from midlayer_encoders.paper.prefix_entropy import entropy_along, prefix_entropies
from tests.families import DEPTH
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
LONG = [text for text in TEXTS if text != "short"]


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.fixture(scope="module")
def bert(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("BERT"), -1, device="cpu")


def states(tokens: int, width: int) -> Tensor:
    """Return states with a large mean, a massive first token and a repeated one, as real layers have."""
    generator = torch.Generator().manual_seed(tokens)
    made = torch.randn(tokens, width, generator=generator) + 5 * torch.randn(width, generator=generator)
    made[0] *= 200
    made[4] = made[2]
    return made


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("center", "unit"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize(("tokens", "width", "normalization"), [(17, 32, "raw"), (24, 8, "maxEntropy")])
def test_prefixes_are_the_entropies_of_each_prefix_by_itself(
    alpha: float, center: bool, unit: bool, tokens: int, width: int, normalization: Normalization
) -> None:
    made = states(tokens, width)
    options = {"alpha": alpha, "center": center, "unit": unit, "normalization": normalization}
    alone = torch.stack([prompt_entropy(made[:t].double(), **options) for t in range(1, tokens + 1)])
    torch.testing.assert_close(prefix_entropies(made, **options), alone, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(prefix_entropies(made, [3, 9], **options), alone[[2, 8]], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_equal_tokens_have_no_entropy_and_rounding_is_not_scaled_up(alpha: float) -> None:
    same = (torch.ones(6, 4) * torch.tensor([0.1, 7.3, -2.0, 1e-3])).float()
    assert prefix_entropies(same, alpha=alpha).abs().max() == 0
    pair = torch.cat([same, -same])  # two points: one direction
    torch.testing.assert_close(
        prefix_entropies(pair, alpha=alpha), torch.zeros(12, dtype=torch.float64), atol=1e-9, rtol=0
    )


def test_wrong_lengths_are_refused() -> None:
    for lengths in ([], [0], [5]):
        with pytest.raises(OptionError, match=r"`lengths` must be within \[1, 4\]"):
            prefix_entropies(torch.eye(4), lengths)


def test_one_pass_gives_what_a_pass_for_each_prefix_gives(llama: LayerEncoder) -> None:
    one = entropy_along(llama, LONG, stride=3, dataset="mine", token_budget=64)
    many = entropy_along(llama, LONG, stride=3, dataset="mine", pass_per_prefix=True)
    assert one.columns == [*FRAME_SCHEMA, "position", "deviation", "texts"]
    keys = ["layer", "position", "texts"]
    assert one.select(keys).equals(many.select(keys))
    for column in ("value", "deviation"):
        torch.testing.assert_close(one[column].to_torch(), many[column].to_torch(), rtol=1e-3, atol=1e-4)


def test_the_frame_holds_means_over_the_texts_that_are_long_enough(llama: LayerEncoder) -> None:
    frame = entropy_along(llama, LONG, layers=[2], stride=5)
    lengths = [len(text) for text in LONG]  # a token is a character
    for position, texts, value, deviation in frame.select("position", "texts", "value", "deviation").iter_rows():
        long = [text[:position] for text in LONG if len(text) >= position]
        assert texts == len(long)
        encoder = llama.tokenizer(long, return_tensors="pt")
        with torch.no_grad():
            layer = llama[0].model(**encoder, output_hidden_states=True).hidden_states[2]
        alone = prompt_entropy(layer).double()
        torch.testing.assert_close(
            torch.tensor([value, deviation]),
            torch.stack([alone.mean(), alone.std(correction=0)]).float(),
            rtol=1e-3,
            atol=1e-4,
        )
    assert frame["position"].max() == 5 * (max(lengths) // 5)
    assert set(frame["layer"]) == {2}


def test_a_model_that_looks_ahead_is_refused_with_the_cure(bert: LayerEncoder) -> None:
    with pytest.raises(OptionError, match=r"causal model.*Pass `pass_per_prefix=True`"):
        entropy_along(bert, LONG)
    frame = entropy_along(bert, LONG, stride=10, pass_per_prefix=True, layers=[0, -1])
    assert frame.filter(pl.col("layer") == DEPTH)["value"].is_finite().all()


def test_wrong_input(llama: LayerEncoder, tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"text 1 \('ab'\) has 2\. Leave it out"):
        entropy_along(llama, [LONG[0], "ab"])
    with pytest.raises(OptionError, match="`texts` must hold 2 texts or more, but got 1"):
        entropy_along(llama, LONG[:1])
    with pytest.raises(OptionError, match="`stride` must be a positive"):
        entropy_along(llama, LONG, stride=0)
    with pytest.raises(OptionError, match="3 blocks or more for a curve over depth, but got 2"):
        entropy_along(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), LONG)
