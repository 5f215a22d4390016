"""The Triton kernels against the plain way: on a GPU, or with `TRITON_INTERPRET=1` in Triton's interpreter."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from midlayer_encoders.metrics import _token_triton as kernels
from midlayer_encoders.metrics import curvature, prompt_entropy
from midlayer_encoders.metrics._kernels import kernels_run
from midlayer_encoders.metrics.curvature import _turns
from tests.metrics.oracles import random_rows

HERE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(kernels.triton is None or not HERE, reason="needs Triton and a GPU, or its interpreter"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter divides by zero in numpy, which warns
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return four texts, one whole, one with holes, one short and one without a token; NaN where there is none."""
    states = (2 + random_rows(4 * tokens, width)).reshape(4, tokens, width).to(DEVICE, dtype)
    mask = torch.ones(4, tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ::3], mask[2, :-5], mask[3] = False, False, False
    states[~mask] = torch.nan
    return states, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(9, 20), (70, 96)])
@pytest.mark.parametrize("center", [True, False])
def test_gram(tokens: int, width: int, dtype: torch.dtype, center: bool) -> None:
    states, mask = batch(tokens, width, dtype)
    gram, _ = kernels.centred_gram(states, mask, center=center)
    for text, real, found in zip(states, mask, gram, strict=True):
        rows = text[real].double()
        rows = rows - rows.mean(dim=0) if center else rows
        expected = torch.zeros(tokens, tokens, dtype=torch.float64, device=DEVICE)
        expected[: len(rows), : len(rows)] = rows @ rows.T
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * width)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 2])
def test_turns(dtype: torch.dtype, step: int) -> None:
    states, mask = batch(12, 300, dtype)
    states[0, 4] = states[0, 3]
    found, expected = kernels.turns(states, mask, step), _turns(states.double(), mask, step)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[:, : other.shape[1]].double(), other, rtol=1e-5, atol=1e-5)
        assert (one[:, other.shape[1] :] == -1).all()


def test_functions_use_the_kernels_and_agree_with_float64() -> None:
    states, mask = batch(9, 20, torch.float32)
    assert kernels_run(states)
    assert not kernels_run(states.double())
    real = mask.sum(dim=-1) > 2
    for function in (curvature, prompt_entropy):
        found, expected = function(states, mask), function(states.double(), mask)
        torch.testing.assert_close(found[real].double(), expected[real], rtol=1e-5, atol=1e-5)
