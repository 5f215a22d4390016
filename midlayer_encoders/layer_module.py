"""sentence-transformers' own module around a model that is cut already: it tokenises, and reads the layer's states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from midlayer_encoders.cut import Cut
from midlayer_encoders.errors import OptionError

__all__ = ["layer_module"]


class _Prepared(Transformer):
    """sentence-transformers' own module around a model that is loaded already; it becomes a plain one when made."""

    prepared: Any

    def _load_config(self, *_: Any, **__: Any) -> tuple[Any, bool]:
        return self.prepared.config, False

    def _load_model(self, *_: Any, **__: Any) -> Any:
        return self.prepared


def layer_module(
    model: str, loaded: nn.Module, cut: Cut, source: Mapping[str, Any], max_length: int | None, chat_template: bool
) -> Transformer:
    """Return the module that tokenises and reads the layer's states."""
    kind = type("Prepared", (_Prepared,), {"prepared": loaded})
    processor = {key: value for key, value in source.items() if value is not None}
    config: Any = loaded.config
    if not hasattr(config, "type_vocab_size"):  # GPT2 would embed the token types
        processor["model_input_names"] = ["input_ids", "attention_mask"]
    if max_length is not None:
        processor["model_max_length"] = _checked_length(max_length, config, model)
    module: Any = kind(model, processor_kwargs=processor)
    module.__class__ = Transformer
    if getattr(loaded, "hf_quantizer", None) is not None:  # GGUF weights are plain ones once they are read
        loaded.hf_quantizer = None  # type: ignore[assignment]
        if hasattr(config, "quantization_config"):
            del config.quantization_config
    entry = {"method": "forward", "method_output_name": cut.output if isinstance(cut.output, str) else list(cut.output)}
    wanted = [key for key in module.modality_config if chat_template or key != "message"]
    if chat_template and "message" not in wanted:
        raise OptionError(f"`chat_template` must be False for {model}: its tokenizer has no chat template.")
    if "text" in wanted and not chat_template:
        wanted = ["text"]
    module.modality_config = {key: {**module.modality_config[key], **entry} for key in wanted}
    module.module_output_name = "token_embeddings"
    module.input_formatter.supported_modalities = list(module.modality_config)
    if module.tokenizer is not None:
        _make_padding_safe(module.tokenizer, model)
    return module  # type: ignore[no-any-return]


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


def _checked_length(max_length: int, config: Any, model: str) -> int:
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < max_length:
        raise OptionError(
            f"`max_length` must be at most {longest}, the positions that {model} has, but got {max_length}."
        )
    return max_length
