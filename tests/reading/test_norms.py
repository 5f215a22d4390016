"""Norms are recognized by their effect, and only pooled tokens are normalized."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.extras.kernels.norm_forms import NormForm, find_form
from midlayer_encoders.reading.pooling import pool, pool_normalized

WIDTH = 40


class Scaled(nn.Module):
    """Has the parameters of a norm, but is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def forward(self, states: Tensor) -> Tensor:
        return self.weight * states / states.abs().mean(dim=-1, keepdim=True)


NORMS = {
    "rms": lambda: LlamaRMSNorm(WIDTH),
    "gemma": lambda: Gemma2RMSNorm(WIDTH),
    "t5": lambda: T5LayerNorm(WIDTH),
    "layer": lambda: nn.LayerNorm(WIDTH),
    "layer without bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "layer without weights": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "torch rms": lambda: nn.RMSNorm(WIDTH, eps=1e-5),
}


def made(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    norm, draw = NORMS[name](), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=draw))
    return norm.to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return texts of several lengths, one of them empty, with a massive token."""
    draw = torch.Generator().manual_seed(4)
    states = 2 + torch.randn(5, 30, WIDTH, generator=draw) * torch.rand(5, 30, 1, generator=draw)
    states[:, 3] *= 300
    return states.to(dtype), torch.arange(30) < torch.tensor([30, 21, 17, 4, 0])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_form_of_a_norm_is_found_by_its_effect(name: str, dtype: torch.dtype) -> None:
    norm, (states, _) = made(name, dtype), batch(dtype)
    with torch.inference_mode():
        form = find_form(nn.Sequential(norm), states)
        assert form is not None
        assert (form.center, form.offset) == (name.startswith("layer"), 1.0 if name == "gemma" else 0.0)
        actual = form.normalize(states)
        expected = made(name).double()(states.double())
    assert actual.dtype == torch.float32
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2  # of means that cancel, and of weights in bfloat16
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0, 300.0])
@pytest.mark.parametrize("name", ["gemma", "rms"])
def test_large_weights_in_half_precision_keep_their_offset(name: str, size: float, dtype: torch.dtype) -> None:
    norm = made(name)
    with torch.no_grad():
        norm.weight.mul_(0.1).add_(size)  # type: ignore[operator, union-attr]
    with torch.inference_mode():
        form = find_form(nn.Sequential(norm.to(dtype)), batch(dtype)[0])
    assert form is not None
    assert (form.center, form.offset) == (False, 1.0 if name == "gemma" else 0.0)


def test_epsilon_is_that_of_the_norm() -> None:
    norm = LlamaRMSNorm(WIDTH)
    norm.variance_epsilon = 1e-2  # type: ignore[assignment]
    with torch.inference_mode():
        form = find_form(nn.Sequential(norm), batch()[0])
    assert form is not None
    assert form.eps == 1e-2


@pytest.mark.parametrize(
    "modules",
    [[Scaled()], [nn.Linear(WIDTH, WIDTH)], [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8)], [nn.Tanh()]],
    ids=["other", "projection", "both", "no weights"],
)
def test_other_modules_have_no_form(modules: list[nn.Module]) -> None:
    with torch.inference_mode():
        assert find_form(nn.Sequential(*modules), batch()[0]) is None


def test_without_modules_states_are_unchanged() -> None:
    states, _ = batch(torch.bfloat16)
    assert find_form(nn.Sequential(), states) == NormForm(None)
    assert torch.equal(NormForm(None).normalize(states), states.float())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_only_pooled_tokens_are_normalized(pooling: Pooling, side: str) -> None:
    states, mask = batch()
    mask = mask if side == "right" else mask.flip(1)
    norm = nn.Sequential(made("layer"))
    seen: list[int] = []
    norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    actual = pool_normalized(norm, states, mask, pooling)
    assert seen == [1 if pooling in ("cls", "last") else 30]
    torch.testing.assert_close(actual, pool(norm(states), mask, pooling))
