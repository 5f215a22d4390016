"""Export an encoder for other engines, and compare its vectors after writing."""

from __future__ import annotations

from midlayer_encoders.export._comparison import Exported
from midlayer_encoders.export.serving import serving_line
from midlayer_encoders.export.targets import TARGETS, Target, check_arguments, export_for
from midlayer_encoders.export.upload import PUSHED, HubError, check_repository, push_to_hub

__all__ = [
    "PUSHED",
    "TARGETS",
    "Exported",
    "HubError",
    "Target",
    "check_arguments",
    "check_repository",
    "export_for",
    "push_to_hub",
    "serving_line",
]
