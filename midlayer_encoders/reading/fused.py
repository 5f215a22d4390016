r"""Norm and pooling at once: the normed states are never written to memory.

An RMSNorm followed by a weighted mean over tokens is one weighted sum, a LayerNorm likewise, less each token's mean:

.. math::
    \sum_t w_t \Bigl( g \odot \frac{x_t}{\mathrm{rms}(x_t)} + b \Bigr)
    = g \odot \sum_t \frac{w_t}{\mathrm{rms}(x_t)}\, x_t + b \sum_t w_t

Which form a model's final norm has is not read from its name: each form is compared with what the module makes of rows
drawn for it, and then with what the plain way makes of real states, and where none agrees the plain way is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Pooling
from midlayer_encoders.reading._triton import kernel_runs, normed_sums
from midlayer_encoders.reading.pooling import pool, token_places, token_weights

_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")  # of transformers' norms and torch's
_ROUNDINGS = 4  # of a state in the plain way, in its dtype
_SUMMED = 1e-5  # of the size of the states: what the order of a sum in float32 may change


@dataclass(frozen=True)
class NormForm:
    r"""What a norm does to a token: :math:`(o + w) \odot (x - c\,\bar x) / \sqrt{\mathrm{ms} + \epsilon} + b`.

    Attributes:
        module: whose ``weight`` and ``bias`` these are; ``None`` for no norm at all.
        center: whether the token's mean is subtracted.
        offset: what is added to the weight, 1 in Gemma's norms.
        eps: added to the mean square.
    """

    module: nn.Module | None
    center: bool = False
    offset: float = 0.0
    eps: float = 0.0

    def sums(self, states: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of each text's normed tokens, shape ``(B, D)``, in float32 or better."""
        scale = self.module is not None
        if kernel_runs(states):
            made = normed_sums(states, weights, scale=scale, center=self.center, eps=self.eps)
        else:
            made = _sums(states, weights, scale=scale, center=self.center, eps=self.eps)
        if (gain := getattr(self.module, "weight", None)) is not None:
            made = made * (gain.to(made.dtype) + self.offset)
        if (bias := getattr(self.module, "bias", None)) is not None:
            made = made + bias.to(made.dtype) * weights.to(made.dtype).sum(dim=1, keepdim=True)
        return made


def _sums(states: Tensor, weights: Tensor, *, scale: bool, center: bool, eps: float) -> Tensor:
    """Return what :func:`~midlayer_encoders.reading._triton.normed_sums` returns, by torch, on any device."""
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    weights = weights.to(states.dtype)
    if scale and center:
        variance, means = torch.var_mean(states, dim=-1, correction=0, keepdim=True)
        states, weights = (
            states - means,
            weights / (variance[..., 0] + eps).sqrt(),
        )  # not after the sum: it would cancel
    elif scale:
        squares = torch.linalg.vector_norm(states, dim=-1).square() / states.shape[-1]
        weights = torch.where(weights == 0, weights, weights / (squares + eps).sqrt())
    return torch.einsum("btd,bt->bd", states, weights)


def find_form(modules: Sequence[nn.Module], states: Tensor) -> NormForm | None:
    """Return the form of what states pass through after the last block, or ``None`` where it is no known norm.

    Args:
        modules: in order; none where the states are taken as they are.
        states: some, for their device, dtype and width, shape ``(B, T, D)``.
    """
    if not modules:
        return NormForm(None)
    if len(modules) > 1 or any(modules[0].children()):
        return None
    norm, named = modules[0], dict(modules[0].named_parameters())
    fits = all(name in ("weight", "bias") and one.shape == states.shape[-1:] for name, one in named.items())
    eps = next((float(getattr(norm, name)) for name in _EPS_NAMES if isinstance(getattr(norm, name, None), float)), 0.0)
    if not fits or any(one.device != states.device for one in named.values()):
        return None
    rows = _drawn_rows(states)
    expected = norm(rows)
    if expected.shape != rows.shape or not expected.is_floating_point():
        return None
    for center in (False, True):
        for offset in (0.0, 1.0):
            form = NormForm(norm, center, offset, eps)
            # Each row is a text of one token, so that its sum is the normed row itself.
            made = form.sums(rows.reshape(-1, 1, rows.shape[-1]), torch.ones(len(rows[0]), 1, device=rows.device))
            plain = expected[0].to(made.dtype)
            if not _differ(made, plain, plain.abs(), _ROUNDINGS * torch.finfo(states.dtype).eps):
                return form
    return None


