"""Run a model once and pass the states of each layer to a callback.

No token states are stored: the callback receives a layer when the next block does.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.reading.locks import turn

#: Called with the layer and the states ``(B, T, D)``, in ascending order of layers.
Receive: TypeAlias = Callable[[int, Tensor], None]


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
    """
    complete = bool(sharded_modules(model))
    arguments = accepted_arguments(model, inputs)
    if complete and "logits_to_keep" in inspect.signature(model.forward).parameters:
        arguments["logits_to_keep"] = 1  # the pass reaches the head, whose output is large
    with watch_layers(model, receive, anatomy=anatomy, layers=layers, norm=norm, complete=complete):
        model(**arguments)


def sharded_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose weights FSDP2 (``fully_shard``) shards, outer ones first."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # imported by whoever shards; importing it takes a second
    return [module for module in model.modules() if isinstance(module, getattr(fsdp, "FSDPModule", ()))]


def capture_states(
    model: nn.Module, inputs: Mapping[str, Any], *, anatomy: Anatomy, layers: Sequence[int], norm: Norm = "none"
) -> list[Tensor]:
    """Return the states of layers in ascending order; see :func:`capture`."""
    states: list[Tensor] = []
    capture(model, inputs, lambda _, found: states.append(found), anatomy=anatomy, layers=layers, norm=norm)
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
def watch_layers(
    model: nn.Module,
    receive: Receive,
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm = "none",
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
    entered = 0  # blocks entered in this pass; a shared block is entered several times

    def hand_on(layer: int, states: Tensor) -> None:
        if layer in layers:
            receive(layer, normed(anatomy.tokens(states)))
        if layer == layers[-1] and not complete:
            raise _LastLayerReadError

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        nonlocal entered
        if is_current():
            entered += 1
            # In another thread torch may call the hook without `kwargs` while it is being registered.
            hand_on(entered - 1, input_states(args, kwargs or {}))

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if is_current() and entered == anatomy.num_layers:
            states = first_tensor(output)
            assert states is not None
            hand_on(entered, states)

    with turn(model) as is_current, ExitStack() as hooks:
        for block in anatomy.distinct_blocks(model):
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        with suppress(_LastLayerReadError):
            yield


@contextmanager
def bypass_blocks(model: nn.Module, anatomy: Anatomy, layer: int) -> Iterator[None]:
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
        bypassed = with_states(output, first_tensor(output), states)
        if first_tensor(bypassed) is not states:
            raise CutError(f"The blocks of {type(model).__name__} return {type(output)}, whose states are unknown.")
        return bypassed

    with turn(model) as is_current, ExitStack() as hooks:
        for block in anatomy.distinct_blocks(model):
            hooks.callback(block.register_forward_hook(after, with_kwargs=True).remove)
        yield


def with_states(output: Any, states: Tensor | None, replacement: Tensor) -> Any:
    """Return the output of a block with other states."""
    if output is states:
        return replacement
    if isinstance(output, tuple | list):
        return type(output)(with_states(value, states, replacement) for value in output)
    return output


def final_norm(model: nn.Module, anatomy: Anatomy, norm: Norm) -> nn.Sequential:
    """Return a module that normalizes the states ``(B, T, D)`` of a layer.

    With ``norm="final"`` it applies the modules after the model's last block (usually one norm, sometimes also a
    projection); with ``norm="none"`` it returns the states unchanged.
    """
    return nn.Sequential(*(model.get_submodule(path) for path in (anatomy.final if norm == "final" else ())))


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
