"""Omit the padding mask of causal models.

In a causal model padded on the right, real tokens do not attend to padding, and only real tokens are pooled. Without a
mask torch uses its fastest kernels, and the CPU does not wait for the GPU to inspect the mask.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import capture, capture_states

_MAX_TRIAL_TOKENS = 64
_ROUNDINGS = 32
_needless: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()  # results of trials


def padded_right(inputs: Mapping[str, Any]) -> bool:
    """Return True if the inputs are only token ids and a mask, padded on the right."""
    mask = inputs.get("attention_mask")
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
    if mask is None or tensors != {"input_ids", "attention_mask"} or mask.ndim != 2:
        return False
    return bool((mask[:, :1] != 0).all() and (mask[:, 1:] <= mask[:, :-1]).all())


def mask_is_needless(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]) -> bool:
    """Return True if the states of real tokens are the same without the mask at all layers.

    This is tried once per model: half of a text is padded with two different tokens, without a mask. In a causal model
    both give the states that the mask gives, up to rounding.

    Args:
        model: the model, in eval mode.
        anatomy: structure of ``model``.
        inputs: a batch that is :func:`padded_right`.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "is_causal", None), getattr(config, "_attn_implementation", None)
    results = _needless.setdefault(model, {})
    if kind not in results:
        results[kind] = _try_without_mask(model, anatomy, inputs["input_ids"], inputs["attention_mask"])
    return results[kind]


@torch.inference_mode()
def _try_without_mask(model: nn.Module, anatomy: Anatomy, ids: Tensor, mask: Tensor) -> bool:
    length = min(int(mask[0].sum()), _MAX_TRIAL_TOKENS)
    half = length // 2
    text = ids[:1, :length]
    other_tokens = text[0][text[0] != text[0, 0]]
    if half < 1 or not len(other_tokens):
        return False
    padded = text.clone()
    padded[:, half:] = text[0, 0]
    padded_otherwise = text.clone()
    padded_otherwise[:, half:] = other_tokens[0]
    half_mask = torch.ones_like(text)
    half_mask[:, half:] = 0
    masks = torch.cat([torch.ones_like(text), half_mask])
    (masked,) = _states(model, anatomy, {"input_ids": torch.cat([text, padded]), "attention_mask": masks}, half)
    unmasked = _states(model, anatomy, {"input_ids": torch.cat([text, padded, padded_otherwise])}, half)
    tolerance = _ROUNDINGS * torch.finfo(masked.dtype).eps * masked.float().norm(dim=(1, 2))
    errors = torch.stack([(states.float() - masked.float()).norm(dim=(1, 2)) for states in unmasked])
    return bool((errors <= tolerance).all())


def _states(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor], length: int) -> list[Tensor]:
    """Return the states of the first tokens of each text but the first at all layers, ``(L, T, D)`` each."""
    by_layer: list[Tensor] = []

    def receive(_: int, states: Tensor) -> None:
        by_layer.append(states[1:, :length].clone())

    capture(model, inputs, receive, anatomy=anatomy, layers=range(anatomy.num_layers + 1))
    return list(torch.stack([states.to(by_layer[0].device) for states in by_layer], dim=1))


@torch.inference_mode()
def looks_ahead(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]) -> bool:
    """Return True if the states of a text depend on its last token, as in a model that is not causal.

    Args:
        model: the model, in eval mode.
        anatomy: structure of ``model``.
        inputs: one text of two or more tokens, without padding.
    """
    ids = inputs["input_ids"]
    other = ids.clone()
    other[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, 1)
    # One text at a time: equal shapes give bitwise equal states.
    (states,), (other_states,) = (
        capture_states(model, {**inputs, "input_ids": text}, anatomy=anatomy, layers=[anatomy.num_layers])
        for text in (ids, other)
    )
    return not torch.equal(states[:, :-1], other_states[:, :-1])
