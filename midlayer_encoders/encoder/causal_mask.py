"""The causal mask turned off, and a look in every block whether a token then sees the next one."""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.models.padding import mark_wants_padding
from midlayer_encoders.reading.capture import first_tensor, seen_by_hooks

__all__ = ["turn_mask_off"]


def turn_mask_off(module: nn.Module, cut: Cut, name: str) -> None:
    """Turn the causal mask off, and make sure by looking that in every block a token now sees the next one."""
    model: Any = module.model
    if not isinstance(getattr(model.get_input_embeddings(), "weight", None), Tensor):  # patches or waveforms
        raise OptionError(f"`bidirectional` must be False for {name}, which reads no tokens: it has no causal mask.")
    if cut.layer > 0 and not _blind_blocks(module, cut):
        raise OptionError(f"`bidirectional` must be False for {name}: it has no causal mask to turn off.")
    model.config.is_causal = False
    for part in model.modules():
        if getattr(part, "is_causal", None) is True:
            part.is_causal = False
    _pad_where_needed(module)
    if cut.layer > 0 and (blind := _blind_blocks(module, cut)):
        which = f"those of blocks {', '.join(map(str, blind))}" if len(blind) < cut.layer else "its tokens"
        raise OptionError(
            f"`bidirectional` must be False for {name}: {which} see only those before them, "
            "whatever its config says (a state-space model, or attention with a mask of its own)."
        )


@torch.no_grad()
def _pad_where_needed(module: nn.Module) -> None:
    """Note it where a model without its causal mask runs only when something is padded: MPT asks for a mask then."""
    ids = _ids(module, [[5, 6, 7]])
    try:
        module({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except AttributeError:
        mark_wants_padding(module.model)  # type: ignore[arg-type]


def _ids(module: Any, ids: list[list[int]]) -> Tensor:
    """Return numbers of tokens on the module's device, within a vocabulary however small."""
    table = module.model.get_input_embeddings()
    size = getattr(table, "num_embeddings", None) or len(table.weight)
    return torch.tensor(ids, device=next(module.parameters()).device).remainder(size)


def _blind_blocks(module: nn.Module, cut: Cut) -> list[int]:
    """Return the blocks, from 1, in which a token of a padded batch does not see ahead as it sees back."""
    model: Any = module.model
    ids = _ids(module, [[5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0], [5, 6, 7, 9, 5, 6, 7, 8, 5, 6, 7, 8]])
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    seen: list[tuple[Tensor, Tensor]] = []
    entered: list[Tensor] = []

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = first_tensor(args)
        states = states if states is not None else kwargs["hidden_states"]
        leaf = states.detach().requires_grad_(True)
        entered.append(leaf)
        return tuple(leaf if v is states else v for v in args), {
            k: leaf if v is states else v for k, v in kwargs.items()
        }

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        states = first_tensor(output)
        if states is not None:
            seen.append((entered[-1], states))

    with contextlib.ExitStack() as stack:
        for block in itertools.islice(model.get_submodule(cut.anatomy.blocks), cut.layer):
            if cut.anatomy.past_hooks:
                stack.enter_context(seen_by_hooks(block))
            stack.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(leave).remove)
        with torch.enable_grad():
            module({"input_ids": ids, "attention_mask": mask})
    last = ids.shape[1] - 1
    depends = functools.partial(_depends, cut.anatomy)
    return [
        number
        for number, (given, made) in enumerate(seen, 1)
        # Padded, and as far ahead as it sees back: layers with a window keep it, on both sides.
        if not depends(made, given, 0, 0, 1)
        or (depends(made, given, 1, last, 0) and not depends(made, given, 1, 0, last))
    ]


def _depends(anatomy: Anatomy, made: Tensor, given: Tensor, row: int, target: int, source: int) -> bool:
    """Return whether a block's states at one token depend on what it received at another."""
    states = anatomy.tokens(made)[row, target]
    weights = torch.linspace(-1, 1, len(states), device=made.device, dtype=made.dtype).cos()
    (slope,) = torch.autograd.grad((states * weights).sum(), given, allow_unused=True, retain_graph=True)
    return slope is not None and bool(anatomy.tokens(slope)[row, source].abs().max() > 0)
