"""The private parts of transformers that this package relies on.

``tests/models/test_transformers_internals.py`` fails when a release renames one of them or changes its meaning.
"""

import copy
import inspect
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.utils import logging as transformers_logging

#: Held while a model is loaded.
#:
#: To build a model, transformers sets torch's default dtype and patches ``PreTrainedModel.tie_weights`` and
#: ``torch.linspace`` for the whole process, then restores them: concurrent loads would leave wrong values behind.
LOADING = threading.RLock()

#: Per-block settings of a backbone's outputs, which transformers recomputes when they are absent.
BACKBONE_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")

#: Config fields that count blocks.
COUNTS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "num_encoder_layers", "depth",
    "num_blocks",
)  # fmt: skip

#: The encoder-only class of encoder-decoder models, by model type.
ENCODERS = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "longt5": "LongT5EncoderModel",
    "switch_transformers": "SwitchTransformersEncoderModel",
    "whisper": "models.whisper.modeling_whisper.WhisperEncoder",  # not exported at the top level
}

_RECORDING = "transformers.utils.output_capturing"  # the module whose hooks collect `hidden_states`


class _NoInit(TorchFunctionMode):
    """Skip the initialization of parameters, which takes most of the time on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the tensor unchanged if the function would only fill it."""
        name = getattr(func, "__name__", "")
        if getattr(func, "__module__", "") == "torch.nn.init" or name in ("uniform_", "normal_", "trunc_normal_"):
            return args[0] if args else (kwargs or {}).get("tensor")
        return func(*args, **(kwargs or {}))


@contextmanager
def without_weights() -> Iterator[None]:
    """Build models on the meta device without initialization, in this thread only."""
    with torch.device("meta"), _NoInit():
        yield


def empty_model(make: Callable[..., Any], config: Any, **options: Any) -> Any:
    """Return the model that ``make`` builds from a config on the meta device; callers must not change it.

    A sweep loads the same model again and again, so the last ones are kept, except from code outside transformers,
    which may have changed.
    """
    if not is_remote(config) and not hasattr(config, "auto_map"):
        return _kept_model(make, pickle.dumps(config), **options)
    with without_weights():
        return make(copy.deepcopy(config), **options)


@lru_cache(maxsize=16)
def _kept_model(make: Callable[..., Any], config: bytes, **options: Any) -> Any:
    with without_weights():
        return make(pickle.loads(config), **options)


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the bars of weights that are read, converted or written; downloads show theirs."""
    # `disable_progress_bar` would disable the bars of downloads, too.
    with LOADING, mock.patch.object(transformers_logging, "_tqdm_active", False):
        yield


def read_weights(kind: Any, model: str, *, prefix: str | None = None, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model that ``kind.from_pretrained`` loads, in eval mode, and its loading report, which is not logged.

    transformers reads ``prefix`` from a class attribute only, so a temporary subclass loads the model; ``kind`` itself
    never changes.

    Args:
        kind: class of the model.
        model: folder or name on the hub.
        prefix: prefix of the model's keys in the files, if it is not the class's.
        options: of ``from_pretrained``.
    """
    subclass = _with_prefix(kind, prefix or kind.base_model_prefix)
    # A level of the logger would add other lines.
    no_log = mock.patch.object(transformers_logging.get_logger("transformers.modeling_utils"), "disabled", True)
    with without_bars(), no_log:
        source = None if "state_dict" in options else model
        loaded, report = subclass.from_pretrained(source, output_loading_info=True, **options)
    loaded.__class__ = kind
    return loaded, report


@lru_cache(maxsize=16)
def _with_prefix(kind: Any, prefix: str) -> Any:
    # transformers looks up conversions and recorded outputs by name and module.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), {**names, "base_model_prefix": prefix})


class EncoderPart(NamedTuple):
    """The encoder of an encoder-decoder: its class, its config and its path in the model."""

    kind: Any
    config: Any
    path: str


def encoder_part(config: Any) -> EncoderPart | None:
    """Return the encoder of an encoder-decoder, or ``None`` for another model."""
    import transformers

    if (name := ENCODERS.get(getattr(config, "model_type", ""))) is not None:
        return EncoderPart(attrgetter(name)(transformers), config, "encoder")
    if not getattr(config, "is_encoder_decoder", False) or type(config) not in transformers.MODEL_MAPPING:
        return None
    complete = empty_model(transformers.AutoModel.from_config, config)
    encoder = complete.get_encoder()
    path = next((path for path, module in complete.named_modules() if module is encoder), "")
    return EncoderPart(type(encoder), encoder.config, path) if is_pretrained(encoder) and path else None


def lacks_folder(model: nn.Module) -> bool:
    """Return whether a model is an encoder without an automatic class, which no library loads alone."""
    config: Any = model.config
    return bool(getattr(config, "is_encoder_decoder", False)) and config.model_type not in ENCODERS


