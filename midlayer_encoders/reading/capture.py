"""One forward pass, every wanted layer handed on as it is made.

Nothing here keeps token states: a layer is read where the next block receives it, handed to the caller, and let go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import OptionError, check_choice
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.sites import Site, block_sites
from midlayer_encoders.reading.norm import final_norm

__all__ = ["STREAM", "Receive", "capture"]

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

    Args:
        model: the uncut model, or one cut after the last wanted layer.
        inputs: keyword arguments of its forward.
        receive: called with each layer's states as they are made. What it keeps is up to it.
        anatomy: of ``model``.
        layers: which layers, ``0`` to ``num_layers``.
        norm: ``"final"`` applies the final norm to the residual stream before it is handed on.
        sites: points of each block to hand on; see :func:`~midlayer_encoders.models.sites.block_sites`.
    """
    with _hooked(model, receive, anatomy, sorted(set(layers)), norm, sites):
        try:
            model(**inputs)
        except _EnoughError:
            return


@contextmanager
def _hooked(
    model: nn.Module, receive: Receive, anatomy: Anatomy, layers: Sequence[int], norm: Norm, sites: Sequence[str]
) -> Iterator[None]:
    """Put hooks on the blocks for one pass, and take them off whatever happens."""
    if not layers or layers[0] < 0 or layers[-1] > anatomy.num_layers:
        raise OptionError(f"`layers` must be within [0, {anatomy.num_layers}] and not empty, but got {list(layers)}.")
    normed = final_norm(model, anatomy, norm)
    blocks = {id(block): block for block in (anatomy.block(model, k) for k in range(1, anatomy.num_layers + 1))}
    passes = 0  # blocks entered so far in this pass: shared blocks are entered several times

    def hand_on(layer: int, site: str, states: Tensor) -> None:
        if layer in layers and site in sites:
            receive(layer, site, normed(states) if site == STREAM else states)
        if layer == layers[-1] and site == STREAM:
            raise _EnoughError

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal passes
        passes += 1
        hand_on(passes - 1, STREAM, args[0] if args else kwargs["hidden_states"])

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        if passes == anatomy.num_layers:
            hand_on(passes, STREAM, output[0] if isinstance(output, tuple) else output)

    def inside(name: str) -> Callable[[Tensor], None]:
        return lambda states: hand_on(passes, name, states)

    with ExitStack() as hooks:
        for block in blocks.values():
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(leave).remove)
            for name, site in _inner_sites(block, model, sites).items():
                hooks.callback(_watch(block, site, inside(name)))
        yield


def _inner_sites(block: nn.Module, model: nn.Module, sites: Sequence[str]) -> dict[str, Site]:
    wanted = [name for name in sites if name != STREAM]
    if not wanted:
        return {}
    found = block_sites(block, getattr(model, "config", None))
    for name in wanted:
        check_choice("sites", name, found)
    return {name: found[name] for name in wanted}


def _watch(block: nn.Module, site: Site, receive: Callable[[Tensor], None]) -> Callable[[], None]:
    """Hook one site of a block; return what takes the hook off."""
    module = block.get_submodule(site.module)
    if site.side == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            receive(args[0] if args else kwargs["hidden_states"])

        return module.register_forward_pre_hook(before, with_kwargs=True).remove

    def after(_: nn.Module, __: Any, output: Any) -> None:
        receive(output[0] if isinstance(output, tuple) else output)

    return module.register_forward_hook(after).remove
