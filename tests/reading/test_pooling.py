from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from sentence_transformers.sentence_transformer.modules import Pooling as Reference
from torch import nn

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.errors import OptionError
from midlayer_encoders.reading.pooling import pool, real_tokens
from tests.support.pooled import pooled


def batch(side: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(5, 7, 6, generator=generator)
    mask = torch.arange(7)[None] < torch.tensor([7, 1, 3, 5, 2])[:, None]
    return states, mask if side == "right" else mask.flip(1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_pooling_matches_the_definition_and_sentence_transformers(pooling: Pooling, side: str) -> None:
    states, mask = batch(side)
    expected = torch.stack([pooled(row[real], pooling) for row, real in zip(states, mask, strict=True)])
    torch.testing.assert_close(pool(states, mask, pooling), expected)
    if (pooling, side) == ("weightedmean", "left") and Version(version("sentence-transformers")) < Version("6.2"):
        pytest.skip(
            "Before 6.2, sentence-transformers weighs tokens after padding on the left as if the padding were text."
        )
    reference = Reference(6, pooling_mode={"last": "lasttoken"}.get(pooling, pooling))
    features = reference({"token_embeddings": states, "attention_mask": mask.long()})
    torch.testing.assert_close(pool(states, mask, pooling), features["sentence_embedding"])


@pytest.mark.parametrize("pooling", POOLINGS)
def test_text_without_tokens_is_zero_and_padding_is_ignored(pooling: Pooling) -> None:
    states, mask = batch("right")
    mask[1] = False
    pooled = pool(states, mask, pooling)
    assert not pooled[1].any()
    loud = torch.where(mask[..., None], states, torch.full_like(states, 1e6))
    torch.testing.assert_close(pool(loud, mask, pooling), pooled)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    states = torch.ones(1, 5000, 1, dtype=dtype)
    pooled = pool(states, torch.ones(1, 5000, dtype=torch.bool))
    assert pooled.dtype == torch.float32
    assert pooled.item() == 1.0


def test_invalid_name_is_refused() -> None:
    with pytest.raises(OptionError, match="Did you mean 'mean'"):
        pool(*batch("left"), "maen")  # type: ignore[arg-type]


def test_padding_to_whole_windows_counts_as_padding() -> None:
    """Longformer returns more states than tokens: it pads texts to multiples of its window."""
    model = nn.Module()
    model.main_input_name = "input_ids"  # type: ignore[assignment]
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    expected = [[True, True, True, False, False], [True, True, False, False, False]]
    assert real_tokens(mask, torch.zeros(2, 5, 4), model=model).tolist() == expected


def test_mask_of_mel_frames_has_every_second_one() -> None:
    model: Any = SimpleNamespace(main_input_name="input_features")
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]])
    real = real_tokens(mask, torch.zeros(2, 4, 3), model=model)
    assert real.tolist() == [[True, True, True, False], [True, False, False, False]]
