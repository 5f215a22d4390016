"""Recognize the form of a norm, so that one operation can replace it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MAX_ROUNDINGS = 4  # tolerance, in machine epsilons of the states' dtype


class NormForm(NamedTuple):
    r"""The form of a norm: :math:`(o + w) \odot (x - c\,\bar x) / \sqrt{\mathrm{ms} + \epsilon} + b`.

    Attributes:
        module: the norm, with ``weight`` and ``bias``; ``None`` for no norm.
        center: subtract the token's mean.
        offset: added to the weight, 1 in Gemma's norms.
        eps: added to the mean square.
    """

    module: nn.Module | None
    center: bool = False
    offset: float = 0.0
    eps: float = 0.0

    def normalize(self, states: Tensor) -> Tensor:
        """Return the normalized states ``(*, D)``, in float32 or better."""
        states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
        if self.module is None:
            return states
        if self.center:
            states = states - states.mean(dim=-1, keepdim=True)
        states = states * (states.square().mean(dim=-1, keepdim=True) + self.eps).rsqrt()
        if (gain := getattr(self.module, "weight", None)) is not None:
            states = states * (gain.to(states.dtype) + self.offset)
        if (bias := getattr(self.module, "bias", None)) is not None:
            states = states + bias.to(states.dtype)
        return states


def find_form(modules: nn.Sequential, states: Tensor) -> NormForm | None:
    """Return the form of the modules after the last block, or ``None`` if they are not a known norm.

    Args:
        modules: the modules in order; empty for no norm.
        states: states with the device, dtype and width to use, shape ``(B, T, D)``.
    """
    if not len(modules):
        return NormForm(None)
    if len(modules) > 1 or any(modules[0].children()):
        return None
    norm = modules[0]
    if not all(
        name in ("weight", "bias") and parameter.shape == states.shape[-1:] and parameter.device == states.device
        for name, parameter in norm.named_parameters()
    ):
        return None
    eps = norm_eps(norm)
    rows = _random_rows(states)
    expected = norm(rows)
    if expected.shape != rows.shape or not expected.is_floating_point():
        return None
    # The nearest form, not the first within the tolerance: in bfloat16, weights of 30 and 31 differ by a few roundings.
    forms = [NormForm(norm, center, offset, eps) for center in (False, True) for offset in (0.0, 1.0)]
    distances = [(form.normalize(rows) - expected).abs() for form in forms]
    form, distance = min(zip(forms, distances, strict=True), key=lambda each: each[1].mean())
    tolerance = _MAX_ROUNDINGS * torch.finfo(states.dtype).eps
    return form if (distance <= tolerance * (expected.abs() + expected.abs().amax() / 4)).all() else None


def norm_eps(norm: nn.Module) -> float:
    """Return what a norm adds to the mean square."""
    values = (getattr(norm, name, None) for name in _EPS_NAMES)
    return next((value for value in values if isinstance(value, float)), 0.0)


def _random_rows(states: Tensor) -> Tensor:
    """Return rows of many magnitudes with nonzero means, which distinguish all forms."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])[:, None]
    rows = sizes * (0.5 + torch.randn(len(sizes), states.shape[-1], generator=generator))
    return rows.to(states.device, states.dtype)[None]
