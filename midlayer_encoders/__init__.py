"""Embeddings from the layer that embeds best."""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.3.0.dev0"

if TYPE_CHECKING:  # the names of _HOMES; those imported as themselves are public
    from midlayer_encoders._types import EncoderSpec as EncoderSpec
    from midlayer_encoders.comparing.compare import compare as compare
    from midlayer_encoders.comparing.progression import progression as progression
    from midlayer_encoders.encoder.options import EncoderOptions as EncoderOptions
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder as LayerEncoder
    from midlayer_encoders.encoder.whole_model import measure as measure
    from midlayer_encoders.encoder.whole_model import select_layer as select_layer
    from midlayer_encoders.errors import MidlayerError as MidlayerError
    from midlayer_encoders.extras.boards import Board as Board
    from midlayer_encoders.extras.boards import board as board
    from midlayer_encoders.extras.probing.probe import probe as probe
    from midlayer_encoders.extras.training import DistillResult as DistillResult
    from midlayer_encoders.extras.training import TuneResult as TuneResult
    from midlayer_encoders.extras.training.tune import distill as distill
    from midlayer_encoders.extras.training.tune import tune as tune
    from midlayer_encoders.extras.vectors import embed as embed
    from midlayer_encoders.recipes import Recipe as Recipe
    from midlayer_encoders.selection import Selection as Selection
    from midlayer_encoders.sweeping import SweepResult as SweepResult
    from midlayer_encoders.sweeping import sweep as sweep
    from midlayer_encoders.sweeping import sweep_many as sweep_many
    from midlayer_encoders.tasks.text_lists import read_texts as read_texts
else:
    # torch, transformers and sentence-transformers take seconds to import: each name is fetched when it is asked for.
    _HOMES = {
        "_types": ["EncoderSpec"],
        "extras.boards": ["Board", "board"],
        "comparing": ["compare", "progression"],
        "encoder.options": ["EncoderOptions"],
        "encoder.sentence_transformers_encoder": ["LayerEncoder"],
        "encoder.whole_model": ["measure", "select_layer"],
        "errors": ["MidlayerError"],
        "tasks.text_lists": ["read_texts"],
        "extras.probing": ["probe"],
        "recipes": ["Recipe"],
        "selection": ["Selection"],
        "sweeping": ["SweepResult", "sweep", "sweep_many"],
        "extras.training": ["DistillResult", "TuneResult", "distill", "tune"],
        "extras.vectors": ["embed"],
    }
    __all__ = sorted(name for names in _HOMES.values() for name in names)

    def __getattr__(name: str) -> object:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{home}"), name)

    def __dir__() -> list[str]:
        return [*__all__, "__version__"]
