"""``LayerEncoder(model, selection)``: the layer and the options of a selection, or of the best layer of a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from midlayer_encoders._types import EncoderChoice, LayerArgument
from midlayer_encoders.encoder.build import encoder_name
from midlayer_encoders.encoder.options import EncoderKeywords, make_options
from midlayer_encoders.errors import OptionError, short_repr

_PROMPT_OPTIONS = {"prompts", "default_prompt_name", "chat_template", "template", "join"}
_TOKEN_OPTIONS = {"skip_first", "skip_special", "template_tokens"}
READING_OPTIONS = {"norm", "pooling", "bidirectional"} | _TOKEN_OPTIONS | _PROMPT_OPTIONS
"""Options that say how to read texts."""

_FILE_OPTIONS = {"revision", "tower", "adapters", "gguf_file"}
_VECTOR_OPTIONS = {"recipe", "center"}
_CHOSEN_OPTIONS = READING_OPTIONS | _FILE_OPTIONS | _VECTOR_OPTIONS


def apply_choice(choice: EncoderChoice, model: str, options: EncoderKeywords) -> tuple[LayerArgument, EncoderKeywords]:
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
    chosen = make_options(keywords)
    requested = make_options({**keywords, **options})
    name = encoder_name(model, requested.gguf_file)
    if Path(name).name.lower() != Path(choice.model).name.lower():
        raise OptionError(
            f"`layer` must be chosen for {name}, but it was chosen for {choice.model}. If both have the same weights: "
            "LayerEncoder(model, **selection.keywords)."
        )
    fixed = set(chosen.changed()) if choice.options is None else _CHOSEN_OPTIONS
    settings = {name: (getattr(chosen, name), getattr(requested, name)) for name in options.keys() & fixed}
    settings["revision"] = choice.revision, requested.revision or "default"
    for name, (expected, value) in settings.items():
        if value != expected:
            raise OptionError(
                f"`{name}` must be {short_repr(expected)}, for which the layer was chosen, but got "
                f"{short_repr(value)}. Leave it out, or pass the number of the layer."
            )
    return layer, cast(EncoderKeywords, {**keywords, **options})


def check_choice_fits(choice: EncoderChoice, name: str, num_layers: int) -> None:
    """Raise if a choice was made for a model with another number of blocks."""
    if choice.num_layers not in (0, num_layers):  # 0 in a frame of layer 0 alone
        raise OptionError(
            f"`layer` must be chosen for {name}, which has {num_layers} blocks, but it was chosen for a model of "
            f"{choice.num_layers}. Select a layer of this model."
        )
