"""Omit the padding mask of causal models, and speed up their attention on a CPU.

In a causal model padded on the right, real tokens do not attend to padding, and only real tokens are pooled. Without a
mask torch uses its fastest kernels, and the CPU does not wait for the GPU to inspect the mask. On a CPU torch computes
the attention scores of all token pairs; :func:`causal_attention` skips most pairs that the causal mask hides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import capture

_MAX_TRIAL_TOKENS = 64
_ROUNDINGS = 32
_BLOCK = 32  # queries per attention call: the fastest of 16 to 128 at 200 and 512 tokens, heads of 16 and 64
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
    with causal_attention(text.device):
        unmasked = _states(model, anatomy, {"input_ids": torch.cat([text, padded, padded_otherwise])}, half)
    tolerance = _ROUNDINGS * torch.finfo(masked.dtype).eps * masked.float().norm(dim=(1, 2))
    errors = torch.stack([(states.float() - masked.float()).norm(dim=(1, 2)) for states in unmasked])
    return bool((errors <= tolerance).all())


def _states(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor], length: int) -> list[Tensor]:
    """Return the states of the first tokens of each text but the first at all layers, ``(L, T, D)`` each."""
    by_layer: list[Tensor] = []

    def receive(_: int, __: str, states: Tensor) -> None:
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
    outputs: list[Tensor] = []

    def receive(_: int, __: str, states: Tensor) -> None:
        outputs.append(states.clone())

    for text in (ids, other):
        # One text at a time: equal shapes give bitwise equal states.
        capture(model, {**inputs, "input_ids": text}, receive, anatomy=anatomy, layers=[anatomy.num_layers])
    return not torch.equal(outputs[0][:, :-1], outputs[1][:, :-1])


def causal_attention(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which causal attention without a mask takes half the time on a CPU.

    Up to 512 tokens torch's CPU kernel computes the scores of all token pairs and discards those of later tokens. Here
    a block of queries attends only to the tokens up to its end, with the same kernel; results were bitwise equal
    (benchmarks/results/metrics_cpu.md).
    """
    return _BlockwiseAttention() if device.type == "cpu" else nullcontext()


class _BlockwiseAttention(TorchFunctionMode):
    """Computes causal attention in blocks of queries, in this thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # The compiler would trace into this mode.
        if (
            torch.compiler.is_compiling()
            or func is not scaled_dot_product_attention
            or not _is_plainly_causal(*args, **kwargs)
        ):
            return func(*args, **kwargs)
        query, key, value = args
        kwargs = {**kwargs, "is_causal": False}
        parts = []
        for start in range(0, query.shape[-2], _BLOCK):
            end = min(start + _BLOCK, query.shape[-2])
            kwargs["attn_mask"] = query.new_full((end - start, end), -torch.inf).triu(start + 1)  # hides later tokens
            parts.append(func(query[..., start:end, :], key[..., :end, :], value[..., :end, :], **kwargs))
        return torch.cat(parts, dim=-2)


def _is_plainly_causal(*tensors: Any, is_causal: bool = False, attn_mask: Any = None, **_: Any) -> bool:
    if not is_causal or attn_mask is not None or len(tensors) != 3:
        return False
    query, key, _value = tensors
    return query.device.type == "cpu" and bool(_BLOCK < query.shape[-2] == key.shape[-2])
