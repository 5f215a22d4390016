"""Embeddings from the layer that embeds best."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midlayer_encoders._types import EncoderSpec
    from midlayer_encoders.boards import Board, board
    from midlayer_encoders.comparing.compare import compare
    from midlayer_encoders.comparing.progression import progression
    from midlayer_encoders.encoder.options import EncoderOptions
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder, measure, select_layer
    from midlayer_encoders.errors import MidlayerError
    from midlayer_encoders.media.text_lists import read_texts
    from midlayer_encoders.probing.probe import probe
    from midlayer_encoders.recipes import Recipe
    from midlayer_encoders.selection import Selection
    from midlayer_encoders.sweeping import SweepResult, sweep, sweep_many
    from midlayer_encoders.tasks import paper_tasks
    from midlayer_encoders.tuning.distill import distill
    from midlayer_encoders.tuning.runs import DistillResult, TuneResult
    from midlayer_encoders.tuning.tune import tune
    from midlayer_encoders.vectors import embed

__all__ = [
    "Board",
    "DistillResult",
    "EncoderOptions",
    "EncoderSpec",
    "LayerEncoder",
    "MidlayerError",
    "Recipe",
    "Selection",
    "SweepResult",
    "TuneResult",
    "board",
    "compare",
    "distill",
    "embed",
    "measure",
    "paper_tasks",
    "probe",
    "progression",
    "read_texts",
    "select_layer",
    "sweep",
    "sweep_many",
    "tune",
]

__version__ = "0.2.0"

if not TYPE_CHECKING:
    # torch, transformers and sentence-transformers take seconds to import: each name is fetched when it is asked for.
    _HOMES = {
        "Board": "boards",
        "DistillResult": "tuning",
        "EncoderOptions": "encoder.options",
        "EncoderSpec": "_types",
        "LayerEncoder": "encoder.sentence_transformers_encoder",
        "MidlayerError": "errors",
        "Recipe": "recipes",
        "Selection": "selection",
        "SweepResult": "sweeping",
        "TuneResult": "tuning",
        "board": "boards",
        "compare": "comparing",
        "distill": "tuning",
        "embed": "vectors",
        "measure": "encoder.sentence_transformers_encoder",
        "paper_tasks": "tasks",
        "probe": "probing",
        "progression": "comparing",
        "read_texts": "media.text_lists",
        "select_layer": "encoder.sentence_transformers_encoder",
        "sweep": "sweeping",
        "sweep_many": "sweeping",
        "tune": "tuning",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
