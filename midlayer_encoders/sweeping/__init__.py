"""Score and measure every layer of a model on MTEB tasks from one forward pass over each text."""

from midlayer_encoders.sweeping.best_layer import BestLayer
from midlayer_encoders.sweeping.request import SweepSettings
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.sweeping.sweeps import Sweep, sweep, sweep_many

__all__ = ["BestLayer", "Sweep", "SweepResult", "SweepSettings", "sweep", "sweep_many"]
