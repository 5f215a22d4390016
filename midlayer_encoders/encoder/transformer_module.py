"""sentence-transformers' own module around a model that is cut already: it prepares inputs, and reads the layer."""

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

__all__ = ["checked_length", "most_tokens", "transformer_module"]

# The medium of models whose processor may prepare others too, by what their forward takes first.
_MEDIA = {"pixel_values": "image", "input_values": "audio", "input_features": "audio"}
# Towers of text that want every text padded to the longest: SigLIP reads its last position, and was trained so; AIMv2's
# attention is causal only where something is padded (transformers 5.17 to 5.22).
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
    """Return the module that prepares inputs and reads the layer's states, or of a joint model what its heads make."""
    config: Any = loaded.config
    alone = isinstance(cut, Cut) and cut.language
    try:
        options = _processor_options(model, loaded, source, max_length)
        if isinstance(cut, JointCut):
            options.pop("model_input_names", None)  # its processor knows whether its model wants a mask
        with tokenizer_alone(model, options) if alone else nullcontext(model) as folder:
            module = transformer_around(loaded, folder, options)
    except (MidlayerError, ImportError):
        raise
    except Exception as reason:  # transformers raises whatever its parsers do
        raise ModelNotFoundError(
            f"`model` must hold a tokenizer or processor that transformers can read, but {model!r} does not "
            f"({type(reason).__name__}: {reason}). Its files may be missing or damaged: save them again beside the "
            "model, with `save_pretrained`, or download them again."
        ) from reason
    if getattr(loaded, "hf_quantizer", None) is not None:  # GGUF weights are plain ones once they are read
        loaded.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    if config.model_type == internals.TIMM and not hasattr(config, "num_features"):
        config.num_features = loaded.timm_model.num_features  # type: ignore[union-attr]  # timm's own files have it
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0  # a masked autoencoder shows its encoder every patch
    if isinstance(cut, Cut):
        _read_states(module, cut, model, chat_template)
    if config.model_type in _PADDED_ALWAYS:
        length = getattr(config, "text_config", config).max_position_embeddings
        module.processing_kwargs = {"text": {"padding": "max_length", "max_length": length, "truncation": True}}
    module.input_formatter.supported_modalities = list(module.modality_config)
    if "audio" in module.modality_config and not suffers_from_padding(loaded):
        # Some extractors hand out no mask unless they are asked.
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
        # Many audio models have no tokenizer, and transformers looks for one unless the config names the class to make.
        from transformers import AutoFeatureExtractor

        config.processor_class = type(AutoFeatureExtractor.from_pretrained(model, **options)).__name__
        options["config"] = config
    elif medium is None and getattr(config, "model_type", "") != "imagegpt":
        if not hasattr(config, "type_vocab_size"):  # GPT2 would embed the token types
            options["model_input_names"] = ["input_ids", "attention_mask"]
        if max_length is not None:
            options["model_max_length"] = checked_length("max_length", max_length, loaded, model)
    return options


def _read_states(module: Any, cut: Cut, model: str, chat_template: bool) -> None:
    """Have the module hand on the layer's states, for the one medium of its model."""
    entry = {"method": "forward", "method_output_name": cut.output if isinstance(cut.output, str) else list(cut.output)}
    wanted = [key for key in module.modality_config if chat_template or key != "message"]
    if chat_template and "message" not in wanted:
        raise OptionError(f"`chat_template` must be False for {model}: its tokenizer has no chat template.")
    medium = _MEDIA.get(str(module.model.main_input_name), "text")
    if medium in wanted and not chat_template:
        wanted = [medium]
    module.modality_config = {key: {**module.modality_config[key], **entry} for key in wanted}
    module.module_output_name = "token_embeddings"


def _make_padding_safe(tokenizer: Any, model: str) -> None:
    """Pad on the right, where positions are those of the text alone, with a token that exists; it is masked."""
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or tokenizer.bos_token
    if tokenizer.pad_token is None:
        raise OptionError(
            f"The tokenizer of {model} has no pad token and none that could stand in for it. "
            "Set one (`tokenizer.pad_token = …`), save the tokenizer beside the model, and try again."
        )


def most_tokens(model: nn.Module) -> int | None:
    """Return how many tokens a model has positions for; ``None`` where none are counted.

    RoBERTa and its kind (XLM-R, MPNet, Longformer, …) number positions from after that of the padding on, so their
    table has room for fewer tokens than it has rows; its ``padding_idx`` tells.
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


def checked_length(argument: str, length: object, model: nn.Module, name: str) -> int:
    """Return a number of tokens that a model has positions for."""
    number, most = check_count(argument, length, "tokens"), most_tokens(model)
    if most is not None and most < number:
        raise OptionError(f"`{argument}` must be at most {most}, the positions that {name} has, but got {number}.")
    return number
