"""Every layer of a model on MTEB from one forward pass over each text, and metrics beside the scores."""

from __future__ import annotations

from midlayer_encoders.sweeping.previews import Preview, TaskPreview, preview
from midlayer_encoders.sweeping.result import RecipesResult, SweepResult
from midlayer_encoders.sweeping.run import sweep
from midlayer_encoders.sweeping.vectors import embed

__all__ = ["Preview", "RecipesResult", "SweepResult", "TaskPreview", "embed", "preview", "sweep"]
