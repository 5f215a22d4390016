"""Named points inside a block: the residual stream, and the inputs and outputs of attention and MLP."""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.capture import accepted_arguments, first_tensor, input_states

#: The named points inside a block, in the order of the forward pass.
SITES = (
    "residual_in", "attention_in", "attention", "attention_sum", "residual_mid",
    "mlp_in", "mlp", "mlp_sum", "residual_out",
)  # fmt: skip

_LINEAR = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")
_ATTENTION = re.compile(r"Attention|Attn|Mixer")
_OUTPUT_PROJECTION = re.compile(r"(^|\.)(o|o_proj|out_proj|c_proj|dense|out_lin|Wo|proj)$")
_FUSED = {"WavLMAttention"}  # passes its projections' weights to one function and never calls them
_SPARSE = re.compile(r"Moe|MoE|Sparse")

# The residual stream between attention and MLP: the input of the norm before the MLP or, in post-norm blocks, the
# output of the norm after attention. The first match wins.
_MIDDLE: tuple[tuple[str, Literal["input", "output"]], ...] = (
    (r"pre_feedforward_layernorm|ln_2|mlp_norm|layer_norm2|layernorm_after|(rms_)?norm2|layer\.1\.layer_norm", "input"),
    (r"attention\.(output\.)?LayerNorm|sa_layer_norm", "output"),
    (r"post_attention_layernorm|final_layer_norm", "input"),
)


class Site(NamedTuple):
    """A point inside a block: the input or output of one of its modules (``""`` is the block itself)."""

    module: str
    side: Literal["input", "output"]


def block_sites(block: nn.Module, config: Any = None) -> dict[str, Site]:
    """Return the named points that a block has.

    Args:
        block: one of the blocks.
        config: config of the model, which says whether attention and MLP run in parallel.

    Returns:
        ``residual_in``, ``attention_in`` (the input of attention: the normalized stream, or the stream itself in
        post-norm blocks), ``attention`` (what attention adds to the stream, before any scale or norm), ``residual_mid``
        (the stream between attention and MLP, unless they run in parallel or one is missing), ``mlp_in``, ``mlp`` and
        ``residual_out``; in post-norm blocks also ``attention_sum`` and ``mlp_sum``, the stream before those norms. A
        state-space mixer counts as attention.
    """
    names = dict(block.named_modules())
    sites = {"residual_in": Site("", "input"), "residual_out": Site("", "output")}
    heads = [name for name, module in names.items() if name and _ATTENTION.search(type(module).__name__)]
    inside = tuple(f"{name}." for name in heads)
    linear = [name for name, module in names.items() if type(module).__name__ in _LINEAR]
    if attention := [name for name in linear if name.startswith(inside) and _OUTPUT_PROJECTION.search(name)]:
        readers = [name for name in linear if name.startswith(inside) and name not in attention]
        reader, writer = (readers[0], attention[-1]) if type(names[heads[0]]).__name__ not in _FUSED else heads[:1] * 2
        sites |= {"attention_in": Site(reader, "input"), "attention": Site(writer, "output")}
    sparse = [name for name, module in names.items() if name and _SPARSE.search(type(module).__name__)]
    if mlp := sparse[:1] or [name for name in linear if not name.startswith(inside)]:
        sites |= {"mlp_in": Site(mlp[0], "input"), "mlp": Site(mlp[-1], "output")}
    if (middle := _middle(list(names), config)) is not None and "attention" in sites and "mlp" in sites:
        sites["residual_mid"] = middle
        if middle.side == "output":
            norms = [name for name, module in names.items() if name and type(module).__name__.endswith("Norm")]
            outer = [name for name in norms if not name.startswith(inside) and name != middle.module]
            sites |= {"attention_sum": Site(middle.module, "input"), "mlp_sum": Site(outer[-1], "input")}
    return {name: sites[name] for name in SITES if name in sites}


def _middle(names: list[str], config: Any) -> Site | None:
    if getattr(config, "use_parallel_residual", False):
        return None
    if getattr(config, "model_type", None) == "opt" and not config.do_layer_norm_before:
        return Site("self_attn_layer_norm", "output")
    if getattr(config, "do_stable_layer_norm", True) is False:
        return Site("layer_norm", "output")
    for pattern, side in _MIDDLE:
        if norms := [name for name in names if re.search(rf"(^|\.)({pattern})$", name)]:
            return Site(norms[0], side)
    return None


def capture_sites(
    model: nn.Module,
    inputs: Mapping[str, Any],
    receive: Callable[[int, str, Tensor], None],
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    sites: Sequence[str],
) -> None:
    """Run ``model`` once and pass the states at sites of the blocks to ``receive``, with the number of the block.

    Args:
        model: the uncut model.
        inputs: keyword arguments of its forward.
        receive: called with the number of the block, the site and the states ``(B, T, D)``.
        anatomy: structure of ``model``.
        layers: numbers of blocks, from 1.
        sites: names of sites; see :func:`block_sites`.
    """
    entered = 0
    shape: tuple[int, ...] = ()  # (B, T)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        nonlocal entered, shape
        entered += 1
        shape = tuple(anatomy.tokens(input_states(args, kwargs)).shape[:2])

    def hand_on(name: str, states: Tensor | None) -> None:
        assert states is not None
        states = states.reshape(*shape, -1) if states.ndim == 2 else anatomy.tokens(states)  # experts flatten tokens
        if entered in layers:
            receive(entered, name, states)

    with ExitStack() as hooks, torch.no_grad():
        for block in anatomy.distinct_blocks(model):
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            available = block_sites(block, getattr(model, "config", None))
            for name in sites:
                module = block.get_submodule(available[name].module)
                if available[name].side == "input":
                    hook: Any = module.register_forward_pre_hook(
                        lambda _, args, kwargs, name=name: hand_on(name, input_states(args, kwargs)), with_kwargs=True
                    )
                else:
                    hook = module.register_forward_hook(
                        lambda _, __, output, name=name: hand_on(name, first_tensor(output))
                    )
                hooks.callback(hook.remove)
        model(**accepted_arguments(model, inputs))
