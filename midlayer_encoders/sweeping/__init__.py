"""Every layer of a model on MTEB from one forward pass over each text, and metrics beside the scores."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midlayer_encoders.sweeping.board import Board
    from midlayer_encoders.sweeping.previews import Preview, TaskPreview, preview
    from midlayer_encoders.sweeping.result import RecipesResult, SweepResult
    from midlayer_encoders.sweeping.run import sweep
    from midlayer_encoders.sweeping.vectors import embed

__all__ = ["Board", "Preview", "RecipesResult", "SweepResult", "TaskPreview", "embed", "preview", "sweep"]

if not TYPE_CHECKING:
    # Results are read in a moment; what makes them imports torch and transformers, which takes seconds.
    _HOMES = {
        "Board": "board", "Preview": "previews", "RecipesResult": "result", "SweepResult": "result",
        "TaskPreview": "previews", "embed": "vectors", "preview": "previews", "sweep": "run",
    }  # fmt: skip

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
