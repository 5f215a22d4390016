"""The private parts of transformers that this package relies on.

``tests/models/test_transformers_internals.py`` fails when a release renames one of them or changes its meaning.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = [
    "BACKBONE_STAGES",
    "COUNTS",
    "ENCODERS",
    "LOADING",
    "TIMM",
    "EncoderPart",
    "drop_recording_hooks",
    "encoder_part",
    "gguf_read_once",
    "has_mask_of_states",
    "is_pretrained",
    "lacks_folder",
    "mask_of_states",
    "opt_lacks_final_norm",
    "read_weights",
    "register_recordable_outputs",
    "text_config",
    "timm_norm_settings",
    "timm_takes_depth",
    "unsplit_classes",
    "without_cache",
    "without_weights",
]

LOADING = threading.RLock()
"""Held while a model is loaded.

To load or make a model, transformers sets torch's default dtype and replaces ``PreTrainedModel.tie_weights`` and
``torch.linspace`` for the whole process, then puts back what it found: two loads that overlap in two threads would
leave each other's values behind for good.
"""

BACKBONE_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")
"""Settings of a backbone's outputs, one for each block: transformers makes them anew when they are absent."""

COUNTS = (
    "num_hidden_layers",
    "num_layers",
    "n_layer",
    "n_layers",
    "encoder_layers",
    "num_encoder_layers",
    "depth",
    "num_blocks",
)
"""Names by which configs count blocks."""

ENCODERS = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "longt5": "LongT5EncoderModel",
    "switch_transformers": "SwitchTransformersEncoderModel",
    "whisper": "models.whisper.modeling_whisper.WhisperEncoder",  # not exported at the top of transformers
}
"""By model type, the class that holds the encoder alone of a model that also has a decoder."""

_RECORDING = "transformers.utils.output_capturing"  # the module whose hooks collect `hidden_states`


class _NoInit(TorchFunctionMode):
    """Leaves new parameters as they are: on the meta device to draw random numbers for them takes most of the time."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor where a function would only fill it."""
        name = getattr(func, "__name__", "")
        if getattr(func, "__module__", "") == "torch.nn.init" or name in ("uniform_", "normal_", "trunc_normal_"):
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def without_weights() -> Iterator[None]:
    """Make models without weights, of this thread alone: on the meta device, and with nothing drawn for them."""
    with torch.device("meta"), _NoInit():
        yield


def read_weights(
    kind: Any, model: str, *, unexpected: Sequence[str] = (), prefix: str | None = None, **options: Any
) -> tuple[Any, dict[str, Any]]:
    """Return what ``kind.from_pretrained`` reads, in eval mode, and which weights were missing.

    transformers takes no argument for either of the first two options, only class attributes, so the model is loaded
    as a subclass that is thrown away: ``kind`` itself never changes, whatever other threads do with it.

    Args:
        kind: class of the model.
        model: folder or name on the hub.
        unexpected: patterns of weights that the files may hold and the model does not, so that nothing is logged.
        prefix: what precedes the keys of this model in the files, where it is not the class's own prefix.
        options: of ``from_pretrained``.
    """
    attributes = {
        # The name and module stay: transformers looks up conversions and recorded outputs by them.
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "_keys_to_ignore_on_load_unexpected": [*(kind._keys_to_ignore_on_load_unexpected or ()), *unexpected],
        "base_model_prefix": prefix or kind.base_model_prefix,
    }
    throwaway: Any = type(kind.__name__, (kind,), attributes)
    with LOADING:
        loaded, told = throwaway.from_pretrained(model, output_loading_info=True, **options)
    loaded.__class__ = kind
    return loaded, told


class EncoderPart(NamedTuple):
    """The encoder of a model that also has a decoder: the class that holds it alone, its config, its path there."""

    kind: Any
    config: Any
    path: str


def encoder_part(config: Any) -> EncoderPart | None:
    """Return the encoder alone of a model that also has a decoder, ``None`` for any other model.

    Where :data:`ENCODERS` has none, it is what the whole model hands out as its encoder.
    """
    import transformers

    if (name := ENCODERS.get(getattr(config, "model_type", ""))) is not None:
        return EncoderPart(attrgetter(name)(transformers), config, "encoder")
    if not getattr(config, "is_encoder_decoder", False) or type(config) not in transformers.MODEL_MAPPING:
        return None
    with without_weights():
        whole: Any = transformers.AutoModel.from_config(copy.deepcopy(config))
    encoder = whole.get_encoder()
    path = next((path for path, module in whole.named_modules() if module is encoder), "")
    return EncoderPart(type(encoder), encoder.config, path) if is_pretrained(encoder) and path else None


def lacks_folder(model: nn.Module) -> bool:
    """Return whether a model is an encoder that no library loads by itself, for want of an automatic class."""
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) and config.model_type not in ENCODERS


