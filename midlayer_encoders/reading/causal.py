"""Whether a model needs to be told where texts end: a causal one that is padded on the right does not.

Its real tokens see none of the padding after them, and only real tokens are pooled. Without a mask attention takes the
fastest kernels, and nothing on the host waits for the device to look whether the mask hides anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import capture

__all__ = ["mask_is_needless", "padded_right"]

_LONGEST = 64  # tokens of the text that is tried


def padded_right(inputs: Mapping[str, Any]) -> bool:
    """Return whether these are token ids and their mask alone, each text followed by its padding."""
    mask = inputs.get("attention_mask")
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
    if mask is None or tensors != {"input_ids", "attention_mask"} or mask.ndim != 2:
        return False
    return bool((mask[:, :1] != 0).all() and (mask[:, 1:] <= mask[:, :-1]).all())


@torch.inference_mode()
def mask_is_needless(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]) -> bool:
    """Return whether the states of real tokens, at every layer, are the same without the mask and whatever is padded.

    It is tried, not looked up: half of a text is padded with one token and with another, without a mask. The states of
    the half must be equal to the last bit, since nothing after a token reaches it in a causal model, and those that the
    mask gives, within rounding.

    Args:
        model: in eval mode.
        anatomy: of it.
        inputs: of a batch, :func:`padded_right`.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    length = min(int(mask[0].sum()), _LONGEST)
    kept = length // 2
    others = ids[0, :length][ids[0, :length] != ids[0, 0]]
    if kept < 1 or not len(others):
        return False
    text = ids[:1, :length]
    one, other = text.clone(), text.clone()
    one[:, kept:], other[:, kept:] = ids[0, 0], others[0]
    shown = torch.ones_like(one)
    shown[:, kept:] = 0
    masked, first, second = (
        _states(model, anatomy, given, kept)
        for given in (
            {"input_ids": torch.cat([text, one]), "attention_mask": torch.cat([torch.ones_like(shown), shown])},
            {"input_ids": torch.cat([text, one])},
            {"input_ids": torch.cat([text, other])},
        )
    )
    rounding = 32 * torch.finfo(masked[0].dtype).eps
    return all(
        torch.equal(a, b) and bool(((a - m).norm() <= rounding * m.norm()).all())
        for m, a, b in zip(masked, first, second, strict=True)
    )


def _states(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor], kept: int) -> list[Tensor]:
    """Return the states of the second text's first tokens, at every layer."""
    found: list[Tensor] = []
    layers = range(anatomy.num_layers + 1)
    capture(model, inputs, lambda _, __, states: found.append(states[1, :kept].clone()), anatomy=anatomy, layers=layers)
    return found
