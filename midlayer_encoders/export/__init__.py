"""An encoder written for the engine that is to run it: one file for each target, each compared after it is written."""

from __future__ import annotations

from midlayer_encoders.export.hub import PUSHED, HubError, check_repository, push_to_hub
from midlayer_encoders.export.run import TARGETS, Exported, Target, check_out, export_for
from midlayer_encoders.export.serving import serving_line

__all__ = [
    "PUSHED",
    "TARGETS",
    "Exported",
    "HubError",
    "Target",
    "check_out",
    "check_repository",
    "export_for",
    "push_to_hub",
    "serving_line",
]
