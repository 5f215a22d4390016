"""Callbacks for Lightning and Hugging Face trainers that log every metric of every layer during training."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .lightning import LastLayerDecline, LayerMetricsCallback
    from .trainer import LastLayerDeclineTrainerCallback, LayerMetricsTrainerCallback

__all__ = ["LastLayerDecline", "LastLayerDeclineTrainerCallback", "LayerMetricsCallback", "LayerMetricsTrainerCallback"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import only the trainer library that is used."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = "trainer" if name.endswith("TrainerCallback") else "lightning"
        return getattr(import_module(f"{__name__}.{module}"), name)
