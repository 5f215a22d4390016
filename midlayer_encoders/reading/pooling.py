"""Pool token states into one vector, numerically equal to sentence-transformers, and recognize norms."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.validation import check_choice

_SCALED_MEAN = "mean_sqrt_len_tokens"  # of sentence-transformers: the sum over the square root of the length
_EPS_NAMES = ("variance_epsilon", "eps", "epsilon", "norm_eps")
_MAX_ROUNDINGS = 4  # tolerance, in machine epsilons of the states' dtype


def pool(states: Tensor, mask: Tensor, pooling: Pooling = "mean") -> Tensor:
    r"""Return one vector per text, pooled over its real tokens; texts may be padded on either side.

    .. math::
        \text{mean: } \frac{\sum_t m_t z_t}{\sum_t m_t}, \qquad
        \text{weightedmean: } \frac{\sum_t m_t\, i_t\, z_t}{\sum_t m_t\, i_t},
        \quad i_t = 1, 2, \dots \text{ over the real tokens}

    Args:
        states: shape ``(B, T, D)``.
        mask: true at real tokens, shape ``(B, T)``.
        pooling: ``"mean"``, ``"last"``, ``"cls"`` (the first token), ``"max"``, ``"weightedmean"`` or
            ``"mean_sqrt_len_tokens"``, or several joined by plus signs, whose vectors are concatenated.

    Returns:
        Shape ``(B, D)``, float32 or better. Zeros for a text without tokens.

    Example:
        >>> states = torch.tensor([[[1.0], [3.0], [9.0]]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> [pool(states, mask, pooling).item() for pooling in ("mean", "last", "cls", "max")]
        [2.0, 3.0, 1.0, 3.0]
    """
    if "+" in pooling:
        return torch.cat([pool(states, mask, cast(Pooling, part)) for part in pooling.split("+")], dim=-1)
    check_choice("pooling", pooling, (*POOLINGS, _SCALED_MEAN))
    states = states.float() if states.dtype in (torch.float16, torch.bfloat16) else states
    if pooling in ("mean", "weightedmean", _SCALED_MEAN):
        weights = token_weights(mask, pooling, states.dtype)
        total = torch.einsum("btd,bt->bd", states, weights)
        count = weights.sum(dim=1, keepdim=True).clamp(min=1)
        return total / (count.sqrt() if pooling == _SCALED_MEAN else count)
    if pooling == "max":
        real = mask.any(dim=1, keepdim=True)
        return states.masked_fill(~mask[..., None], -torch.inf).amax(dim=1).masked_fill(~real, 0.0)
    real, place = token_places(mask, pooling)
    return states[torch.arange(len(states), device=states.device), place].masked_fill(~real, 0.0)


def token_weights(mask: Tensor, pooling: Pooling, dtype: torch.dtype) -> Tensor:
    """Return the token weights of a ``"mean"`` or ``"weightedmean"``, zero at padding, shape ``(B, T)``."""
    dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    return mask * mask.cumsum(dim=1).to(dtype) if pooling == "weightedmean" else mask.to(dtype)


def token_places(mask: Tensor, pooling: Pooling) -> tuple[Tensor, Tensor]:
    """Return whether each text has a token, shape ``(B, 1)``, and the index of its first (``"cls"``) or last one."""
    last = mask.shape[1] - 1
    place = mask.int().argmax(dim=1) if pooling == "cls" else last - mask.int().flip(1).argmax(dim=1)
    return mask.any(dim=1, keepdim=True), place


def real_tokens(mask: Tensor | None, states: Tensor, *, model: nn.Module | None = None) -> Tensor:
    """Return the bool mask of real tokens, shape ``(B, T)``; all true without an attention mask.

    Audio models downsample their inputs, so the input mask is longer than the states. Wav2Vec2, HuBERT and WavLM
    have a method that downsamples the mask; a state of Whisper covers two frames.

    Args:
        mask: the ``attention_mask`` of the model's inputs.
        states: shape ``(B, T, D)``.
        model: the transformer.
    """
    if mask is None or len(mask) != len(states) or mask.ndim != 2:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    mask = mask.to(states.device)
    length = states.shape[1]
    if mask.shape[1] == length:
        return mask.bool()
    main_input = getattr(model, "main_input_name", "")
    if main_input == "input_ids" and length > mask.shape[1]:  # the model pads to whole windows
        return torch.nn.functional.pad(mask, (0, length - mask.shape[1])).bool()
    if model is not None and internals.has_mask_of_states(model):
        return internals.mask_of_states(model, length, mask)
    if main_input == "input_features":
        frames = -(-mask.shape[1] // length)  # of a state
        return nn.functional.max_pool1d(mask[:, None].float(), frames, ceil_mode=True)[:, 0].bool()
    return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)


def pool_normalized(norm: nn.Sequential, states: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Return ``pool(norm(states), mask, pooling)``; only the tokens that are pooled are normalized."""
    if pooling not in ("cls", "last"):
        return pool(norm(states), mask, pooling)
    real, place = token_places(mask, pooling)
    pooled = states[torch.arange(len(states), device=states.device), place]
    return pool(norm(pooled[:, None]), real, "cls")


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

    def normalized(self, states: Tensor) -> Tensor:
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
    distances = [(form.normalized(rows) - expected).abs() for form in forms]
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
