"""A forward pass of a model in training that leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from midlayer_encoders._random import isolated_random

__all__ = ["undisturbed"]


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run ``model`` in eval mode, without gradients and without compiling, and leave it as it was.

    What a forward pass may change is restored: the mode of each module (some may be frozen in eval mode), buffers that
    a module updates or replaces while it runs (rotary tables that grow), and the global random generators.
    ``no_grad`` rather than ``inference_mode``: a tensor that a module keeps from here may be used in training.
    """
    modes = [(module, module.training) for module in model.modules()]
    kept = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    with isolated_random(), torch.no_grad(), _eager():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for module, name, buffer, value in kept:
                module._buffers[name] = buffer.copy_(value)


@contextmanager
def _eager() -> Iterator[None]:
    """Run compiled modules as they were written: a measurement must not compile them again for other shapes."""
    if torch.compiler.is_compiling() or not hasattr(torch.compiler, "set_stance"):  # torch before 2.6
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
