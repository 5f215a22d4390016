"""Callbacks for Lightning and Hugging Face trainers: every metric of every layer while a model learns."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from midlayer_encoders.callbacks.lightning import LastLayerDecline, LayerMetricsCallback
    from midlayer_encoders.callbacks.trainer import LastLayerDeclineTrainerCallback, LayerMetricsTrainerCallback

__all__ = [
    "LastLayerDecline",
    "LastLayerDeclineTrainerCallback",
    "LayerMetricsCallback",
    "LayerMetricsTrainerCallback",
]

_HOMES = {
    "LastLayerDecline": "lightning",
    "LastLayerDeclineTrainerCallback": "trainer",
    "LayerMetricsCallback": "lightning",
    "LayerMetricsTrainerCallback": "trainer",
}

if not TYPE_CHECKING:  # only the trainer that is used is imported

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
