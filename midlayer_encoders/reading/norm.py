"""The final norm, applied to the states of any layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from midlayer_encoders._types import Norm
from midlayer_encoders.models.anatomy import Anatomy


def final_norm(model: nn.Module, anatomy: Anatomy, norm: Norm) -> Callable[[Tensor], Tensor]:
    """Return what the states ``(B, T, D)`` of a layer pass through before they are used.

    With ``norm="final"`` these are the modules that the model itself applies after its last block, in order (usually
    one norm, sometimes a projection too); with ``norm="none"`` the states are returned as they are.
    """
    modules = [model.get_submodule(path) for path in anatomy.final] if norm == "final" else []

    def apply(states: Tensor) -> Tensor:
        for module in modules:
            states = module(states)
        return states

    return apply
