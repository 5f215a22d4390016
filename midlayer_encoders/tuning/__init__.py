"""Tune a cut encoder on pairs, and score every layer before and after."""

from __future__ import annotations

from midlayer_encoders.tuning.training import TuneSettings
from midlayer_encoders.tuning.tune import TuneResult, tune

__all__ = ["TuneResult", "TuneSettings", "tune"]
