r"""Fuse the final norm and the pooling, without writing the normalized states to memory.

An RMSNorm followed by a weighted mean over tokens is one weighted sum; a LayerNorm also subtracts each token's mean:

.. math::
    \sum_t w_t \Bigl( g \odot \frac{x_t}{\mathrm{rms}(x_t)} + b \Bigr)
    = g \odot \sum_t \frac{w_t}{\mathrm{rms}(x_t)}\, x_t + b \sum_t w_t

The form of a model's norm is found by comparing each form with the module on random rows and then on real states. If
none agrees, norm and pooling run separately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Pooling
from midlayer_encoders.reading._triton import kernel_runs, normed_sums
from midlayer_encoders.reading.pooling import pool, token_places, token_weights

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_ROUNDINGS = 4  # tolerance in roundings of the states' dtype
_SUM_TOLERANCE = 1e-5  # relative, for the order of a sum in float32


@dataclass(frozen=True)
class NormForm:
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

    def sums(self, states: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each text's normalized tokens, shape ``(B, D)``, in float32 or better."""
        scale = self.module is not None
        compute = normed_sums if kernel_runs(states) else _normed_sums_in_torch
        sums = compute(states, weights, scale=scale, center=self.center, eps=self.eps)
        if (gain := getattr(self.module, "weight", None)) is not None:
            sums = sums * (gain.to(sums.dtype) + self.offset)
        if (bias := getattr(self.module, "bias", None)) is not None:
            sums = sums + bias.to(sums.dtype) * weights.to(sums.dtype).sum(dim=1, keepdim=True)
        return sums


def _normed_sums_in_torch(states: Tensor, weights: Tensor, *, scale: bool, center: bool, eps: float) -> Tensor:
    """Compute :func:`~midlayer_encoders.reading._triton.normed_sums` with torch on any device."""
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    weights = weights.to(states.dtype)
    if scale and center:
        variance, means = torch.var_mean(states, dim=-1, correction=0, keepdim=True)
        states = states - means  # before the sum, to avoid cancellation
        weights = weights / (variance[..., 0] + eps).sqrt()
    elif scale:
        squares = torch.linalg.vector_norm(states, dim=-1).square() / states.shape[-1]
        weights = torch.where(weights == 0, weights, weights / (squares + eps).sqrt())
    return torch.einsum("btd,bt->bd", states, weights)


def find_form(modules: Sequence[nn.Module], states: Tensor) -> NormForm | None:
    """Return the form of the modules after the last block, or ``None`` if they are not a known norm.

    Args:
        modules: the modules in order; empty for no norm.
        states: states with the device, dtype and width to use, shape ``(B, T, D)``.
    """
    if not modules:
        return NormForm(None)
    if len(modules) > 1 or any(modules[0].children()):
        return None
    norm = modules[0]
    parameters = dict(norm.named_parameters())
    fits = all(
        name in ("weight", "bias") and parameter.shape == states.shape[-1:] and parameter.device == states.device
        for name, parameter in parameters.items()
    )
    eps = next((float(getattr(norm, name)) for name in _EPS_NAMES if isinstance(getattr(norm, name, None), float)), 0.0)
    if not fits:
        return None
    rows = _random_rows(states)
    expected = norm(rows)
    if expected.shape != rows.shape or not expected.is_floating_point():
        return None
    for center in (False, True):
        for offset in (0.0, 1.0):
            form = NormForm(norm, center, offset, eps)
            # Each row is a text of one token, so its sum is the normalized row.
            sums = form.sums(rows.reshape(-1, 1, rows.shape[-1]), torch.ones(len(rows[0]), 1, device=rows.device))
            plain = expected[0].to(sums.dtype)
            if not _differ(sums, plain, plain.abs(), _ROUNDINGS * torch.finfo(states.dtype).eps):
                return form
    return None


def _random_rows(states: Tensor) -> Tensor:
    """Return rows of many magnitudes with nonzero means, which distinguish all forms."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])[:, None]
    rows = sizes * (0.5 + torch.randn(len(sizes), states.shape[-1], generator=generator))
    return rows.to(states.device, states.dtype)[None]


def _differ(vectors: Tensor, plain: Tensor, size: Tensor, tolerance: float) -> Tensor:
    """Return whether vectors differ by more than the tolerance relative to the states; NaN counts as equal."""
    return ((vectors - plain).abs() > tolerance * (size + size.amax() / 4)).any()


class FusedPooling:
    """Normalizes and pools the states of each layer in one step if that gives the same vectors.

    In the first batch of a run each layer is pooled both ways and :meth:`settle` compares the vectors; later batches
    never wait for the device.

    Args:
        modules: modules after the last block.
        pooling: how token states become one vector.
    """

    def __init__(self, modules: Sequence[nn.Module], pooling: Pooling) -> None:
        self.modules = tuple(modules)
        self.pooling = pooling
        self.trusted: bool | None = None if pooling != "max" else False
        self._forms: dict[torch.dtype, NormForm | None] = {}
        self._plain_vectors: list[Tensor] = []  # of the first batch
        self._differences: list[Tensor] = []

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of a layer, shape ``(B, D)``, in float32 or better.

        Args:
            states: raw, shape ``(B, T, D)``.
            mask: true at real tokens, shape ``(B, T)``.
        """
        if self.trusted is False:
            return self._plain(states, mask)
        if self.trusted:
            vectors = self._fused(states, mask)
            return self._plain(states, mask) if vectors is None else vectors
        return self._compare(states, mask)

    def begin(self) -> None:
        """Start a batch; the previous one may have been interrupted."""
        self._plain_vectors = []
        self._differences = []

    def settle(self) -> list[Tensor] | None:
        """Choose the method for later batches after the first one.

        Returns:
            The plain vectors of each call if the fused ones differ from them.
        """
        if self.trusted is not None:
            return None
        self.trusted = not any(bool(difference) for difference in self._differences)
        plain_vectors = self._plain_vectors
        self.begin()
        return None if self.trusted else plain_vectors

    def _normed(self, states: Tensor) -> Tensor:
        for module in self.modules:
            states = module(states)
        return states

    def _plain(self, states: Tensor, mask: Tensor) -> Tensor:
        return pool(self._normed(states), mask, self.pooling)

    def _fused(self, states: Tensor, mask: Tensor) -> Tensor | None:
        """Return the vectors in one step, or None if the norm has no known form."""
        if self.pooling in ("cls", "last"):  # normalize only the pooled token
            real, place = token_places(mask, self.pooling)
            pooled = states[torch.arange(len(states), device=states.device), place]
            return pool(self._normed(pooled[:, None]), real, "cls")
        if states.dtype not in self._forms:
            self._forms[states.dtype] = find_form(self.modules, states)
        form = self._forms[states.dtype]
        if form is None:
            return None
        weights = token_weights(mask, self.pooling, states.dtype)
        return form.sums(states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)

    def _compare(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the fused vectors of the first batch, and record whether they differ from the plain ones."""
        vectors = self._fused(states, mask)
        normed = self._normed(states)
        plain = pool(normed, mask, self.pooling)
        self._plain_vectors.append(plain)
        if vectors is None:
            self._differences.append(torch.ones((), dtype=torch.bool))
            return plain
        tolerance = max(_ROUNDINGS * torch.finfo(normed.dtype).eps, _SUM_TOLERANCE)
        size = pool(normed.abs(), mask, self.pooling)
        self._differences.append(_differ(vectors.to(plain.dtype), plain, size, tolerance))
        return vectors
