"""The Triton kernels compared with the plain method: on a GPU, or with `TRITON_INTERPRET=1` in Triton's interpreter."""

import math
import os

import pytest
import torch
from torch import Tensor

from midlayer_encoders.extras.kernels import tokens as kernels
from midlayer_encoders.metrics import (
    PromptEffectiveRank,
    curvature,
    effective_rank,
    prompt_effective_rank,
    prompt_entropy,
)
from midlayer_encoders.metrics._layer_metric import kernels_can_read, prepare_rows
from midlayer_encoders.metrics.token_metrics import _turns
from tests.metrics.oracles import random_rows

HERE = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(kernels.triton is None or not HERE, reason="needs Triton and a GPU, or its interpreter"),
    pytest.mark.filterwarnings("ignore"),  # the interpreter divides by zero in numpy
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(tokens: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return four texts: full, with gaps, short and empty; missing tokens are NaN."""
    states = (2 + random_rows(4 * tokens, width)).reshape(4, tokens, width).to(DEVICE, dtype)
    mask = torch.ones(4, tokens, dtype=torch.bool, device=DEVICE)
    mask[1, ::3], mask[2, :-5], mask[3] = False, False, False
    states[~mask] = torch.nan
    return states, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(9, 20), (70, 96)])
@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("double", [True, False])
def test_gram(tokens: int, width: int, dtype: torch.dtype, center: bool, unit: bool, double: bool) -> None:
    states, mask = batch(tokens, width, dtype)
    gram, sizes = kernels.prepared_gram(states, mask, center=center, unit=unit, double=double)
    assert gram.dtype == (torch.float64 if double else torch.float32)
    tolerance = 1e-13 if double else 1e-5
    assert sizes.tolist() == mask.sum(dim=-1).tolist()
    for text, real, actual in zip(states, mask, gram, strict=True):
        rows = prepare_rows(text[real].double(), None, center=center, unit=unit) if real.any() else text[:0].double()
        expected = torch.zeros(tokens, tokens, dtype=torch.float64, device=DEVICE)
        expected[: len(rows), : len(rows)] = rows @ rows.T
        atol = tolerance if unit else tolerance * width
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("unit", [True, False])
def test_rounding_noise_is_zero_and_nan_is_kept(unit: bool) -> None:
    states, mask = batch(9, 20, torch.float32)
    states[0] = states[0, :1]
    states[1, 4, 3] = torch.nan
    states[2, -1] = 0.0
    gram, _ = kernels.prepared_gram(states, mask, center=True, unit=unit)
    assert (gram[0] == 0).all()
    assert gram[1].diagonal().sum().isnan()
    assert gram[2].isfinite().all()
    gram, _ = kernels.prepared_gram(states, mask, center=False, unit=unit)
    assert gram[1].isnan().any(dim=-1).sum() == 9, "a row and a column"
    assert (gram[2, 4] == 0).all()
    assert gram[0].diagonal().sum() > 0


@pytest.mark.parametrize("tokens", [1, 40, 1500])
def test_order_of_a_mask_that_is_a_view(tokens: int) -> None:
    mask = (random_rows(tokens, 6) > 0).to(DEVICE).T[::2]
    order, sizes = kernels._order(mask)
    for real, actual, size in zip(mask, order, sizes.tolist(), strict=True):
        assert actual[:size].tolist() == real.nonzero().flatten().tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("step", [1, 2])
def test_angles(dtype: torch.dtype, step: int) -> None:
    states, mask = batch(12, 300, dtype)
    states[0, 4] = states[0, 3]
    actual, expected = kernels.turns(states, mask, step), _turns(states.double(), mask, step)
    for actual_value, expected_value in zip(actual, expected, strict=True):
        torch.testing.assert_close(
            actual_value[:, : expected_value.shape[1]].double(), expected_value, rtol=1e-5, atol=1e-5
        )
        assert (actual_value[:, expected_value.shape[1] :] == -1).all()


def test_line_is_straight_up_to_rounding() -> None:
    steps = torch.tensor([1.0, 3.0, 0.5, 100.0, 2.0], device=DEVICE)
    path = steps.cumsum(0)[None, :, None] * torch.tensor([3.0, 1.0, 2.0], device=DEVICE)
    assert float(curvature(path)) < 1e-7
    back = path * torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0], device=DEVICE)[:, None]
    assert float(curvature(back)) == pytest.approx(math.pi, abs=1e-6)


def test_functions_use_the_kernels_and_agree_with_float64() -> None:
    states, mask = batch(9, 20, torch.float32)
    assert kernels_can_read(states)
    assert not kernels_can_read(states.double())
    real = mask.sum(dim=-1) > 2
    for function in (curvature, prompt_entropy):
        actual, expected = function(states, mask), function(states.double(), mask)
        torch.testing.assert_close(actual[real].double(), expected[real], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "width"), [(9, 20), (20, 9), (70, 96)])
def test_effective_rank_is_that_of_float64_and_waits_for_layers(tokens: int, width: int, dtype: torch.dtype) -> None:
    states, mask = batch(tokens, width, dtype)
    states[1, 1] *= 1000
    expected = torch.zeros(4, dtype=torch.float64)  # of the empty text
    for i, (text, real) in enumerate(zip(states[:3], mask[:3], strict=True)):
        expected[i] = effective_rank(text[real].double().cpu())
    torch.testing.assert_close(prompt_effective_rank(states.double(), mask).cpu(), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(prompt_effective_rank(states, mask).cpu(), expected.float())
    metric = PromptEffectiveRank([2, 4])
    metric.to(DEVICE)
    for layer in (2, 4):  # factors without rounding
        metric.update(states * layer, mask, layer=layer)
    assert len(metric._waiting) == (2 if DEVICE == "cuda" else 0)
    mean = expected[mask.sum(dim=-1).cpu() >= 2].mean()
    torch.testing.assert_close(metric.compute().cpu(), mean.expand(2), rtol=1e-9, atol=0)
