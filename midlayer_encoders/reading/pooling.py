"""Pool token states into one vector, numerically equal to sentence-transformers."""

from typing import cast

import torch
from torch import Tensor, nn

from midlayer_encoders._types import POOLINGS, Pooling
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.validation import check_choice

_SCALED_MEAN = "mean_sqrt_len_tokens"  # of sentence-transformers: the sum over the square root of the length


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
