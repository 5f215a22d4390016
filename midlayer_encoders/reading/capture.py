"""One forward pass, every wanted layer handed on as it is made.

Nothing here keeps token states: a layer is read where the next block receives it, handed to the caller, and let go.
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
from midlayer_encoders.reading.norm import final_norm
from midlayer_encoders.reading.turns import turn
from midlayer_encoders.validation import check_choice

STREAM = "residual_out"
"""The site of a layer itself: the residual stream after its block."""

Receive: TypeAlias = Callable[[int, str, Tensor], None]
"""Called with the layer, the site and the states ``(B, T, D)``, from the first layer to the last."""


class _EnoughError(Exception):
    """Raised inside the pass when the last wanted layer was handed on."""


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
    """Run ``model`` once and hand on the states of every wanted layer; the blocks after the last one do not run.

    Threads that share the model wait for one another. A pass that is not this call's own, in another thread or made by
    ``receive``, is not looked at.

    Args:
        model: the uncut model, or one cut after the last wanted layer.
        inputs: keyword arguments of its forward.
        receive: called with each layer's states as they are made. What it keeps is up to it.
        anatomy: of ``model``.
        layers: which layers, ``0`` to ``num_layers``.
        norm: ``"final"`` applies the final norm to the residual stream before it is handed on.
        sites: points of each block to hand on; see :func:`~midlayer_encoders.models.sites.block_sites`.
    """
    with turn(model) as own, _hooked(model, receive, anatomy, sorted(set(layers)), norm, sites, own):
        try:
            model(**inputs)
        except _EnoughError:
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
    """Hand on the states of layers in the passes of ``model`` that are made, to their end, until the block is left.

    Args:
        model: the model.
        receive: called with a layer and its states.
        anatomy: of ``model``.
        layers: which layers.
        norm: ``"final"`` applies the final norm to them.
    """

    def hand_on(layer: int, _: str, states: Tensor) -> None:
        receive(layer, states)

    wanted = sorted(set(layers))
    with turn(model) as own, _hooked(model, hand_on, anatomy, wanted, norm, (STREAM,), own, whole=True):
        yield


@contextmanager
def _hooked(
    model: nn.Module,
    receive: Receive,
    anatomy: Anatomy,
    layers: Sequence[int],
    norm: Norm,
    sites: Sequence[str],
    own: Callable[[], bool],
    *,
    whole: bool = False,
) -> Iterator[None]:
    """Put hooks on the blocks for the pass in which ``own`` is true, and take them off whatever happens.

    The pass ends after the last wanted layer, unless it is to be ``whole``.
    """
    if not layers or layers[0] < 0 or layers[-1] > anatomy.num_layers:
        raise OptionError(f"`layers` must be within [0, {anatomy.num_layers}] and not empty, but got {list(layers)}.")
    normed = final_norm(model, anatomy, norm)
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    shape: tuple[int, ...] = ()  # batch and tokens of the stream
    passes = 0  # blocks entered so far in this pass: shared blocks are entered several times

    def hand_on(layer: int, site: str, states: Tensor) -> None:
        if layer in layers and site in sites:
            states = anatomy.tokens(states)
            states = states if site == STREAM else _token_rows(states, shape, site)
            receive(layer, site, normed(states) if site == STREAM else states)
        if layer == layers[-1] and site == STREAM and not whole:
            raise _EnoughError

    def enter(states: Tensor) -> None:
        nonlocal passes, shape
        passes += 1
        shape = tuple(anatomy.tokens(states).shape[:2])
        hand_on(passes - 1, STREAM, states)

    def leave(states: Tensor) -> None:
        if passes == anatomy.num_layers:
            hand_on(passes, STREAM, states)

    def inside(name: str) -> Callable[[Tensor], None]:
        return lambda states: hand_on(passes, name, states)

    with ExitStack() as hooks:
        for block in blocks.values():
            if anatomy.past_hooks:
                hooks.enter_context(seen_by_hooks(block))
            hooks.callback(_watch_input(block, enter, own))
            hooks.callback(_watch_output(block, leave, own))
            for name, site in _inner_sites(block, model, sites).items():
                watch = _watch_input if site.side == "input" else _watch_output
                hooks.callback(watch(block.get_submodule(site.module), inside(name), own))
        yield


def _token_rows(states: Tensor, shape: tuple[int, ...], site: str) -> Tensor:
    """Return the states inside a block as ``(B, T, D)``: some flatten batch and tokens; others are refused."""
    if states.ndim == 2 and len(states) == shape[0] * shape[1]:
        states = states.reshape(*shape, -1)
    if tuple(states.shape[:2]) != shape:
        raise OptionError(
            f"`site` {site!r} cannot be read from this model: its states there are {tuple(states.shape)}, where the "
            f"stream has {shape[0]} inputs of {shape[1]} tokens. Read site='block'."
        )
    return states


def _inner_sites(block: nn.Module, model: nn.Module, sites: Sequence[str]) -> dict[str, Site]:
    wanted = [name for name in sites if name != STREAM]
    if not wanted:
        return {}
    found = block_sites(block, getattr(model, "config", None))
    for name in wanted:
        check_choice("sites", name, found)
    return {name: found[name] for name in wanted}


def _watch_input(module: nn.Module, receive: Callable[[Tensor], None], own: Callable[[], bool]) -> Callable[[], None]:
    """Hand on what enters a module in a pass of our own; return what takes the hook off."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        # Without `kwargs` where another thread meets the hook before torch has noted that it takes them.
        if own():
            receive(args[0] if args or kwargs is None else kwargs["hidden_states"])

    return module.register_forward_pre_hook(before, with_kwargs=True).remove


def _watch_output(module: nn.Module, receive: Callable[[Tensor], None], own: Callable[[], bool]) -> Callable[[], None]:
    """Hand on what leaves a module in a pass of our own; return what takes the hook off."""

    def after(_: nn.Module, __: Any, output: Any) -> None:
        if own():
            states = first_tensor(output)
            assert states is not None
            receive(states)

    return module.register_forward_hook(after).remove


def first_tensor(value: Any) -> Tensor | None:
    """Return the states in what a block is given or returns: the first tensor of floats."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return next((found for found in map(first_tensor, inner) if found is not None), None)


def side_by_side(states: Sequence[Tensor]) -> Tensor:
    """Return the states of layers, ``(B, T, D)`` each, as ``(B, T, L D)``.

    Example:
        >>> side_by_side([torch.zeros(1, 2, 3), torch.ones(1, 2, 3)]).shape
        torch.Size([1, 2, 6])
    """
    made = [one.to(states[-1].device) for one in states]
    if len({one.shape for one in made}) > 1:
        raise CutError(
            "The layers that `layer` names must be of one width to be combined, but their states are "
            f"{', '.join(str(tuple(one.shape)) for one in made)}: a model of several stages. Name layers of one stage."
        )
    return torch.cat(made, dim=-1)


@contextmanager
def seen_by_hooks(block: nn.Module) -> Iterator[None]:
    """Have a model that calls a block's ``forward``, which no hook sees, call the block itself."""
    made, own = block.forward, vars(block).get("forward")  # accelerate gives blocks a forward of their own
    if hasattr(made, "_past_hooks"):  # in a pass inside of another
        yield
        return

    def forward(*args: Any, _past_hooks: bool = True, **kwargs: Any) -> Any:
        return block(*args, _past_hooks=False, **kwargs) if _past_hooks else made(*args, **kwargs)

    forward._past_hooks = True  # type: ignore[attr-defined]
    block.forward = forward
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own
