"""Load a model and complete its cut, as an encoder does once it has observed the model's blocks."""

from dataclasses import replace
from typing import Any

from midlayer_encoders._types import Norm
from midlayer_encoders.models.anatomy import find_anatomy
from midlayer_encoders.models.cut import Cut, cut_model
from midlayer_encoders.models.hub import Location
from midlayer_encoders.models.load import open_model


def load_and_cut(model: str, layer: Any, *, norm: Norm = "final", **options: Any) -> tuple[Any, Cut]:
    """Return the cut model and its cut."""
    loaded, cut = open_model(Location(model), **options).load_cut(layer, norm)
    anatomy = find_anatomy(loaded, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
    cut_model(loaded, replace(cut, anatomy=anatomy))
    return loaded, cut
