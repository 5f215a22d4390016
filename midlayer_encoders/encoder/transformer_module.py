"""Build sentence-transformers' module around a cut model, which prepares inputs and returns the layer's states."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from midlayer_encoders.encoder.sentence_transformers_internals import tokenizer_alone, transformer_around
from midlayer_encoders.errors import MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import Cut, JointCut
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.validation import check_count

# The medium of a model by the first argument of its forward pass; its processor may support others, too.
_MEDIA = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
# Text towers that need texts padded to the maximum length: SigLIP pools the last position, and AIMv2's attention is
# causal only on padded batches (transformers 5.17 to 5.22).
_PADDED_ALWAYS = {"siglip", "siglip2", "aimv2", "aimv2_text_model"}


def transformer_module(
    model: str,
    loaded: nn.Module,
    cut: Cut | JointCut,
    source: Mapping[str, Any],
    *,
    max_length: int | None = None,
    chat_template: bool = False,
) -> Transformer:
    """Return the module that prepares inputs and returns the layer's states, or a joint model's projections."""
    config: Any = loaded.config
    try:
        options = _processor_options(model, loaded, source, max_length)
        if isinstance(cut, JointCut):
            options.pop("model_input_names", None)  # its processor decides about the mask
        language = isinstance(cut, Cut) and cut.language
        with tokenizer_alone(model, options) if language else nullcontext(model) as folder:
            module = transformer_around(loaded, folder, options)
    except (MidlayerError, ImportError):
        raise
    except Exception as reason:  # transformers passes on the errors of its parsers
        raise ModelNotFoundError(
            f"`model` must hold a tokenizer or processor that transformers can read, but {model!r} does not "
            f"({type(reason).__name__}: {reason}). Save the files again with `save_pretrained`, or download them again."
        ) from reason
    if getattr(loaded, "hf_quantizer", None) is not None:  # loaded GGUF weights are plain
        loaded.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    if config.model_type == internals.TIMM and not hasattr(config, "num_features"):
        config.num_features = loaded.timm_model.num_features  # type: ignore[union-attr]  # only timm's files have it
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0  # a masked autoencoder reads every patch
    if isinstance(cut, Cut):
        _read_states(module, cut, model, chat_template)
    if config.model_type in _PADDED_ALWAYS:
        length = getattr(config, "text_config", config).max_position_embeddings
        module.processing_kwargs = {"text": {"padding": "max_length", "max_length": length, "truncation": True}}
    module.input_formatter.supported_modalities = list(module.modality_config)
    if "audio" in module.modality_config and not suffers_from_padding(loaded):
        # Some extractors return no mask by default.
        module.processing_kwargs = {"audio": {"return_attention_mask": True}}
    if module.tokenizer is not None:
        _make_padding_safe(module.tokenizer, model)
        module.tokenizer.model_max_length = min(
            module.tokenizer.model_max_length, most_tokens(loaded) or module.tokenizer.model_max_length
        )
    return module  # type: ignore[no-any-return]


def _processor_options(
    model: str, loaded: nn.Module, source: Mapping[str, Any], max_length: int | None
) -> dict[str, Any]:
    config: Any = loaded.config
    options = {key: value for key, value in source.items() if value is not None}
    medium = _MEDIA.get(str(loaded.main_input_name))
    if medium == "audio":
        # Many audio models have no tokenizer, and transformers requires one unless the config names a processor class.
        from transformers import AutoFeatureExtractor

        config.processor_class = type(AutoFeatureExtractor.from_pretrained(model, **options)).__name__
        options["config"] = config
    elif medium is None and getattr(config, "model_type", "") != "imagegpt":
        if not hasattr(config, "type_vocab_size"):  # GPT-2 would embed the token types
            options["model_input_names"] = ["input_ids", "attention_mask"]
        if max_length is not None:
            options["model_max_length"] = check_length("max_length", max_length, loaded, model)
    return options


def _read_states(module: Any, cut: Cut, model: str, chat_template: bool) -> None:
    """Make the module return the layer's states for the medium of its model."""
    entry = {"method": "forward", "method_output_name": cut.output if isinstance(cut.output, str) else list(cut.output)}
    modalities = [key for key in module.modality_config if chat_template or key != "message"]
    if chat_template and "message" not in modalities:
        raise OptionError(f"`chat_template` must be False for {model}: its tokenizer has no chat template.")
    medium = _MEDIA.get(str(module.model.main_input_name), "text")
    if medium in modalities and not chat_template:
        modalities = [medium]
    module.modality_config = {key: {**module.modality_config[key], **entry} for key in modalities}
    module.module_output_name = "token_embeddings"


def _make_padding_safe(tokenizer: Any, model: str) -> None:
    """Pad on the right, which leaves positions unchanged, with an existing token; it is masked."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise OptionError(
            f"The tokenizer of {model} has no pad token and no substitute for it. "
            "Set one (`tokenizer.pad_token = …`) and save the tokenizer with the model."
        )


def most_tokens(model: nn.Module) -> int | None:
    """Return the number of positions of a model, or ``None`` if it is unlimited.

    RoBERTa-style models (XLM-R, MPNet, Longformer, …) count positions from ``padding_idx + 1``, so the table has more
    rows than positions.
    """
    config: Any = getattr(model, "config", None)
    rows = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    for name, table in model.named_modules():
        padding: Any = getattr(table, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None and len(table.weight) == rows:
            return rows - int(padding) - 1
    return rows


def check_length(argument: str, length: object, model: nn.Module, name: str) -> int:
    """Return a number of tokens, or raise if the model has fewer positions."""
    number = check_count(argument, length, "tokens")
    most = most_tokens(model)
    if most is not None and most < number:
        raise OptionError(f"`{argument}` must be at most {most}, the positions that {name} has, but got {number}.")
    return number
