"""Apply the final norm to the states of any layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.models.anatomy import Anatomy


def final_norm(model: nn.Module, anatomy: Anatomy, norm: Norm) -> Callable[[Tensor], Tensor]:
    """Return a function that normalizes the states ``(B, T, D)`` of a layer.

    With ``norm="final"`` it applies the modules after the model's last block (usually one norm, sometimes also a
    projection); with ``norm="none"`` it returns the states unchanged.
    """
    modules = [model.get_submodule(path) for path in anatomy.final] if norm == "final" else []

    def apply(states: Tensor) -> Tensor:
        for module in modules:
            states = module(states)
        return states

    return apply
