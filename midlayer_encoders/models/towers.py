"""The text and image towers of a joint model such as CLIP, whose heads project into one space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.validation import check_choice


class Tower(NamedTuple):
    """A tower in transformers: the model's attribute, the config's attribute, and the projecting method."""

    model: str
    config: str
    method: str


TOWERS: dict[str, Tower] = {
    "text": Tower("text_model", "text_config", "get_text_features"),
    "image": Tower("vision_model", "vision_config", "get_image_features"),
}
"""The towers of a joint model by medium."""


def find_towers(model: nn.Module) -> dict[str, str]:
    """Return the path of each tower of a joint model; empty for other models.

    A joint model has both towers and a method that projects the states of each. A language model that also reads images
    has one stack of blocks and is not joint.
    """
    towers = {
        name: tower.model
        for name, tower in TOWERS.items()
        if isinstance(getattr(model, tower.model, None), nn.Module) and hasattr(model, tower.method)
    }
    return towers if len(towers) == len(TOWERS) else {}


def check_tower(tower: str, towers: Mapping[str, str], model: str) -> None:
    """Raise unless a model has this tower."""
    check_choice("tower", tower, TOWERS)
    if tower not in towers:
        raise OptionError(f"`tower` must be None for {model}, which is not a joint model, but got {tower!r}.")


def tower_layers(
    layer: Layer | Sequence[Layer] | Mapping[str, Layer], towers: Mapping[str, str], model: str
) -> dict[str, Layer]:
    """Return the requested layer of each tower; one number is for both.

    Example:
        >>> towers = {"text": "text_model", "image": "vision_model"}
        >>> tower_layers(-1, towers, "a model"), tower_layers({"image": 9, "text": 6}, towers, "a model")
        ({'text': -1, 'image': -1}, {'text': 6, 'image': 9})
    """
    if isinstance(layer, Sequence):
        raise OptionError(
            f"`layer` must be one layer, or one for each tower, for {model}, a joint model, but got {list(layer)}. "
            "Pass `tower` to combine layers of one tower."
        )
    if not isinstance(layer, Mapping):
        return dict.fromkeys(towers, layer)
    for name in layer:
        check_choice("layer", name, towers)
    if missing := [name for name in towers if name not in layer]:
        raise LayerIndexError(
            f"`layer` must name a layer for each tower of {model} ({', '.join(towers)}), but {dict(layer)} has none "
            f"for {missing[0]!r}. Add it, or pass `tower` and one number for one tower."
        )
    return {name: layer[name] for name in towers}
