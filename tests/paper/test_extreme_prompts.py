from __future__ import annotations

from collections.abc import Callable

import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.metrics import prompt_entropy
from midlayer_encoders.paper.extreme_prompts import PROMPT_KINDS, extreme_prompts, replaced, shortened
from tests.families import DEPTH
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
LONG = [text for text in TEXTS if text != "short"]


@pytest.fixture(scope="module")
def llama(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("kind", ["repetition", "resampling", "randomness"])
def test_tokens_are_replaced_with_their_probability_and_special_ones_stay(kind: str) -> None:
    ids = [1, *range(10, 1010), 2]
    options = {"kind": kind, "vocabulary": range(5000, 6000), "fixed": (1, 2)}
    assert replaced(ids, 0.0, **options, generator=generator()) == ids
    for probability in (0.25, 1.0):
        made = replaced(ids, probability, **options, generator=generator())
        assert (made[0], made[-1], len(made)) == (1, 2, len(ids))
        changed = [new for old, new in zip(ids, made, strict=True) if old != new]
        assert len(changed) == pytest.approx(1000 * probability, abs=45)
        if kind == "randomness":
            assert all(5000 <= one < 6000 for one in changed)
        else:
            assert set(changed) <= set(ids[1:-1])
            assert (len(set(changed)) == 1) == (kind == "repetition")


def test_a_higher_probability_replaces_the_same_tokens_and_more() -> None:
    ids = list(range(10, 210))
    options = {"kind": "randomness", "vocabulary": range(5000, 6000)}
    some, more = (replaced(ids, p, **options, generator=generator(3)) for p in (0.3, 0.6))
    assert all(new == later for old, new, later in zip(ids, some, more, strict=True) if old != new)


def test_prefixes_keep_the_special_tokens_at_the_end() -> None:
    assert shortened([5, 6, 7, 8], 3) == [5, 6, 7]
    assert shortened([1, 5, 6, 7, 2], 3, fixed=(1, 2)) == [1, 5, 2]


def test_the_frame_is_what_each_prompt_gives_by_itself(llama: LayerEncoder) -> None:
    frame = extreme_prompts(
        llama, LONG, kinds=["repetition", "length"], probabilities=[0.0, 1.0], lengths=[8, 20], dataset="mine"
    )
    assert frame.columns == [*FRAME_SCHEMA, "condition", "amount"]
    assert len(frame) == 4 * (DEPTH + 1)

    def alone(texts: list[str], **options: str) -> torch.Tensor:
        """Return the mean prompt entropy of layer 2, one text at a time."""
        ids = [llama.tokenizer(text, return_tensors="pt") for text in texts]
        with torch.no_grad():
            layers = [llama[0].model(**one, output_hidden_states=True).hidden_states[2] for one in ids]
        return torch.stack([prompt_entropy(layer, **options).squeeze() for layer in layers]).mean()  # type: ignore[arg-type]

    def found(condition: str, amount: float) -> torch.Tensor:
        row = frame.filter(pl.col("condition") == condition, pl.col("amount") == amount, pl.col("layer") == 2)
        return torch.tensor(row["value"].item())

    torch.testing.assert_close(found("repetition", 0), alone(LONG, normalization="maxEntropy"), rtol=1e-3, atol=1e-4)
    long = [text[:20] for text in LONG]  # all of them are that long
    torch.testing.assert_close(found("length", 20), alone(long), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found("length", 8), alone([text[:8] for text in LONG]), rtol=1e-3, atol=1e-4)
    embeddings = frame.filter(pl.col("layer") == 0, pl.col("condition") == "repetition", pl.col("amount") == 1)
    assert embeddings["value"].item() == 0  # one token, again and again


def test_draws_are_seeded_and_independent_of_batches(llama: LayerEncoder) -> None:
    options = {"kinds": ["randomness"], "probabilities": [0.5], "layers": [2]}
    one = extreme_prompts(llama, LONG, **options, token_budget=2000)
    same = extreme_prompts(llama, LONG, **options, token_budget=60)
    other = extreme_prompts(llama, LONG, **options, seed=1)
    torch.testing.assert_close(one["value"].to_torch(), same["value"].to_torch(), rtol=1e-4, atol=1e-5)
    assert abs(one["value"][0] - other["value"][0]) > 1e-4


def test_special_tokens_of_bert_stay(tiny_folder: Folder) -> None:
    bert = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    frame = extreme_prompts(bert, LONG, probabilities=[0.0, 1.0], lengths=[4, 16])
    assert set(frame["condition"]) == set(PROMPT_KINDS)
    assert frame["value"].is_finite().all()


def test_wrong_input(llama: LayerEncoder) -> None:
    with pytest.raises(OptionError, match="Did you mean 'repetition'"):
        extreme_prompts(llama, LONG, kinds=["repetitoin"])  # type: ignore[list-item]
    with pytest.raises(OptionError, match="`kinds` must name some"):
        extreme_prompts(llama, LONG, kinds=[])
    with pytest.raises(OptionError, match=r"`probabilities` must be in \[0, 1\]"):
        extreme_prompts(llama, LONG, probabilities=[1.5])
    with pytest.raises(OptionError, match=r"`lengths` must be in \[3, 32\]"):
        extreme_prompts(llama, LONG, lengths=[64], max_length=32)
    with pytest.raises(OptionError, match="leave 2 texts or more that are as long, but 0 have 60 tokens"):
        extreme_prompts(llama, LONG, kinds=["length"], lengths=[8, 60])
    with pytest.raises(OptionError, match="`texts` must hold 2 texts"):
        extreme_prompts(llama, [])
    with pytest.raises(OptionError, match="`max_length` must be 3 tokens or more"):
        extreme_prompts(llama, LONG, kinds=["repetition"], max_length=2)
