"""Train a cut encoder on pairs, texts or the vectors of a teacher, and score every layer before and after."""

from midlayer_encoders.extras.settings import DistillSettings, TrainingSettings, TuneSettings
from midlayer_encoders.extras.training.runs import DistillResult, TuneResult
from midlayer_encoders.extras.training.tune import distill, tune

__all__ = ["DistillResult", "DistillSettings", "TrainingSettings", "TuneResult", "TuneSettings", "distill", "tune"]
