"""Looks at an encoder that was just made: are its states those of the layer, does its mask do what was asked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.reading.norm import final_norm

__all__ = ["check_states", "turn_mask_off"]


def turn_mask_off(module: nn.Module, cut: Cut, name: str) -> None:
    """Turn the causal mask off, and make sure by looking that the first token now sees the last."""
    model: Any = module.model
    if cut.layer > 0 and _sees_ahead(module):
        raise OptionError(f"`bidirectional` must be False for {name}: it has no causal mask to turn off.")
    model.config.is_causal = False
    for part in model.modules():
        if getattr(part, "is_causal", None) is True:
            part.is_causal = False
    if cut.layer > 0 and not _sees_ahead(module):
        raise OptionError(
            f"`bidirectional` must be False for {name}: its tokens see only those before them, "
            "whatever its config says (a state-space model, or attention with a mask of its own)."
        )


@torch.no_grad()
def _sees_ahead(module: nn.Module) -> bool:
    """Return whether the first token's states depend on the last token."""
    ids = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]], device=next(module.parameters()).device)
    states = module({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["token_embeddings"]
    return not torch.equal(states[0, 0], states[1, 0])


@torch.no_grad()
def check_states(module: nn.Module, cut: Cut, features: Mapping[str, Any]) -> None:
    """Raise unless the states that will be pooled are those of the layer, seen by a hook on its block."""
    model: Any = module.model
    blocks: Any = model.get_submodule(cut.anatomy.blocks)
    convolved = getattr(model.config, "conv_kernel_size", 0)  # DeBERTa's first layer ends after a convolution
    if not len(blocks) or convolved:
        return
    with _watched(blocks, cut) as seen:
        states = module(dict(features))["token_embeddings"]
    expected = seen[0 if cut.layer == 0 else cut.layer - 1]
    expected = final_norm(model, cut.anatomy, cut.norm)(expected)
    if expected.shape != states.shape or not torch.allclose(
        expected, states, rtol=1e-3, atol=1e-3 * float(expected.abs().max())
    ):
        raise CutError(
            f"{type(model).__name__} gives other states for layer {cut.layer} with norm={cut.norm!r} than its "
            "block does, so something stands between them that is not known here. "
            + ("Try norm='none'." if cut.norm == "final" else "Try norm='final'.")
        )


@contextlib.contextmanager
def _watched(blocks: Any, cut: Cut) -> Iterator[list[Tensor]]:
    """Collect what enters the first block, for layer 0, or what each pass through a block returns."""
    seen: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        seen.append(output[0] if isinstance(output, tuple) else output)

    if cut.layer == 0:
        handles = [blocks[0].register_forward_pre_hook(enter, with_kwargs=True)]
    else:
        handles = [block.register_forward_hook(leave) for block in blocks]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
