"""Resolve the ``layer`` of an encoder: a choice of a sweep or a selection, or a rule that selects one."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from midlayer_encoders._types import EncoderChoice, LayerArgument
from midlayer_encoders.encoder.build import encoder_name
from midlayer_encoders.encoder.options import EncoderOptions, make_options, option_fields, option_names
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.recipes import PLAIN, Recipe
from midlayer_encoders.validation import check_choice, check_matches_encoder, check_text, layer_number

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection

#: The rule that follows the model's kind, or the labels.
AUTO = "auto"

logger = logging.getLogger(__name__)


def model_name(model: Any, model_name_or_path: str | None) -> str:
    """Return the folder or hub name of a model, which has two keywords."""
    if model is not None and model_name_or_path is not None:
        raise OptionError("`model_name_or_path` cannot be combined with `model`, which means the same.")
    model = model_name_or_path if model is None else model
    if isinstance(model, nn.Module):
        raise OptionError("`model` must be a name. For a module: LayerEncoder.from_module(module, layer, processor=…).")
    return check_text("model", os.fspath(model) if isinstance(model, os.PathLike) else model)


def resolve(
    encoder_class: Any,
    model: str,
    layer: LayerArgument | EncoderChoice | str | None,
    options: Mapping[str, Any],
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
) -> tuple[LayerArgument, EncoderOptions, Selection | None]:
    """Return the layer and options of an encoder, and the selection that they come from, from its arguments."""
    selection: Selection | None = None
    if isinstance(layer, EncoderChoice):
        from midlayer_encoders.selection import Selection

        selection = layer if isinstance(layer, Selection) else None  # else the best layer of a sweep
        layer, options = _apply_choice(layer, model, options)
    recipe = options.get("recipe")
    select_recipe = isinstance(recipe, str) and recipe == AUTO
    encoder_options = make_options({**options, "recipe": None} if select_recipe else options)
    if (layer := recipe.layer if layer is None and isinstance(recipe, Recipe) else layer) is None:
        raise OptionError(
            "`layer` must be a number, or 'auto', unless a Recipe names one, but got None. -1 is the last layer; "
            "'auto' selects one, from `texts` if you pass some."
        )
    number = layer_number(layer) if isinstance(layer, str) else None
    requested: Any = layer if number is None else number
    if select_recipe and requested != AUTO:
        raise OptionError(f"`layer` must be 'auto' with recipe='auto', which selects both, but got {requested!r}.")
    if isinstance(requested, str):
        recipes = PLAIN if recipe == PLAIN else None
        selection, encoder_options = _select_by(
            encoder_class, requested, model, encoder_options, texts, labels, recipes
        )
        requested = selection.layer
    elif texts is not None or labels is not None:
        raise OptionError(f"`texts` and `labels` must be None unless `layer` names a rule, but it is {requested}.")
    return requested, encoder_options, selection


def _apply_choice(
    choice: EncoderChoice, model: str, options: Mapping[str, Any]
) -> tuple[LayerArgument, dict[str, Any]]:
    """Return the layer of a choice, and its options with others that do not contradict it.

    Raises:
        OptionError: the choice is of another model, or was made with other options.
    """
    if choice.model.startswith("module/"):
        raise OptionError(
            f"`layer` must be chosen for files, but it was chosen for {choice.model}, a module in memory: "
            "LayerEncoder.from_module(module, layer, processor=…)."
        )
    keywords: dict[str, Any] = {**(choice.options or {}), **choice.keywords}
    layer = keywords.pop("layer")
    chosen, requested = make_options(keywords), make_options({**keywords, **options})
    names = [Path(name).name.lower() for name in (encoder_name(model, requested), choice.model)]
    if names[0] != names[1]:
        raise OptionError(
            f"`layer` must be chosen for {requested.shown_name(model)}, but it was chosen for "
            f"{choice.model.removeprefix('local/')}. If both have the same weights: "
            "LayerEncoder(model, **selection.keywords)."
        )
    fixed = chosen.non_defaults() if choice.options is None else option_names("reading", "model")
    settings = {name: (getattr(chosen, name), getattr(requested, name)) for name in options if name in fixed}
    settings["revision"] = choice.revision, requested.revision or "default"
    for name, (expected, value) in settings.items():
        if value != expected:
            raise OptionError(
                f"`{name}` must be {short_repr(expected)}, for which the layer was chosen, but got "
                f"{short_repr(value)}. Leave it out, or pass the number of the layer."
            )
    return layer, {**keywords, **options}


def check_choice_fits(choice: EncoderChoice, name: str, num_layers: int) -> None:
    """Raise if a choice was made for a model with another number of blocks."""
    if choice.num_layers not in (0, num_layers):  # 0 in a frame of layer 0 alone
        raise OptionError(
            f"`layer` must be chosen for {name}, which has {num_layers} blocks, but it was chosen for a model of "
            f"{choice.num_layers}. Select a layer of this model."
        )


def complete_encoder(encoder_class: Any, model: str, options: Mapping[str, Any]) -> Any:
    """Return an encoder of the whole model whose layers can be read, without modules trained for the last layer.

    Args:
        encoder_class: ``LayerEncoder``.
        model: folder or hub name.
        options: keywords of :class:`~midlayer_encoders.EncoderOptions`.
    """
    encoder = encoder_class(model, -1, **{"dense": "drop", **options})
    if encoder.options.dense == "drop" and "dense" not in options:
        logger.warning(
            "Every layer of %s is read without %s, which was trained for its last layer (dense='drop').",
            encoder.name,
            ", ".join(encoder.saved.trained),
        )
    return encoder


def _select_by(
    encoder_class: Any,
    rule: str,
    model: str,
    options: EncoderOptions,
    texts: Sequence[str] | None,
    labels: Sequence[int | str | None] | None,
    recipes: str | None,
) -> tuple[Selection, EncoderOptions]:
    """Return the selection of a rule, and the options with the recipe that it brings."""
    from midlayer_encoders.selection import RULES, select  # with the metrics, which a numbered layer does not need

    check_choice("layer", rule, RULES)
    # The recipe's fields are among the options; modules after the pooling depend on the layer.
    complete = complete_encoder(encoder_class, model, {**options.non_defaults(), "recipe": None, "center": None})
    selection = select(complete, texts, labels, rule=rule, recipes=recipes)
    # The last layer by default is the model as it was saved; other choices compare layers without these modules.
    is_default = rule == AUTO and labels is None and selection.layer == complete.num_layers
    keywords = {**options.non_defaults(), "dense": options.dense if is_default else complete.options.dense}
    if selection.center is not None and options.center is not None:
        selection = replace(selection, center=options.center)
    keywords |= {name: value for name, value in selection.keywords.items() if name != "layer"}
    options = make_options(keywords)
    return with_encoder(encoder_class, selection, model, options), options


def with_encoder(encoder_class: Any, selection: Selection, model: str, options: EncoderOptions) -> Selection:
    """Return a selection that can create its encoder."""
    return replace(selection, options=options.recreating(), make_encoder=partial(encoder_class, model))


def check_own(encoder: Any, options: Mapping[str, Any]) -> None:
    """Raise if options that accompany an encoder differ from the encoder's."""
    requested = make_options(options)
    has_index = ":" in (requested.device or "")  # "cuda" means any CUDA device
    current: dict[str, Any] = {
        "pooling": encoder.pooling,
        "device": str(encoder.device) if has_index else encoder.device.type,
        "normalize": "Normalize" in encoder.after_pooling,
        "similarity_fn_name": encoder.similarity_fn_name,
    }
    for name in {**options, **requested.non_defaults()}.keys() & option_fields().keys():
        check_matches_encoder(name, getattr(requested, name), current.get(name, getattr(encoder.options, name)))
