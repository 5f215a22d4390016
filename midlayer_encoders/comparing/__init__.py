"""Compare models and checkpoints layer by layer, and correlate metrics with scores."""

from midlayer_encoders.arguments import IntervalSettings
from midlayer_encoders.comparing.compare import CompareResult, compare
from midlayer_encoders.comparing.correlation import CORRELATION_SCHEMA, STATISTICS, correlate, distance_correlation
from midlayer_encoders.comparing.progression import ProgressionResult, progression

__all__ = [
    "CORRELATION_SCHEMA",
    "STATISTICS",
    "CompareResult",
    "IntervalSettings",
    "ProgressionResult",
    "compare",
    "correlate",
    "distance_correlation",
    "progression",
]
