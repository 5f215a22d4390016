"""Score and measure every layer of a model on MTEB tasks from one forward pass over each text."""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midlayer_encoders.sweeping.best_layer import BestLayer
    from midlayer_encoders.sweeping.request import SweepSettings
    from midlayer_encoders.sweeping.sweep_result import SweepResult
    from midlayer_encoders.sweeping.sweeps import sweep, sweep_many

__all__ = ["BestLayer", "SweepResult", "SweepSettings", "sweep", "sweep_many"]

if not TYPE_CHECKING:
    # Loading a result is fast; running a sweep imports torch and transformers, which takes seconds.
    _MODULES = {
        "BestLayer": "sweeping.best_layer",
        "SweepResult": "sweeping.sweep_result",
        "SweepSettings": "sweeping.request",
        "sweep": "sweeping.sweeps",
        "sweep_many": "sweeping.sweeps",
    }

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"midlayer_encoders.{_MODULES[name]}"), name)
