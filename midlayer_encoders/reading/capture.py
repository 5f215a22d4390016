"""Run a model once and pass the states of each layer to a callback.

No token states are stored: the callback receives a layer when the next block does.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models.anatomy import Anatomy, Site, block_sites
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.validation import check_choice

#: The site of the residual stream after a block.
STREAM = "residual_out"

#: Called with the layer, the site and the states ``(B, T, D)``, in ascending order of layers.
Receive: TypeAlias = Callable[[int, str, Tensor], None]


class _LastLayerReadError(Exception):
    """Ends the pass after the last layer to read."""


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    receive: Receive,
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm = "none",
    sites: Sequence[str] = (STREAM,),
) -> None:
    """Run ``model`` once and pass the states of the layers to ``receive``; later blocks do not run.

    With weights that FSDP2 shards all blocks run, because FSDP2 resets its state at the end of a pass.

    Args:
        model: the uncut model, or one cut after the last layer to read.
        inputs: keyword arguments of its forward.
        receive: called with the states of each layer.
        anatomy: structure of ``model``.
        layers: layers to read, ``0`` to ``num_layers``.
        norm: ``"final"`` applies the final norm to the residual stream.
        sites: points of each block to read; see :func:`~midlayer_encoders.models.anatomy.block_sites`.
    """
    complete = bool(sharded_modules(model))
    arguments = accepted_arguments(model, inputs)
    if complete and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # the pass reaches the head, whose output is large
    with layers_watched(model, receive, anatomy=anatomy, layers=layers, norm=norm, sites=sites, complete=complete):
        model(**arguments)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights FSDP2 (``fully_shard``) shards, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever shards; importing it takes a second
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, "FSDPModule", ()))]


def captured(
    model: nn.Module, inputs: Mapping[str, Any], *, anatomy: Anatomy, layers: Sequence[int], norm: Norm = "none"
) -> list[Tensor]:
    """Return the states of layers in ascending order; see :func:`capture`."""
    states: list[Tensor] = []
    capture(model, inputs, lambda _, __, found: states.append(found), anatomy=anatomy, layers=layers, norm=norm)
    return states


def accepted_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs that a model's forward pass accepts; a module in memory may take no mask, or require one."""
    parameters = inspect.signature(model.forward).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    accepted = {name: value for name, value in inputs.items() if any_name or name in parameters}
    mask = parameters.get("attention_mask")
    if accepted and mask is not None and mask.default is mask.empty and "attention_mask" not in accepted:
        tokens = next(iter(accepted.values()))
        accepted["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
    return accepted


@contextmanager
def layers_watched(
    model: nn.Module,
    receive: Receive,
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm = "none",
    sites: Sequence[str] = (STREAM,),
    complete: bool = True,
) -> Iterator[None]:
    """Pass the states of layers to ``receive`` in all passes of ``model`` inside a ``with`` block.

    The block holds the model's lock. Passes of other threads, and passes started by ``receive``, are ignored. A pass
    ends after the last layer unless it is ``complete``. The other arguments are as in :func:`capture`.
    """
    layers = sorted(set(layers))
    if not layers or layers[0] < 0 or layers[-1] > anatomy.num_layers:
        raise OptionError(f"`layers` must be within [0, {anatomy.num_layers}] and not empty, but got {list(layers)}.")
    normed = final_norm(model, anatomy, norm)
    inner_sites = [name for name in sites if name != STREAM]
    shape: tuple[int, ...] = ()  # (B, T) of the residual stream
    entered = 0  # blocks entered in this pass; a shared block is entered several times

    def hand_on(layer: int, site: str, states: Tensor) -> None:
        if layer in layers and site in sites:
            states = anatomy.tokens(states)
            receive(layer, site, normed(states) if site == STREAM else _token_rows(states, shape, site))
        if layer == layers[-1] and site == STREAM and not complete:
            raise _LastLayerReadError

    def enter(states: Tensor) -> None:
        nonlocal entered, shape
        entered += 1
        shape = tuple(anatomy.tokens(states).shape[:2])
        hand_on(entered - 1, STREAM, states)

    def leave(states: Tensor) -> None:
        if entered == anatomy.num_layers:
            hand_on(entered, STREAM, states)

    def inside(name: str) -> Callable[[Tensor], None]:
        return lambda states: hand_on(entered, name, states)

    def watch(site: Site, take: Callable[[Tensor], None]) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
            # In another thread torch may call the hook without `kwargs` while it is being registered.
            if is_current():
                take(input_states(args, kwargs or {}))

        def after(_: nn.Module, __: Any, output: Any) -> None:
            if is_current():
                states = first_tensor(output)
                assert states is not None
                take(states)

        module = block.get_submodule(site.module)
        if site.side == "input":
            hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        else:
            hooks.callback(module.register_forward_hook(after).remove)

    with turn(model) as is_current, ExitStack() as hooks:
        for block in anatomy.distinct_blocks(model):
            watch(Site("", "input"), enter)
            watch(Site("", "output"), leave)
            available = block_sites(block, getattr(model, "config", None)) if inner_sites else {}
            for name in inner_sites:
                check_choice("sites", name, available)
                watch(available[name], inside(name))
        with suppress(_LastLayerReadError):
            yield


@contextmanager
def blocks_bypassed(model: nn.Module, anatomy: Anatomy, layer: int) -> Iterator[None]:
    """Make the blocks after a layer return their input inside a ``with`` block, for any operation after the last one.

    The block holds the model's lock; passes of other threads are not changed.
    """
    entered = 0

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> Any:
        nonlocal entered
        entered += is_current()
        if not is_current() or entered <= layer:
            return output
        states = input_states(args, kwargs)
        bypassed = _with_states(output, first_tensor(output), states)
        if first_tensor(bypassed) is not states:
            raise CutError(f"The blocks of {type(model).__name__} return {type(output)}, whose states are unknown.")
        return bypassed

    with turn(model) as is_current, ExitStack() as hooks:
        for block in anatomy.distinct_blocks(model):
            hooks.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        yield


@contextmanager
def blocks_returning(model: nn.Module, anatomy: Anatomy, output: Any, states: Tensor) -> Iterator[None]:
    """Make all blocks return the same states without running, inside a ``with`` block that holds the model's lock.

    Args:
        model: the model.
        anatomy: structure of ``model``.
        output: an output of a block, whose form the blocks keep.
        states: the states.
    """
    replaced = _with_states(output, first_tensor(output), states)
    if first_tensor(replaced) is not states:
        raise CutError(f"The blocks of {type(model).__name__} return {type(output)}, whose states are unknown.")

    def forward(*_: Any, **__: Any) -> Any:
        return replaced

    with ExitStack() as stack:
        for block in anatomy.distinct_blocks(model):
            stack.enter_context(mock.patch.object(block, "forward", forward))
        yield


def _with_states(output: Any, states: Tensor | None, replacement: Tensor) -> Any:
    """Return the output of a block with other states."""
    if output is states:
        return replacement
    if isinstance(output, tuple | list):
        return type(output)(_with_states(value, states, replacement) for value in output)
    return output


def final_norm(model: nn.Module, anatomy: Anatomy, norm: Norm) -> nn.Sequential:
    """Return a module that normalizes the states ``(B, T, D)`` of a layer.

    With ``norm="final"`` it applies the modules after the model's last block (usually one norm, sometimes also a
    projection); with ``norm="none"`` it returns the states unchanged.
    """
    return nn.Sequential(*(model.get_submodule(path) for path in (anatomy.final if norm == "final" else ())))


def _token_rows(states: Tensor, shape: tuple[int, ...], site: str) -> Tensor:
    """Return the states inside a block as ``(B, T, D)``; some models flatten batch and tokens."""
    if states.ndim == 2 and len(states) == shape[0] * shape[1]:
        states = states.reshape(*shape, -1)
    if tuple(states.shape[:2]) != shape:
        raise OptionError(
            f"`site` {site!r} cannot be read from this model: its states have the shape {tuple(states.shape)}, but the "
            f"residual stream has {shape[0]} inputs of {shape[1]} tokens. Read site='block'."
        )
    return states


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in the input or output of a block."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for tensor in map(first_tensor, inner) if tensor is not None), None)


def input_states(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """Return the states that a block receives: its first argument, or ``hidden_states``."""
    states = first_tensor((args, kwargs.get("hidden_states"), kwargs))
    if states is None:
        raise CutError("Blocks must receive their states as floating-point tensors. Pass another list as `blocks`.")
    return states
