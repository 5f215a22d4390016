"""A cut encoder tuned on pairs, scored and measured at every layer before and after."""

from __future__ import annotations

from midlayer_encoders.tuning.tune import tune
from midlayer_encoders.tuning.tune_result import TuneResult

__all__ = ["TuneResult", "tune"]
