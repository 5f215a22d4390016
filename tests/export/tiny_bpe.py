"""Tiny models like Llama with a byte-level BPE tokenizer, as folders of safetensors."""

from pathlib import Path
from typing import Any

import torch

from midlayer_encoders.extras.export.llama_cpp import LLAMA_3_PATTERN
from tests.support.tiny_folders import TEXTS

DEPTH = 4
SPLITS = ("gpt-2", "smollm", "llama-bpe", "qwen2")


def bpe_tokenizer(split: str = "gpt-2", *, around: str = "$A", bos: str | None = "<s>") -> Any:
    """Return a tokenizer of 300 tokens, two of them special, that splits texts by the named rule of llama.cpp."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split in ("gpt-2", "smollm"))
    first = {
        "smollm": lambda: pre_tokenizers.Digits(individual_digits=True),
        "llama-bpe": lambda: pre_tokenizers.Split(Regex(LLAMA_3_PATTERN), "isolated"),
        "qwen2": lambda: pre_tokenizers.Split(Regex(LLAMA_3_PATTERN.replace("{1,3}", "")), "isolated"),
        "spaces": lambda: pre_tokenizers.Split(" ", "isolated"),
    }
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.Sequence([first[split](), byte_level]) if split in first else byte_level
    texts = [*TEXTS, "It's 1999 and 2026, and 1234567 don't add up."]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    result.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    result.post_processor = processors.TemplateProcessing(single=around, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=result, model_max_length=128, bos_token=bos, eos_token="</s>", pad_token="</s>"
    )


def save_bpe(folder: Path, name: str = "Llama", tokenizer: Any = None, **options: Any) -> str:
    """Write a tiny model of the named family with large enough weights for its layers to differ, and return the path."""
    import transformers as tf

    sizes = {"vocab_size": 304, "hidden_size": 64, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 128, "head_dim": 16}
    sizes |= {"sliding_window": None} if name == "Mistral" else {}
    torch.manual_seed(0)
    model = getattr(tf, f"{name}Model")(getattr(tf, f"{name}Config")(**(sizes | {"initializer_range": 0.2} | options)))
    with torch.no_grad():
        for weight in model.parameters():  # norms and biases are not all ones and zeros
            if weight.ndim == 1:
                weight += 0.3 * torch.randn(weight.shape)
    model.save_pretrained(folder)
    (tokenizer or bpe_tokenizer()).save_pretrained(folder)
    return str(folder)
