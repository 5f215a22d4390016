"""Load and cut a model, and build the modules of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers.util import get_device_name
from torch import nn

from midlayer_encoders._types import Layer, Medium, Pooling
from midlayer_encoders.encoder import several_layers
from midlayer_encoders.encoder.inputs import (
    probe_inputs,
    sampling_rate,
    supported_media,
    to_device,
    with_fixed_order,
    without_needless_mask,
)
from midlayer_encoders.encoder.memory_module import memory_module
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.prompting import (
    SavedPrompts,
    apply_template,
    load_saved_prompts,
    pooling_module,
    resolve_prompts,
)
from midlayer_encoders.encoder.spec import base_name
from midlayer_encoders.encoder.transformer_module import transformer_module
from midlayer_encoders.encoder.verification import check_padding, check_states
from midlayer_encoders.errors import CutError, MidlayerError, OptionError, short_repr
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.cut import MOST_PLANS, Cut, JointCut
from midlayer_encoders.models.hub import BUILT_IN_MINILM, model_location
from midlayer_encoders.models.load import NoPlanError, load_cut
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.models.transformers_internals import gguf_read_once
from midlayer_encoders.recipes import TokenLayout
from midlayer_encoders.validation import check_choice


@dataclass(frozen=True)
class EncoderParts:
    """The parts of an encoder.

    Attributes:
        source: the requested model: a folder, a name on the hub, ``"built-in"``, or the name of a module.
        name: name of the model in results.
        first: module that prepares inputs and returns the layer's states.
        cut: cut of the model.
        gguf_file: file of quantized weights, if any.
        anatomy: anatomy of the cut model, if it was verified.
        placed: positions of a text's tokens among those of the template and the tokenizer.
        mix: layers to combine, if there are several.
        saved_prompts: prompts of the folder.
    """

    source: str
    name: str
    first: Any
    cut: Cut | JointCut
    gguf_file: str | None = None
    anatomy: Anatomy | None = None
    placed: TokenLayout = TokenLayout()
    mix: several_layers.LayerMix | None = None
    saved_prompts: SavedPrompts = SavedPrompts()

    def modules(self, pooling: Pooling | None) -> list[nn.Module]:
        """Return the first module and the pooling; a joint model has none, since its heads pool."""
        if isinstance(self.cut, JointCut):
            if pooling is not None:
                raise OptionError(
                    f"`pooling` must be None for {self.name}, whose heads pool the states, but got {pooling!r}. "
                    "Pass `tower` to pool the states of one tower."
                )
            return [self.first]
        modules = [self.first, pooling_module(self.first, pooling)]
        if (mix := self.mix) is not None:
            width = self.first.get_embedding_dimension()
            width = width if mix.combine == "concat" else width // len(mix.layers)
            modules.append(several_layers.CombinedLayers(mix.layers, mix.shares, mix.combine, width))
        return modules


def build_from_files(
    model: str, layer: Layer | Sequence[Layer] | Mapping[str, Layer], options: EncoderOptions
) -> EncoderParts:
    """Return the parts of an encoder of a folder or a name on the hub."""
    layers = several_layers.requested_layers(layer, options)
    folder, gguf_file = model_location(model, options.gguf_file)
    if options.gguf_file not in (None, gguf_file):
        raise OptionError(f"`gguf_file` must be left out for {model!r}, but got {options.gguf_file!r}.")
    saved = SavedPrompts()
    if options.prompts is None and options.template is None:
        saved = load_saved_prompts(folder, options.revision, gguf_file=gguf_file)
    resolve_prompts(options, saved)  # raises before anything large is loaded
    name = "local/all-MiniLM-L6-v2" if model == BUILT_IN_MINILM else base_name(folder, gguf_file)
    source = {
        "revision": options.revision,
        "gguf_file": gguf_file,
        "trust_remote_code": options.trust_remote_code,
    }
    error: MidlayerError | None = None
    for plan in range(MOST_PLANS):
        try:
            first, cut, anatomy, mix = _load_plan(folder, layers or layer, options, source, plan)
        except NoPlanError:
            break
        except CutError as reason:
            error = error or reason
        except (MidlayerError, OSError, torch.OutOfMemoryError):
            raise
        except ImportError as reason:
            cause = " ".join(str(reason).split())
            raise MidlayerError(f"{model!r} needs a library that is not installed: {cause}") from reason
        except Exception as reason:  # shallower models fail in their own ways
            if error is None:
                error = CutError(
                    f"{name} cannot be made, or run, with the blocks up to layer {layers or layer} alone "
                    f"({type(reason).__name__}: {reason}). Try another layer, or read its last states with a plain "
                    "SentenceTransformer."
                )
                error.__cause__ = reason
        else:
            placed = apply_template(first, options, name)
            saved = saved if "text" in supported_media(first.modalities) else SavedPrompts()
            return EncoderParts(model, name, first, cut, gguf_file, anatomy, placed, mix, saved)
    assert error is not None
    raise error from error.__cause__


def _load_plan(
    folder: str,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer],
    options: EncoderOptions,
    source: Mapping[str, Any],
    plan: int,
) -> tuple[Any, Cut | JointCut, Anatomy | None, several_layers.LayerMix | None]:
    """Load a model by one of the plans to read a layer, and verify the states."""
    with nullcontext() if source["gguf_file"] is None else gguf_read_once():
        loaded, cut = load_cut(
            folder,
            layer,
            norm=options.norm,
            tower=options.tower,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            adapters=options.adapters,
            device_map=options.device_map,
            plan=plan,
            spare=True,
            **source,
        )
        first: Any = transformer_module(
            folder, loaded, cut, source, max_length=options.max_length, chat_template=options.chat_template
        )
    if options.device_map is None:
        first.to(options.device or get_device_name())
    if isinstance(cut, JointCut):
        return first, cut, None, None
    alone, padded = probe_features(first)
    anatomy = check_states(first, cut, alone, padded)
    mix = several_layers.layer_mix(layer, options, cut) if isinstance(layer, list) else None
    if mix is not None:
        several_layers.read_side_by_side(first, anatomy, mix, options.norm, alone)
    return first, cut, anatomy, mix


def probe_features(first: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the features of a short input alone, and in a padded batch with a longer one, on the module's device.

    The second is ``None`` for images, which are never padded.
    """
    model = first.model
    media = supported_media(first.modalities)
    device = next(model.parameters()).device
    if not media:
        raise CutError(
            f"{type(model).__name__} takes neither text nor images nor audio by itself (sentence-transformers finds: "
            f"{', '.join(map(str, first.modalities)) or 'nothing'}), so it cannot be an encoder."
        )
    short, longer = probe_inputs(media, sampling_rate(first.processor), getattr(first, "tokenizer", None))

    def features(inputs: list[Any]) -> dict[str, Any]:
        batch = with_fixed_order(model, first.preprocess(inputs))
        return to_device(without_needless_mask(model, batch), device)

    return features([short]), features([short, longer]) if longer is not None else None