def text_config(config: Any) -> Any:
    """Return the config of the language model inside one that also reads images or audio, ``None`` where it is none.

    An encoder with a decoder is none: transformers hands out a copy with other values for it.
    """
    if config is None or not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None
    try:
        inner = config.get_text_config(decoder=True)
    except (ValueError, AttributeError):  # several, and none is the language model
        return None
    return inner if inner is not config and hasattr(inner, "model_type") else None


TIMM = "timm_wrapper"
"""Type of a model of timm inside one of transformers: timm's own settings are in ``config.model_args``."""


def timm_takes_depth(config: Any) -> bool:
    """Return whether an architecture of timm has a setting for the depth of its one stack of blocks."""
    return _timm_model(config, {"depth": 1}) is not None


def timm_norm_settings(config: Any) -> dict[str, bool]:
    """Return the settings under which a model of timm norms its pooled vector instead of its states.

    They make ``fc_norm`` of what was ``norm``; empty where the architecture has none.
    """
    for settings in ({"fc_norm": True}, {"use_fc_norm": True}):  # VisionTransformer, Eva
        made: Any = _timm_model(config, settings)
        if made is not None and isinstance(made.norm, nn.Identity) and not isinstance(made.fc_norm, nn.Identity):
            return settings
    return {}


def _timm_model(config: Any, settings: dict[str, Any]) -> nn.Module | None:
    """Return timm's model without weights, ``None`` where its architecture does not know a setting."""
    import timm

    with without_weights():
        try:
            arguments = {**(config.model_args or {}), **settings}
            made: nn.Module = timm.create_model(config.architecture, pretrained=False, num_classes=0, **arguments)
        except TypeError:
            return None
    return made


def unsplit_classes(model: nn.Module) -> set[str]:
    """Return the names of the classes that transformers never splits over devices: in nearly every family, the block.

    No public attribute says which module of a model is its block.
    """
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a model of transformers, by itself or inside another, without its base class.

    Code from the hub may bring a base class of its own, with the same attributes.
    """
    return hasattr(module, "config") and hasattr(module, "base_model_prefix")


def opt_lacks_final_norm(config: Any) -> bool:
    """Return whether an OPT checkpoint was made before its final norm existed, which only a private setting says."""
    return bool(config._remove_final_layer_norm)


def has_mask_of_states(model: nn.Module) -> bool:
    """Return whether a model says which of its states are of real samples, as Wav2Vec2 and its relatives do."""
    return hasattr(model, "_get_feature_vector_attention_mask")


def mask_of_states(model: nn.Module, length: int, mask: Tensor) -> Tensor:
    """Return which states are of real samples, bool, shape ``(B, T)``, by a private method of the model.

    Only the model knows how its convolutions shorten a waveform.

    Args:
        model: one that :func:`has_mask_of_states`.
        length: number T of states.
        mask: of the samples, shape ``(B, samples)``.
    """
    asked: Any = model._get_feature_vector_attention_mask
    return asked(length, mask.long()).bool()  # type: ignore[no-any-return]


@lru_cache(maxsize=256)
def _has_cache(kind: Any) -> bool:
    return {"use_cache", "past_key_values"} <= set(inspect.signature(kind.forward).parameters)


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a pass that keeps no keys and values for a next one: a text has none.

    By default a decoder of transformers copies those of every block and holds them until the pass is over, which took a
    tenth of the time and three quarters of the memory of a pass on an H200.
    """
    return {**inputs, "use_cache": False} if _has_cache(cast(Any, type(model))) else dict(inputs)


def drop_recording_hooks(model: nn.Module) -> None:
    """Remove the hooks by which transformers records hidden states: they cannot be pickled.

    They are closures, installed at the first pass that asks for hidden states, and again at the next one when the
    flag that says they are there is off.
    """
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", "") == _RECORDING:
                del module._forward_hooks[key]
        if getattr(module, "_output_capturing_hooks_installed", False):
            module._output_capturing_hooks_installed = False  # type: ignore[assignment]


def register_recordable_outputs(model: Any) -> None:
    """Have transformers know which outputs a model's class records, as it must before an unpickled model runs.

    A process learns it when the first model of a class is made, and unpickling makes none.
    """
    with torch.device("meta"):
        type(model)(model.config)


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """Have a GGUF file parsed once while an encoder is made of it.

    transformers asks for its fields four times, for config, tokenizer and weights, and each time the reader makes an
    array of every token and merge: ten seconds of a core for 49,000 tokens.
    """
    try:
        gguf: Any = importlib.import_module("gguf")
    except ImportError:  # who loads the model says so
        yield
        return
    with LOADING:
        reader = gguf.GGUFReader
        gguf.GGUFReader = lru_cache(maxsize=1)(reader)
        try:
            yield
        finally:
            gguf.GGUFReader = reader
