"""Run a model once and pass the states of each layer to a callback.

No token states are stored: the callback receives a layer when the next block does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.sites import Site, block_sites
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.validation import check_choice

STREAM = "residual_out"
"""The site of the residual stream after a block."""

Receive: TypeAlias = Callable[[int, str, Tensor], None]
"""Called with the layer, the site and the states ``(B, T, D)``, in ascending order of layers."""


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

    The call holds the model's lock. Passes of other threads, and passes started by ``receive``, are ignored.

    Args:
        model: the uncut model, or one cut after the last layer to read.
        inputs: keyword arguments of its forward.
        receive: called with the states of each layer.
        anatomy: structure of ``model``.
        layers: layers to read, ``0`` to ``num_layers``.
        norm: ``"final"`` applies the final norm to the residual stream.
        sites: points of each block to read; see :func:`~midlayer_encoders.models.sites.block_sites`.
    """
    with turn(model) as is_current, _hooked(model, receive, anatomy, sorted(set(layers)), norm, sites, is_current):
        try:
            model(**inputs)
        except _LastLayerReadError:
            return


@contextmanager
def layers_watched(
    model: nn.Module,
    receive: Callable[[int, Tensor], None],
    *,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm = "none",
) -> Iterator[None]:
    """Pass the states of layers to ``receive`` in all complete passes of ``model`` inside a ``with`` block.

    Args:
        model: the model.
        receive: called with a layer and its states.
        anatomy: structure of ``model``.
        layers: layers to read.
        norm: ``"final"`` applies the final norm.
    """

    def receive_stream(layer: int, _: str, states: Tensor) -> None:
        receive(layer, states)

    ascending = sorted(set(layers))
    with (
        turn(model) as is_current,
        _hooked(model, receive_stream, anatomy, ascending, norm, (STREAM,), is_current, complete=True),
    ):
        yield


@contextmanager
def _hooked(
    model: nn.Module,
    receive: Receive,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm,
    sites: Sequence[str],
    is_current: Callable[[], bool],
    *,
    complete: bool = False,
) -> Iterator[None]:
    """Hook the blocks for passes in which ``is_current`` returns True.

    The pass ends after the last layer unless it is ``complete``.
    """
    if not layers or layers[0] < 0 or layers[-1] > anatomy.num_layers:
        raise OptionError(f"`layers` must be within [0, {anatomy.num_layers}] and not empty, but got {list(layers)}.")
    normed = final_norm(model, anatomy, norm)
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    shape: tuple[int, ...] = ()  # (B, T) of the residual stream
    entered = 0  # blocks entered in this pass; a shared block is entered several times

    def hand_on(layer: int, site: str, states: Tensor) -> None:
        if layer in layers and site in sites:
            states = anatomy.tokens(states)
            states = states if site == STREAM else _token_rows(states, shape, site)
            receive(layer, site, normed(states) if site == STREAM else states)
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

    with ExitStack() as hooks:
        for block in blocks.values():
            if anatomy.past_hooks:
                hooks.enter_context(seen_by_hooks(block))
            hooks.callback(_watch_input(block, enter, is_current))
            hooks.callback(_watch_output(block, leave, is_current))
            for name, site in _inner_sites(block, model, sites).items():
                watch = _watch_input if site.side == "input" else _watch_output
                hooks.callback(watch(block.get_submodule(site.module), inside(name), is_current))
        yield


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


def _inner_sites(block: nn.Module, model: nn.Module, sites: Sequence[str]) -> dict[str, Site]:
    inner = [name for name in sites if name != STREAM]
    if not inner:
        return {}
    available = block_sites(block, getattr(model, "config", None))
    for name in inner:
        check_choice("sites", name, available)
    return {name: available[name] for name in inner}


def _watch_input(
    module: nn.Module, receive: Callable[[Tensor], None], is_current: Callable[[], bool]
) -> Callable[[], None]:
    """Pass the input states of a module to ``receive``, and return a function that removes the hook."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        # In another thread torch may call the hook without `kwargs` while it is being registered.
        if is_current():
            receive(args[0] if args or kwargs is None else kwargs["hidden_states"])

    return module.register_forward_pre_hook(before, with_kwargs=True).remove


def _watch_output(
    module: nn.Module, receive: Callable[[Tensor], None], is_current: Callable[[], bool]
) -> Callable[[], None]:
    """Pass the output states of a module to ``receive``, and return a function that removes the hook."""

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if is_current():
            states = first_tensor(output)
            assert states is not None
            receive(states)

    return module.register_forward_hook(after).remove


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor in the input or output of a block."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((tensor for tensor in map(first_tensor, inner) if tensor is not None), None)


def side_by_side(states: Sequence[Tensor]) -> Tensor:
    """Concatenate the states of layers, ``(B, T, D)`` each, to ``(B, T, L D)``.

    Example:
        >>> side_by_side([torch.zeros(1, 2, 3), torch.ones(1, 2, 3)]).shape
        torch.Size([1, 2, 6])
    """
    if len({layer_states.shape for layer_states in states}) > 1:
        shapes = ", ".join(str(tuple(layer_states.shape)) for layer_states in states)
        raise CutError(f"`layer` must list layers of one width, but their states have the shapes {shapes}.")
    return torch.cat([layer_states.to(states[-1].device) for layer_states in states], dim=-1)


@contextmanager
def seen_by_hooks(block: nn.Module) -> Iterator[None]:
    """Make hooks work in a model that calls the ``forward`` of its blocks directly."""
    original = block.forward
    instance_forward = vars(block).get("forward")  # set by accelerate
    if hasattr(original, "_past_hooks"):  # a nested pass
        yield
        return

    def forward(*args: Any, _past_hooks: bool = True, **kwargs: Any) -> Any:
        return block(*args, _past_hooks=False, **kwargs) if _past_hooks else original(*args, **kwargs)

    forward._past_hooks = True  # type: ignore[attr-defined]
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if instance_forward is not None:
            block.forward = instance_forward
