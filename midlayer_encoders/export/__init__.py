"""An encoder written for the engine that is to run it: one file for each target, each compared after it is written."""

from __future__ import annotations

from midlayer_encoders.export.run import TARGETS, Exported, Target, check_out, export_for

__all__ = ["TARGETS", "Exported", "Target", "check_out", "export_for"]
