"""A cut encoder tuned on pairs, scored and measured at every layer before and after."""

from __future__ import annotations

from midlayer_encoders.tuning.result import TuneResult
from midlayer_encoders.tuning.run import tune

__all__ = ["TuneResult", "tune"]
