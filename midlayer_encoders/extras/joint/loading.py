"""Load a joint model with each tower cut at its own layer; the heads that pool and project their states stay."""

import copy
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from midlayer_encoders._types import Layer, LayerArgument
from midlayer_encoders.errors import CutError, LayerIndexError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import find_anatomy, media_parts, resolve_layer
from midlayer_encoders.models.cut import Cut, cut_config, plan_cut
from midlayer_encoders.models.load import ModelFiles, check_cut, read_weights
from midlayer_encoders.validation import check_choice

_CONFIGS = {"text": "text_config", "image": "vision_config"}  # of each tower, in the config of the model
_UNREAD = re.compile(r"(^|\.)logit_(scale|bias)$")  # weights that do not affect the vectors, unlike poolers and heads


def load_towers(files: ModelFiles, layer: LayerArgument) -> tuple[nn.Module, dict[str, Cut]]:
    """Return a joint model in eval mode, and the cut of each tower.

    Args:
        files: of the model.
        layer: one layer for both towers, or one for each by name: ``{"text": 6, "image": 9}``.
    """
    complete = files.complete
    towers = media_parts(complete)
    cuts: dict[str, Cut] = {}
    config = copy.deepcopy(complete.config)
    for name, requested in _tower_layers(layer, towers, files.model).items():
        path = towers[name]
        anatomy = find_anatomy(complete.get_submodule(path)).below(path)
        try:
            resolved = resolve_layer(requested, anatomy.num_layers, name=f"the {name} tower of {files.model}")
        except LayerIndexError as reason:
            if isinstance(layer, Mapping):
                raise
            raise LayerIndexError(
                f"{reason} One number is for both towers: pass a fraction for the same relative depth, or a layer "
                f"for each, such as layer={{{', '.join(f'{tower!r}: 1' for tower in towers)}}}."
            ) from None
        cuts[name] = plan_cut(anatomy, resolved, "final")
        tower_config = cut_config(getattr(config, _CONFIGS[name]), anatomy.num_layers, cuts[name].keep)
        setattr(config, _CONFIGS[name], tower_config)
    depths = [(cut.anatomy, cut.keep) for cut in cuts.values()]
    if internals.is_remote(complete) and any(keep < anatomy.num_layers for anatomy, keep in depths):
        raise CutError(
            f"{type(complete).__name__} is a joint model whose code is not from transformers, so its cut cannot "
            f"be verified. Pass `tower` to load one of {', '.join(towers)}, or layer=-1."
        )
    with internals.LOADING:
        check_cut(complete, config, depths, files.options["trust_remote_code"])
        loaded: Any = read_weights(type(complete), files.model, config, files.options, unread=_UNREAD)
    return loaded.eval(), cuts


def _tower_layers(layer: LayerArgument, towers: Mapping[str, str], model: str) -> dict[str, Layer]:
    """Return the requested layer of each tower; one number is for both.

    Example:
        >>> towers = {"text": "text_model", "image": "vision_model"}
        >>> _tower_layers(-1, towers, "a model"), _tower_layers({"image": 9, "text": 6}, towers, "a model")
        ({'text': -1, 'image': -1}, {'text': 6, 'image': 9})
    """
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


def paired_layers(layer: int, depths: Mapping[str, int]) -> dict[str, int]:
    """Return the layer of each tower at the relative depth of a layer of the image tower.

    Args:
        layer: layer of the image tower.
        depths: number of blocks of each tower.

    Example:
        >>> paired_layers(9, {"text": 12, "image": 24}), paired_layers(0, {"text": 12, "image": 24})
        ({'text': 5, 'image': 9}, {'text': 0, 'image': 0})
    """
    share = layer / depths["image"]
    return {tower: resolve_layer(share, depth) if layer else 0 for tower, depth in depths.items()}
