"""Turn off the causal mask of a model, and find the blocks that have one."""

import contextlib
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.reading.capture import first_tensor, input_states


def turn_mask_off(module: nn.Module, cut: Cut, name: str) -> None:
    """Turn off the causal mask, and raise if a block remains causal."""
    model: Any = module.model
    if not isinstance(getattr(_token_table(model), "weight", None), Tensor):  # patches or waveforms
        raise OptionError(f"`bidirectional` must be False for {name}, which reads no tokens: it has no causal mask.")
    if cut.layer > 0 and not _causal_blocks(module, cut):
        raise OptionError(f"`bidirectional` must be False for {name}: it has no causal mask to turn off.")
    model.config.is_causal = False
    for part in model.modules():
        if getattr(part, "is_causal", None) is True:
            part.is_causal = False
    ids = _token_ids(module, [[5, 6, 7]])
    try:
        with torch.no_grad():
            module({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    except AttributeError as reason:  # MPT requires a mask then, which only padded batches have
        raise OptionError(f"`bidirectional` must be False for {name}: it does not run without its mask.") from reason
    if cut.layer > 0 and (causal := _causal_blocks(module, cut)):
        which = f"those of blocks {', '.join(map(str, causal))}" if len(causal) < cut.layer else "its tokens"
        raise OptionError(
            f"`bidirectional` must be False for {name}: {which} see only those before them, whatever its config says "
            "(a state-space model, or attention with another mask)."
        )


def _token_table(model: nn.Module) -> Any:
    tables = (part for part in model.modules() if isinstance(part, nn.Embedding))
    return internals.input_embeddings(model) or next(tables, None)


def _token_ids(module: Any, ids: list[list[int]]) -> Tensor:
    """Return token ids on the module's device, within its vocabulary."""
    table = _token_table(module.model)
    size = getattr(table, "num_embeddings", None) or len(table.weight)
    return torch.tensor(ids, device=next(module.parameters()).device).remainder(size)


def _causal_blocks(module: nn.Module, cut: Cut) -> list[int]:
    """Return the blocks, from 1, in which a token of a padded batch sees less ahead than back."""
    model: Any = module.model
    ids = _token_ids(module, [[5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0], [5, 6, 7, 9, 5, 6, 7, 8, 5, 6, 7, 8]])
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    passes: list[tuple[Tensor, Tensor]] = []
    inputs: list[Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        states = input_states(args, kwargs)
        leaf = states.detach().requires_grad_(True)
        inputs.append(leaf)
        new_args = tuple(leaf if value is states else value for value in args)
        return new_args, {name: leaf if value is states else value for name, value in kwargs.items()}

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if (states := first_tensor(output)) is not None:
            passes.append((inputs[-1], states))

    with contextlib.ExitStack() as stack:
        for block in itertools.islice(model.get_submodule(cut.anatomy.blocks), cut.layer):
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        with torch.enable_grad():
            module({"input_ids": ids, "attention_mask": mask})
    last = ids.shape[1] - 1
    return [
        number
        for number, states in enumerate(passes, 1)
        # In the padded row, and as far ahead as back in the other: layers with a window keep it on both sides.
        if not _depends(cut.anatomy, *states, 0, 0, 1)
        or (_depends(cut.anatomy, *states, 1, last, 0) and not _depends(cut.anatomy, *states, 1, 0, last))
    ]


def _depends(anatomy: Anatomy, inputs: Tensor, outputs: Tensor, row: int, target: int, source: int) -> bool:
    """Return whether a block's output at token ``target`` depends on its input at token ``source``."""
    states = anatomy.tokens(outputs)[row, target]
    weights = torch.linspace(-1, 1, len(states), device=outputs.device, dtype=outputs.dtype).cos()
    (slope,) = torch.autograd.grad((states * weights).sum(), inputs, allow_unused=True, retain_graph=True)
    return slope is not None and bool(anatomy.tokens(slope)[row, source].abs().max() > 0)
