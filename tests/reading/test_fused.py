"""Norm and pooling in one pass over the states, compared with the norm followed by the pooling."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.reading import _pooling_triton as kernels
from midlayer_encoders.reading.pooling import FusedPooling, find_form, pool

WIDTH = 40
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()


class Scaled(nn.Module):
    """Has the parameters of a norm, but is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states / states.abs().mean(dim=-1, keepdim=True)


class Smoothed(LlamaRMSNorm):
    """A norm over a token and the previous one: correct for single rows and wrong for texts."""

    def forward(self, states: Tensor) -> Tensor:
        mixed = states if states.shape[0] == 1 else (states + states.roll(1, dims=1)) / 2
        return super().forward(mixed)


NORMS = {
    "rms": lambda: LlamaRMSNorm(WIDTH),
    "gemma": lambda: Gemma2RMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer without weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "torch rms": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
}


def made(norm: nn.Module, dtype: torch.dtype) -> nn.Module:
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return norm.to(DEVICE, dtype)


def batch(side: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return texts of several lengths, one of them empty, with a massive token."""
    draw = torch.Generator().manual_seed(4)
    states = 2 + torch.randn(5, 150, WIDTH, generator=draw) * torch.rand(5, 150, 1, generator=draw)
    states[:, 3] *= 300
    mask = torch.arange(150) < torch.tensor([150, 131, 17, 4, 0])[:, None]
    return states.to(DEVICE, dtype), (mask if side == "right" else mask.flip(1)).to(DEVICE)


def fused(norms: list[nn.Module], pooling: Pooling, states: Tensor, mask: Tensor) -> tuple[Tensor, FusedPooling]:
    """Return the vectors of the second batch, after the comparison on the first."""
    pooled = FusedPooling(nn.Sequential(*norms), pooling)
    first = pooled(0, states, mask)
    first = pooled.settle().get(0, first)
    second = pooled(0, states, mask)
    assert torch.equal(first, second), "a resumed run compares another batch, and must give the same"
    return second, pooled


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", NORMS)
def test_fused_sum_matches_norm_and_pooling(name: str, pooling: Pooling, side: str, dtype: torch.dtype) -> None:
    norm, (states, mask) = made(NORMS[name](), dtype), batch(side, dtype)
    with torch.inference_mode():
        actual, method = fused([norm], pooling, states, mask)
        exact = pool(norm.double()(states.double()), mask, pooling)
        plain = pool(made(NORMS[name](), dtype)(states), mask, pooling)
    in_float32 = dtype == torch.float64 and name in ("rms", "gemma", "t5")  # the fused sum does not reproduce that
    assert method.trusted.get(0, False) is (
        pooling != "max" and not (in_float32 and pooling in ("mean", "weightedmean"))
    )
    assert actual.dtype == plain.dtype
    size = exact.abs().amax(dim=1, keepdim=True)
    rounding = 2e-2 if dtype == torch.bfloat16 else 1e-12 if dtype == torch.float64 and not in_float32 else 1e-5
    assert ((actual - exact).abs() <= rounding * size).all()
    if dtype == torch.bfloat16 and pooling in ("mean", "weightedmean"):  # the plain method rounds each state
        assert (actual - exact).norm() <= (plain - exact).norm()


@pytest.mark.parametrize("pooling", ["mean", "weightedmean", "last"])
def test_without_a_norm_states_are_only_summed(pooling: Pooling) -> None:
    states, mask = batch("right", torch.bfloat16)
    actual, method = fused([], pooling, states, mask)
    torch.testing.assert_close(actual, pool(states, mask, pooling), rtol=1e-5, atol=1e-4)
    assert method.trusted[0]


@pytest.mark.parametrize(
    "norms",
    [[Scaled()], [nn.Linear(WIDTH, WIDTH)], [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)], [Smoothed(WIDTH)], [nn.Tanh()]],
    ids=["other", "projection", "both", "mixing", "no weights"],
)
def test_other_modules_use_the_plain_method(norms: list[nn.Module]) -> None:
    states, mask = batch("right", torch.float32)
    norms = [norm.to(DEVICE) for norm in norms]
    with torch.inference_mode():
        actual, method = fused(norms, "mean", states, mask)
        expected = states
        for norm in norms:
            expected = norm(expected)
    assert not method.trusted.get(0)
    assert torch.equal(actual, pool(expected, mask, "mean"))


def test_norm_that_differs_slightly_on_real_states_is_not_trusted() -> None:
    class Rounded(LlamaRMSNorm):
        def forward(self, states: Tensor) -> Tensor:
            normed: Tensor = super().forward(states)
            return torch.where(states.abs().amax(dim=-1, keepdim=True) > 1000, 1.001 * normed, normed)

    states = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, dtype=torch.bool)
    for scale, is_trusted in ((1.0, True), (1e4, False)):
        fused = FusedPooling(nn.Sequential(Rounded(WIDTH)), "mean")
        with torch.no_grad():
            fused(3, scale * states, mask)
        assert (fused.settle() == {}, fused.trusted) == (is_trusted, {3: is_trusted})


def test_form_of_the_norm_is_detected_by_its_effect() -> None:
    states, _ = batch("right", torch.float32)
    forms = {name: find_form(nn.Sequential(made(make(), torch.float32)), states) for name, make in NORMS.items()}
    assert {name: form.offset for name, form in forms.items() if form is not None} == {
        **dict.fromkeys(NORMS, 0.0),
        "gemma": 1.0,
    }
    assert [name for name, form in forms.items() if form is not None and form.center] == [
        "layer",
        "layer without bias",
        "layer without weights",
    ]
    off = made(LlamaRMSNorm(WIDTH), torch.float32)
    off.variance_epsilon = 1e-2  # type: ignore[assignment]
    form = find_form(nn.Sequential(off), states)
    assert form is not None
    assert form.eps == 1e-2


@pytest.mark.triton
@pytest.mark.skipif(kernels.triton is None or not (torch.cuda.is_available() or INTERPRETED), reason="needs Triton")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("scale", "center"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("tokens", "width"), [(9, 20), (300, 96), (128, 1030)])
def test_triton_kernel_matches_float64(tokens: int, width: int, scale: bool, center: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    states = (2 + torch.randn(4, tokens, width + 3, generator=generator)).to(DEVICE, dtype)[..., :width]
    weights = torch.rand(4, tokens, generator=generator).to(DEVICE)
    weights[1, ::3], weights[2, 5:], weights[3] = 0, 0, 0
    states[weights == 0] = torch.nan
    sums = kernels.normed_sums(states, weights, scale=scale, center=center, eps=1e-6)
    x = states.double().nan_to_num()
    x = x - x.mean(dim=-1, keepdim=True) if center else x
    x = x / (x.square().mean(dim=-1, keepdim=True) + 1e-6).sqrt() if scale else x
    expected = torch.einsum("btd,bt->bd", x, weights.double())
    torch.testing.assert_close(sums.double(), expected, rtol=1e-5, atol=1e-4)
    assert (sums[3] == 0).all()
