"""Folders with a tiny model and what reads its inputs, as a user has them on disk."""

from __future__ import annotations

import string
from pathlib import Path

from tests.families import FAMILIES, VOCAB, tiny

TEXTS = [
    "the cat sat on the mat",
    "a cat is sitting on a mat",
    "stock markets fell sharply today",
    "shares dropped on Wall Street",
    "how do I reset my card pin?",
    "short",
]


def tokenizer(pad: bool = True):  # type: ignore[no-untyped-def]
    """Return a tokenizer of single characters without special tokens around a text: 95 characters and 4 tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[EOS]", "[BOS]", *string.printable[:95]]
    assert len(words) == VOCAB
    made = Tokenizer(models.WordLevel({word: position for position, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    names = {"unk_token": "[UNK]", "eos_token": "[EOS]", "bos_token": "[BOS]"} | ({"pad_token": "[PAD]"} if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names)


def save_tiny(name: str, folder: Path, *, pad: bool = True, seed: int = 0) -> str:
    """Write the named family's tiny model and its processor to ``folder``, and return the path."""
    from transformers import ViTImageProcessor

    tiny(name, seed).save_pretrained(folder)  # type: ignore[operator]
    if FAMILIES[name].modality == "image":
        ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    else:
        tokenizer(pad).save_pretrained(folder)
    return str(folder)
