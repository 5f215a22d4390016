"""Passes of a model whose weights FSDP2 shards: all processes gather the weights together, or stop together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn

from midlayer_encoders.reading.capture import sharded_modules

_T = TypeVar("_T")


def unsupported_sharding(root: nn.Module) -> str | None:
    """Return how the weights of ``root`` are split if not by FSDP2, the only way that measurements support."""
    if any(type(module).__name__.endswith("FullyShardedDataParallel") for module in root.modules()):
        return "FSDP1"
    parameters = list(root.parameters())
    if any(hasattr(parameter, "ds_id") for parameter in parameters):  # ZeRO-1 and ZeRO-2 leave weights whole
        return "DeepSpeed ZeRO-3"
    # FSDP2 splits a weight along one dimension of the mesh, and its passes give whole states.
    splits = (sum(not p.is_replicate() for p in getattr(parameter, "placements", ())) for parameter in parameters)
    return "tensor parallelism" if max(splits, default=0) > bool(sharded_modules(root)) else None


def pass_device(model: nn.Module) -> torch.device:
    """Return the device of forward passes; between them FSDP2 may keep the weights on the CPU."""
    parameter = next(model.parameters())
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None or mesh.device_type == parameter.device.type:
        return parameter.device
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


@contextmanager
def passes_together(
    root: nn.Module, model: nn.Module, check: Callable[[], None]
) -> Iterator[Callable[[Callable[[], _T]], _T]]:
    """Yield a function that runs a pass of ``model``; without FSDP2 it only calls its argument.

    A process that failed in a pass would leave the others waiting for its part of the weights, so ``check`` is called
    in every process before each gathering, and must raise in all of them if one has failed. The weights are sharded
    again at the end, as the training step left them.

    Args:
        root: the trained module.
        model: the transformer inside it. Sharded modules around it hold some of its weights.
        check: raises in every process if one has failed.
    """
    sharded = sharded_modules(root)
    around = [module for module in sharded if module is not model and any(model is inner for inner in module.modules())]
    entered: list[nn.Module] = []

    def before(module: nn.Module, _: Any) -> None:
        check()
        entered.append(module)

    def after(module: nn.Module, *_: Any) -> None:
        entered.remove(module)

    try:
        with ExitStack() as hooks:
            for module in sharded:
                hooks.callback(module.register_forward_pre_hook(before, prepend=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield lambda run_pass: _call_inside(around, run_pass)
    finally:
        # An error has left these modules. Only the end of a forward pass, which gathers nothing here, resets FSDP2.
        for module in reversed(entered):
            _call_inside([module], lambda: None)
        for module in sharded:
            module.reshard()  # type: ignore[operator]


def _call_inside(modules: Sequence[nn.Module], function: Callable[[], _T]) -> _T:
    """Return ``function()``, called in place of the forward pass of nested modules, outer ones first."""
    if not modules:
        return function()
    results: list[_T] = []  # FSDP2 may cast what a forward pass returns

    def forward(_: None) -> None:
        results.append(_call_inside(modules[1:], function))

    with mock.patch.object(modules[0], "forward", forward):
        modules[0](None)  # on a GPU, FSDP2 moves arguments there and needs one
    return results[0]
