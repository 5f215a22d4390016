"""Whether a model needs to be told where texts end: a causal one that is padded on the right does not.

Its real tokens see none of the padding after them, and only real tokens are pooled. Without a mask attention takes the
fastest kernels, and nothing on the host waits for the device to look whether the mask hides anything. On a CPU torch's
kernel finds the scores of all pairs of tokens even where the later ones do not count; :func:`causal_attention` leaves
most of those out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import capture

_LONGEST = 64  # tokens of the text that is tried
_ROUNDINGS = 32
_BLOCK = 32  # tokens that attend together: of 16 to 128 the quickest at 200 and 512 tokens, heads of 16 and 64
_needless: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()  # beside the models, as turns are


def padded_right(inputs: Mapping[str, Any]) -> bool:
    """Return whether these are token ids and their mask alone, each text followed by its padding."""
    mask = inputs.get("attention_mask")
    tensors = {name for name, value in inputs.items() if isinstance(value, Tensor)}
    if mask is None or tensors != {"input_ids", "attention_mask"} or mask.ndim != 2:
        return False
    return bool((mask[:, :1] != 0).all() and (mask[:, 1:] <= mask[:, :-1]).all())


def mask_is_needless(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]) -> bool:
    """Return whether the states of real tokens, at every layer, are the same without the mask and whatever is padded.

    It is tried once for each model, not looked up: half of a text is padded with one token and with another, without a
    mask. The states of the half must be the same, since nothing after a token reaches it in a causal model, and those
    that the mask gives, within rounding.

    Args:
        model: in eval mode.
        anatomy: of it.
        inputs: of a batch, :func:`padded_right`.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "is_causal", None), getattr(config, "_attn_implementation", None)
    known = _needless.setdefault(model, {})
    if kind not in known:
        known[kind] = _tried(model, anatomy, inputs["input_ids"], inputs["attention_mask"])
    return known[kind]


@torch.inference_mode()
def _tried(model: nn.Module, anatomy: Anatomy, ids: Tensor, mask: Tensor) -> bool:
    length = min(int(mask[0].sum()), _LONGEST)
    kept = length // 2
    text = ids[:1, :length]
    others = text[0][text[0] != text[0, 0]]
    if kept < 1 or not len(others):
        return False
    one, other = text.clone(), text.clone()
    one[:, kept:], other[:, kept:] = text[0, 0], others[0]
    shown = torch.ones_like(text)
    shown[:, kept:] = 0
    masks = torch.cat([torch.ones_like(shown), shown])
    (masked,) = _states(model, anatomy, {"input_ids": torch.cat([text, one]), "attention_mask": masks}, kept)
    with causal_attention(text.device):
        first, second = _states(model, anatomy, {"input_ids": torch.cat([text, one, other])}, kept)
    most = _ROUNDINGS * torch.finfo(masked.dtype).eps * masked.float().norm(dim=(1, 2))
    off = torch.stack([(states.float() - masked.float()).norm(dim=(1, 2)) for states in (first, second)])
    return bool((off <= most).all())


def _states(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Tensor], kept: int) -> list[Tensor]:
    """Return the states of the first tokens of each text but the first, at every layer, ``(L, T, D)`` each."""
    found: list[Tensor] = []
    layers = range(anatomy.num_layers + 1)
    capture(
        model, inputs, lambda _, __, states: found.append(states[1:, :kept].clone()), anatomy=anatomy, layers=layers
    )
    return list(torch.stack([states.to(found[0].device) for states in found], dim=1))


@torch.inference_mode()
def looks_ahead(model: nn.Module, anatomy: Anatomy, inputs: Mapping[str, Any]) -> bool:
    """Return whether the states of a text's other tokens change with its last one: a causal model's do not.

    Args:
        model: in eval mode.
        anatomy: of it.
        inputs: of one text, two tokens or more, not padded.
    """
    ids = inputs["input_ids"]
    other = ids.clone()
    other[:, -1] = torch.where(ids[:, -1] > 0, ids[:, -1] - 1, 1)
    seen: list[Tensor] = []
    for text in (ids, other):
        # One at a time: the same shapes take the same steps, so that states which do not change are equal to the bit.
        capture(
            model, {**inputs, "input_ids": text}, lambda _, __, states: seen.append(states.clone()), anatomy=anatomy,
            layers=[anatomy.num_layers],
        )  # fmt: skip
    return not torch.equal(seen[0][:, :-1], seen[1][:, :-1])


def causal_attention(device: torch.device) -> AbstractContextManager[object]:
    """Return a context for the passes of a model without a mask: causal attention on a CPU takes half the time in it.

    Up to 512 tokens torch's kernel there finds the scores of every pair of tokens and then drops those of later ones.
    Here a block of tokens attends to those up to its end, with the same kernel: the results are the same, to the bit
    where they were compared (benchmarks/results/metrics_cpu.md).
    """
    return _InBlocks() if device.type == "cpu" else nullcontext()


class _InBlocks(TorchFunctionMode):
    """Attends in blocks of tokens, in this thread, where torch's own function is asked for causal attention."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # A block that is being compiled is left to the compiler, which would trace into this.
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
            kwargs["attn_mask"] = _later(end - start, end, query.dtype)
            parts.append(func(query[..., start:end, :], key[..., :end, :], value[..., :end, :], **kwargs))
        return torch.cat(parts, dim=-2)


def _is_plainly_causal(*tensors: Any, is_causal: bool = False, attn_mask: Any = None, **_: Any) -> bool:
    if not is_causal or attn_mask is not None or len(tensors) != 3:
        return False
    query, key, _value = tensors
    return query.device.type == "cpu" and bool(_BLOCK < query.shape[-2] == key.shape[-2])


@lru_cache(maxsize=64)
def _later(rows: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return what is added to the scores of the last tokens up to ``end``: minus infinity at those after each."""
    with torch.inference_mode(mode=False):  # it is kept, also for passes outside
        return torch.full((rows, end), -torch.inf, dtype=dtype, device="cpu").triu(end - rows + 1)
