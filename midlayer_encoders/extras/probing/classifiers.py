"""Classifiers on the tokens of many layers at once: every parameter has a layer axis, and layers do not interact."""

import math
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import OptionError

ProbeKind: TypeAlias = Literal["attentive", "linear"]

PROBE_KINDS: tuple[ProbeKind, ...] = get_args(ProbeKind)

_EPSILON = 1e-6  # as in the published probe


class LayerNormalizer(nn.Module):
    """Apply batch norm without weights to each layer's features.

    Args:
        layers: number of layers.
        width: of the features.
        momentum: weight of the newest batch in the running statistics after ``1 / momentum`` batches; earlier batches
            have equal weight, because a small data set has few steps to forget its initialization.
    """

    mean: Tensor
    variance: Tensor
    batches: Tensor

    def __init__(self, layers: int, width: int, *, momentum: float = 0.1) -> None:
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(layers, width))
        self.register_buffer("variance", torch.ones(layers, width))
        self.register_buffer("batches", torch.zeros(layers, 1))

    def forward(self, states: Tensor, weights: Tensor) -> Tensor:
        """Return normalized features in the dtype of ``states``; bfloat16 for float16, whose gradients would vanish.

        Args:
            states: features, shape ``(L, B, T, D)``.
            weights: ``1 / n`` for each of the ``n`` real tokens of the batch and ``0`` for padding, shape ``(B, T)``.
        """
        mean, variance = self._batch_statistics(states, weights) if self.training else (self.mean, self.variance)
        scale = torch.rsqrt(variance + _EPSILON)
        normed = (states - mean[:, None, None]) * scale[:, None, None]
        return normed.to(torch.bfloat16 if states.dtype == torch.float16 else states.dtype)

    @torch.no_grad()
    def _batch_statistics(self, states: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and variance over real tokens, shape ``(L, D)`` each, and update the running statistics."""
        flat = states.flatten(1, 2).float()
        share = weights.flatten()
        mean = torch.matmul(share, flat)
        variance = torch.matmul(share, (flat - mean[:, None]).square_())
        count = (share > 0).sum().clamp(min=2)
        self.batches += 1
        newest = (1 / self.batches).clamp(min=self.momentum)
        self.mean.lerp_(mean, newest)
        self.variance.lerp_(variance * (count / (count - 1)), newest)  # unbiased, as in torch's batch norm
        return mean, variance


class AttentiveProbes(nn.Module):
    r"""Attentive pooling and a linear classifier for each layer (El-Nouby et al., 2024, AIM), all layers in one pass.

    .. math::
        y = W \, \Vert_h \sum_t a_{ht} V_h \hat x_t, \qquad
        a_h = \operatorname{softmax}_t(q_h^\top K_h \hat x_t / \sqrt{d})

    with :math:`\hat x` the batch-normed tokens and one learned query for each head. Since the query does not depend on
    the tokens, :math:`K_h^\top q_h` is one vector, and the values are projected after the sum: no token is multiplied
    by a ``D x D`` matrix. The result equals the published probe up to rounding.

    Every layer starts from the weights of a single-layer probe with the same seed.

    Args:
        layers: number of layers L.
        width: of the tokens, D.
        classes: number of classes C.
        heads: attention heads; ``None`` for one per 64 dimensions if that divides the width.
        seed: for the weights.

    Example:
        >>> probes = AttentiveProbes(3, 8, 2, heads=2)
        >>> probes(torch.zeros(3, 5, 7, 8), torch.ones(5, 7, dtype=torch.bool)).shape
        torch.Size([3, 5, 2])
    """

    def __init__(self, layers: int, width: int, classes: int, *, heads: int | None = None, seed: int = 0) -> None:
        super().__init__()
        self.heads = num_heads(width) if heads is None else heads
        if self.heads < 1 or width % self.heads:
            raise OptionError(f"`heads` must divide the width {width} of the tokens, but got {self.heads}.")
        generator = torch.Generator().manual_seed(seed)
        self.normalizer = LayerNormalizer(layers, width)
        self.query = _repeat(torch.randn(width, generator=generator) * 0.02, layers)
        self.key = _repeat(_uniform(width, width, generator), layers)
        self.value = _repeat(_uniform(width, width, generator), layers)
        self.weight = _repeat(_uniform(classes, width, generator), layers)
        self.bias = _repeat(torch.zeros(classes), layers)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return logits ``(L, B, C)`` in float32.

        Args:
            states: tokens of every layer, shape ``(L, B, T, D)``, in any float dtype.
            mask: True for real tokens, shape ``(B, T)``; every example has at least one.
        """
        L, B, T, D = states.shape
        states = self.normalizer(states, mask.float() / mask.sum())
        split = (L, self.heads, D // self.heads)
        direction = torch.einsum("lhe,lhed->lhd", self.query.view(split), self.key.view(*split, D))
        direction = (direction / math.sqrt(D // self.heads)).to(states.dtype)
        scores = torch.bmm(states.view(L, B * T, D), direction.mT).view(L, B, T, self.heads).mT.float()
        attention = scores.masked_fill(~mask[None, :, None], -math.inf).softmax(dim=-1).to(states.dtype)
        pooled = torch.bmm(attention.flatten(0, 1), states.flatten(0, 1)).view(L, B, self.heads, D).float()
        values = torch.einsum("lbhd,lhed->lbhe", pooled, self.value.view(*split, D)).reshape(L, B, D)
        return torch.baddbmm(self.bias[:, None], values, self.weight.mT)


class LinearProbes(nn.Module):
    """Batch norm and a linear classifier on the mean of each layer's tokens, all layers in one pass.

    Args:
        layers: number of layers L.
        width: of the tokens, D.
        classes: number of classes C.
        seed: for the weights, which are the same for every layer.

    Example:
        >>> LinearProbes(3, 8, 2)(torch.zeros(3, 5, 7, 8), torch.ones(5, 7, dtype=torch.bool)).shape
        torch.Size([3, 5, 2])
    """

    def __init__(self, layers: int, width: int, classes: int, *, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.normalizer = LayerNormalizer(layers, width)
        self.weight = _repeat(_uniform(classes, width, generator), layers)
        self.bias = _repeat(torch.zeros(classes), layers)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Return logits ``(L, B, C)`` in float32 for tokens ``(L, B, T, D)`` and their mask ``(B, T)``."""
        share = mask.float() / mask.sum(dim=1, keepdim=True)
        means = torch.einsum("lbtd,bt->lbd", states.float(), share)[:, :, None]
        weights = torch.full((means.shape[1], 1), 1 / means.shape[1], device=means.device)
        return torch.baddbmm(self.bias[:, None], self.normalizer(means, weights)[:, :, 0], self.weight.mT)


def num_heads(width: int) -> int:
    """Return one head per 64 dimensions, or the next smaller number that divides the width.

    Example:
        >>> num_heads(768), num_heads(192), num_heads(100), num_heads(32)
        (12, 3, 1, 1)
    """
    return next(heads for heads in range(max(1, width // 64), 0, -1) if width % heads == 0)


def _uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return weights initialized as in :class:`torch.nn.Linear`."""
    bound = 1 / math.sqrt(columns)
    return torch.empty(rows, columns).uniform_(-bound, bound, generator=generator)


def _repeat(start: Tensor, layers: int) -> nn.Parameter:
    return nn.Parameter(start.expand(layers, *start.shape).clone())