def text_config(config: Any) -> Any:
    """Return the config of the language model inside one that also reads images or audio, or ``None``."""
    if not hasattr(config, "get_text_config") or getattr(config, "is_encoder_decoder", False):
        return None  # of an encoder-decoder, transformers returns a copy with other values
    try:
        inner = config.get_text_config(decoder=True)
    except (ValueError, AttributeError):  # several, none of them the language model's
        return None
    return inner if inner is not config and hasattr(inner, "model_type") else None


#: Model type of timm models; their settings are in ``config.model_args``.
TIMM = "timm_wrapper"


def timm_takes_depth(config: Any) -> bool:
    """Return whether a timm architecture has a setting for its depth."""
    return _timm_model(config, {"depth": 1}) is not None


def timm_norm_settings(config: Any) -> dict[str, bool]:
    """Return the settings with which a timm model normalizes its pooled vector (``fc_norm``) instead of its states.

    Empty if the architecture has no such setting.
    """
    for settings in ({"fc_norm": True}, {"use_fc_norm": True}):  # VisionTransformer, Eva
        model: Any = _timm_model(config, settings)
        if model is not None and isinstance(model.norm, nn.Identity) and not isinstance(model.fc_norm, nn.Identity):
            return settings
    return {}


def _timm_model(config: Any, settings: dict[str, Any]) -> nn.Module | None:
    """Return the timm model without weights, or ``None`` if its architecture lacks a setting."""
    import timm

    arguments = {**(config.model_args or {}), **settings}
    try:
        with without_weights():
            model: nn.Module = timm.create_model(config.architecture, pretrained=False, num_classes=0, **arguments)
    except TypeError:
        return None
    return model


def unsplit_classes(model: nn.Module) -> set[str]:
    """Return the classes that transformers never splits: in nearly every family, the block."""
    return {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}


def is_pretrained(module: nn.Module) -> bool:
    """Return whether a module is a transformers model; code from the hub may use another base class."""
    return hasattr(module, "config") and hasattr(module, "base_model_prefix")


def input_embeddings(model: Any) -> nn.Module | None:
    """Return the input embeddings of a model, or ``None`` if transformers does not know where they are."""
    try:
        embeddings: nn.Module | None = model.get_input_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None
    return embeddings


def is_remote(model: object) -> bool:
    """Return whether the code of a model, or of a config, is from the hub or another package, not of transformers."""
    return not type(model).__module__.startswith("transformers.")


def forget_remote_model(config: Any) -> None:
    """Let ``AutoModel`` read a folder's own code again, which may have changed since its class was registered."""
    from transformers import AutoModel

    registered: dict[Any, type] = AutoModel._model_mapping._extra_content
    model_class = registered.get(type(config))
    if model_class is not None and model_class.__module__.startswith("transformers_modules."):
        del registered[type(config)]


def opt_lacks_final_norm(config: Any) -> bool:
    """Return whether an OPT checkpoint predates the final norm."""
    return bool(config._remove_final_layer_norm)


def has_mask_of_states(model: nn.Module) -> bool:
    """Return whether a model can tell which states belong to real samples, as Wav2Vec2 can."""
    return hasattr(model, "_get_feature_vector_attention_mask")


def mask_of_states(model: nn.Module, length: int, mask: Tensor) -> Tensor:
    """Return which states belong to real samples, bool, shape ``(B, T)``.

    Args:
        model: one with :func:`has_mask_of_states`.
        length: number T of states.
        mask: mask of the samples, shape ``(B, samples)``.
    """
    state_mask: Any = model._get_feature_vector_attention_mask
    if "add_adapter" in inspect.signature(state_mask).parameters:  # an adapter after the blocks shortens their states
        state_mask = partial(state_mask, add_adapter=False)
    return state_mask(length, mask.long()).bool()  # type: ignore[no-any-return]


def without_cache(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a pass without a key-value cache.

    By default a decoder caches the keys and values of every block, which took a tenth of the time and three quarters of
    the memory of a pass on an H200.
    """
    has_cache = {"use_cache", "past_key_values"} <= set(inspect.signature(type(model).forward).parameters)
    return {**inputs, "use_cache": False} if has_cache else dict(inputs)


def is_recording_hook(hook: object) -> bool:
    """Return whether a hook is one with which transformers records hidden states, which change no output."""
    return getattr(hook, "__module__", "") == _RECORDING


def drop_recording_hooks(model: nn.Module) -> None:
    """Remove the hooks with which transformers records hidden states, which cannot be pickled.

    transformers installs them at the first pass that requests hidden states, and again if its flag is off.
    """
    for module in model.modules():
        for key, hook in list(module._forward_hooks.items()):
            if is_recording_hook(hook):
                del module._forward_hooks[key]
        if getattr(module, "_output_capturing_hooks_installed", False):
            module._output_capturing_hooks_installed = False  # type: ignore[assignment]


def register_recordable_outputs(model: Any) -> None:
    """Register the outputs that a model's class records, which unpickling does not do."""
    empty_model(type(model), model.config)
