"""From a model and options to the modules of an encoder: what is read, how it is cut, what it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from sentence_transformers.util import get_device_name
from torch import nn

from midlayer_encoders._types import Layer, Medium, Pooling
from midlayer_encoders.encoder.inputs import (
    media_taken,
    moved,
    probe_inputs,
    sampling_rate,
    with_fixed_order,
    without_needless_mask,
)
from midlayer_encoders.encoder.memory_module import memory_module
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.prompting import ask, pooling_module, prompts_of
from midlayer_encoders.encoder.saved_prompts import SavedPrompts, saved_prompts
from midlayer_encoders.encoder.several_layers import (
    CombinedLayers,
    LayerMix,
    asked_layers,
    layer_mix,
    read_side_by_side,
)
from midlayer_encoders.encoder.spec import base_name
from midlayer_encoders.encoder.transformer_module import transformer_module
from midlayer_encoders.encoder.verification import check_padding, check_states
from midlayer_encoders.errors import CutError, MidlayerError, OptionError, short_repr
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.cut import MOST_PLANS, Cut, JointCut
from midlayer_encoders.models.hub import BUILT_IN_MINILM, place_of
from midlayer_encoders.models.load import NoPlanError, load_cut
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.models.transformers_internals import gguf_read_once
from midlayer_encoders.recipes import Placed
from midlayer_encoders.validation import check_choice

__all__ = ["Built", "build_from_files", "build_from_module", "probes"]


@dataclass(frozen=True)
class Built:
    """What an encoder is assembled from.

    Attributes:
        source: the model as it was asked for: a folder, a name on the hub, ``"built-in"``, or the name of a module.
        name: the model's name in results.
        first: the module that prepares inputs and reads the layer's states.
        cut: how the layer is read.
        gguf_file: file of quantized weights, if any.
        anatomy: where the cut model keeps its parts, seen in a pass; ``None`` where none was watched.
        placed: where a text's own tokens are among those that the template and the tokenizer add.
        mix: which layers are combined; ``None`` for one.
        saved_prompts: that the folder keeps for texts.
    """

    source: str
    name: str
    first: Any
    cut: Cut | JointCut
    gguf_file: str | None = None
    anatomy: Anatomy | None = None
    placed: Placed = Placed()
    mix: LayerMix | None = None
    saved_prompts: SavedPrompts = SavedPrompts()

    def modules(self, pooling: Pooling | None) -> list[nn.Module]:
        """Return the first module and the pooling; a joint model has none, since its heads pool."""
        if isinstance(self.cut, JointCut):
            if pooling is not None:
                raise OptionError(
                    f"`pooling` must be None for {self.name}: its towers meet in what its own heads make, but got "
                    f"{pooling!r}. Pass `tower` to pool the states of one tower."
                )
            return [self.first]
        pooled, width = [self.first, pooling_module(self.first, pooling)], self.first.get_embedding_dimension()
        if (mix := self.mix) is None:
            return pooled
        made = width if mix.combine == "concat" else width // len(mix.layers)
        return [*pooled, CombinedLayers(mix.layers, mix.shares, mix.combine, made)]


def build_from_files(
    model: str, layer: Layer | Sequence[Layer] | Mapping[str, Layer], options: EncoderOptions
) -> Built:
    """Return what an encoder of a folder, or of a name on the hub, is assembled from."""
    several = asked_layers(layer, options)
    layer = several or layer
    folder, gguf_file = place_of(model, options.gguf_file)
    if options.gguf_file not in (None, gguf_file):
        raise OptionError(f"`gguf_file` must be left out for {model!r}, but got {options.gguf_file!r}.")
    saved = SavedPrompts()
    if options.prompts is None and options.template is None:
        saved = saved_prompts(folder, options.revision, gguf_file=gguf_file)
    prompts_of(options, saved)  # a default that is none of them is refused before anything large is read
    source: dict[str, Any] = {
        "revision": options.revision,
        "gguf_file": gguf_file,
        "trust_remote_code": options.trust_remote_code,
    }
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    refused: MidlayerError | None = None
    for plan in range(MOST_PLANS):  # ways to have the layer, until the states of one are the layer's
        try:
            with nullcontext() if gguf_file is None else gguf_read_once():
                loaded, cut = load_cut(
                    folder, layer, norm=options.norm, tower=options.tower, dtype=dtype, adapters=options.adapters,
                    device_map=options.device_map, plan=plan, spare=True, **source,
                )  # fmt: skip
                first = transformer_module(
                    folder, loaded, cut, source, max_length=options.max_length, chat_template=options.chat_template
                )
            first.to(options.device or get_device_name()) if options.device_map is None else None
            anatomy = check_states(first, cut, *probes(first)) if isinstance(cut, Cut) else None
            mix = layer_mix(several, options, cut) if several and isinstance(cut, Cut) else None
            if mix is not None and anatomy is not None:
                read_side_by_side(first, anatomy, mix, options.norm, probes(first)[0])
        except NoPlanError:
            break
        except CutError as reason:
            refused = refused or reason
        except (MidlayerError, OSError, torch.OutOfMemoryError):
            raise
        except ImportError as reason:
            told = " ".join(str(reason).split())
            raise MidlayerError(f"{model!r} needs a library that is not installed: {told}") from reason
        except Exception as reason:  # a model that is made or run by itself, or shallower, fails in its own way
            if refused is None:
                refused = CutError(
                    f"{base_name(folder, gguf_file)} cannot be made, or run, with the blocks up to layer {layer} alone "
                    f"({type(reason).__name__}: {reason}). Try another layer, or read its last states with a plain "
                    "SentenceTransformer."
                )
                refused.__cause__ = reason
        else:
            name = "local/all-MiniLM-L6-v2" if model == BUILT_IN_MINILM else base_name(folder, gguf_file)
            placed = ask(first, options, name)
            saved = saved if "text" in media_taken(first.modalities) else SavedPrompts()
            return Built(model, name, first, cut, gguf_file, anatomy, placed, mix, saved)
    assert refused is not None
    raise refused from refused.__cause__


def probes(first: Any) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the features of a short input alone, and with a longer one in a padded batch, on the module's device.

    Images are never padded: there the second is ``None``.
    """
    model, taken = first.model, media_taken(first.modalities)
    device = next(model.parameters()).device
    if not taken:
        raise CutError(
            f"{type(model).__name__} takes neither text nor images nor audio by itself (sentence-transformers finds: "
            f"{', '.join(map(str, first.modalities)) or 'nothing'}), so it cannot be an encoder."
        )
    short, longer = probe_inputs(taken, sampling_rate(first.processor), getattr(first, "tokenizer", None))

    def features(inputs: list[Any]) -> dict[str, Any]:
        made = without_needless_mask(model, with_fixed_order(model, first.preprocess(inputs)))
        return moved(made, device)

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
) -> Built:
    """Return what an encoder of a module in memory is assembled from; the module is copied."""
    options.check_for_module()
    check_choice("medium", medium, ("text", "image", "audio"))
    if not isinstance(module, nn.Module):
        raise OptionError(f"`module` must be a torch.nn.Module, but got {short_repr(module)}.")
    if processor is not None and not callable(processor):
        raise OptionError(
            f"`processor` must be a function from inputs to what the module takes, but got {short_repr(processor)}."
        )
    if isinstance(layer, Mapping):
        raise OptionError(f"`layer` must be one number for a module in memory, but got {dict(layer)}.")
    several = asked_layers(layer, options)
    layer = several or layer
    paths = None if final is None else tuple(final)
    first, cut = memory_module(module, layer, processor, norm=options.norm, medium=medium, blocks=blocks, final=paths)
    mix = layer_mix(several, options, cut) if several else None
    first.layers = first.layers if mix is None else mix.layers
    _check_batches(first)
    name = f"module/{type(module).__name__}"
    return Built(name, name, first, cut, mix=mix)


def _check_batches(first: Any) -> None:
    """Note it where padding changes the states of a module in memory; raise where nothing says what is padding."""
    alone, padded = probes(first)
    check_padding(first, alone, padded)
    if suffers_from_padding(first.model) and padded is not None and "attention_mask" not in padded:
        raise OptionError(
            f"`processor` must return an `attention_mask` beside what {type(first.model).__name__} takes, or nothing "
            "that is padded: an input has other states beside a longer one, and nothing says where it ends."
        )