def build_from_module(
    module: nn.Module,
    layer: Layer | Sequence[Layer],
    options: EncoderOptions,
    *,
    processor: Callable[..., Any],
    medium: Medium,
    blocks: str | None,
    final: Sequence[str] | None,
) -> EncoderParts:
    """Return the parts of an encoder of a module in memory, which is copied."""
    options.check_for_module()
    check_choice("medium", medium, ("text", "image", "audio"))
    if not isinstance(module, nn.Module):
        raise OptionError(f"`module` must be a torch.nn.Module, but got {short_repr(module)}.")
    if processor is not None and not callable(processor):
        raise OptionError(
            f"`processor` must be a function from inputs to the module's arguments, but got {short_repr(processor)}."
        )
    if isinstance(layer, Mapping):
        raise OptionError(f"`layer` must be one number for a module in memory, but got {dict(layer)}.")
    layers = several_layers.requested_layers(layer, options)
    paths = None if final is None else tuple(final)
    first, cut = memory_module(
        module, layers or layer, processor, norm=options.norm, medium=medium, blocks=blocks, final=paths
    )
    mix = several_layers.layer_mix(layers, options, cut) if layers else None
    if mix is not None:
        first.layers = mix.layers
    alone, padded = probe_features(first)
    check_padding(first, alone, padded)
    if suffers_from_padding(first.model) and padded is not None and "attention_mask" not in padded:
        raise OptionError(
            f"`processor` must return an `attention_mask` with the arguments of {type(first.model).__name__}, or must "
            "not pad: padding changes its states, and nothing marks the end of an input."
        )
    name = f"module/{type(module).__name__}"
    return EncoderParts(name, name, first, cut, mix=mix)