def _drawn_rows(states: Tensor) -> Tensor:
    """Return rows of many sizes, whose means are not zero, so that no two forms make the same of them."""
    draw = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0])[:, None]
    rows = sizes * (0.5 + torch.randn(len(sizes), states.shape[-1], generator=draw))
    return rows.to(states.device, states.dtype)[None]


def _differ(made: Tensor, plain: Tensor, size: Tensor, tolerance: float) -> Tensor:
    """Return whether vectors differ by more than a part of the size of the states they are made of; NaN does not."""
    return ((made - plain).abs() > tolerance * (size + size.amax() / 4)).any()


class FusedPooling:
    """Pools the states of each layer after the final norm, in one reading of them where that gives the same vectors.

    It is made for one run over many batches. In the first batch each layer's vectors are made in both ways and
    :meth:`settle` compares them; nothing waits for the device after that.

    Args:
        modules: what the states pass through after the last block.
        pooling: how token states become one vector.
    """

    def __init__(self, modules: Sequence[nn.Module], pooling: Pooling) -> None:
        self.modules, self.pooling = tuple(modules), pooling
        self.trusted: bool | None = None if pooling != "max" else False
        self._forms: dict[torch.dtype, NormForm | None] = {}
        self._plainly: list[Tensor] = []  # the vectors of the first batch, by the plain way
        self._differ: list[Tensor] = []

    def __call__(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors of a layer, shape ``(B, D)``, in float32 or better.

        Args:
            states: raw, shape ``(B, T, D)``.
            mask: true at real tokens, shape ``(B, T)``.
        """
        if self.trusted is False:
            return self._plain(states, mask)
        if self.trusted:
            made = self._short(states, mask)
            return self._plain(states, mask) if made is None else made
        return self._compared(states, mask)

    def begin(self) -> None:
        """Forget the batch before, which may have ended in the middle."""
        self._plainly, self._differ = [], []

    def settle(self) -> list[Tensor] | None:
        """Trust one of the ways from now on: the first batch is done.

        Returns:
            The vectors of each call so far by the plain way, where those that were returned differ from them.
        """
        if self.trusted is not None:
            return None
        self.trusted = not any(bool(one) for one in self._differ)
        plainly = self._plainly
        self.begin()
        return None if self.trusted else plainly

    def _normed(self, states: Tensor) -> Tensor:
        for module in self.modules:
            states = module(states)
        return states

    def _plain(self, states: Tensor, mask: Tensor) -> Tensor:
        return pool(self._normed(states), mask, self.pooling)

    def _short(self, states: Tensor, mask: Tensor) -> Tensor | None:
        """Return the vectors by the short way, ``None`` where there is none for these states."""
        if self.pooling in ("cls", "last"):  # a norm is of each token by itself: norm those that are taken
            real, place = token_places(mask, self.pooling)
            taken = states[torch.arange(len(states), device=states.device), place]
            return pool(self._normed(taken[:, None]), real, "cls")
        if states.dtype not in self._forms:
            self._forms[states.dtype] = find_form(self.modules, states)
        form = self._forms[states.dtype]
        if form is None:
            return None
        weights = token_weights(mask, self.pooling, states.dtype)
        return form.sums(states, weights) / weights.sum(dim=1, keepdim=True).clamp(min=1)

    def _compared(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return vectors of the first batch by the short way, and note whether they are those of the plain one."""
        made = self._short(states, mask)
        normed = self._normed(states)
        plain = pool(normed, mask, self.pooling)
        self._plainly.append(plain)
        if made is None:
            self._differ.append(torch.ones((), dtype=torch.bool))
            return plain
        tolerance = max(_ROUNDINGS * torch.finfo(normed.dtype).eps, _SUMMED)
        size = pool(normed.abs(), mask, self.pooling)
        self._differ.append(_differ(made.to(plain.dtype), plain, size, tolerance))
        return made
