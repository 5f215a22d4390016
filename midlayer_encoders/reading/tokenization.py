"""Tokenize texts without the Python overhead of transformers' fast tokenizers.

A fast tokenizer encodes in Rust, without the GIL, and then builds Python lists and dictionaries for each text, which
block other threads. Here the ids are taken from the Rust encodings directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders.reading.locks import turn


def backend_encodings(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the Rust encodings of texts, or None if the tokenizer is not a fast one.

    Truncation and padding are those of the tokenizer's last call, so hold its lock (:func:`turn`) over both calls.
    """
    encode = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
    return None if encode is None else encode(list(texts))


class TextInputs:
    """Computes the same inputs as a plain preprocessing function, faster.

    The first batch is computed both ways; if the results differ, all batches use the plain function. Blank texts,
    other media and the first batch with a truncated text, which causes a warning, always use it.

    Args:
        tokenizer: the tokenizer.
        plain: returns the inputs of a batch; must not change between batches.
        prompt: prompt that ``plain`` prepends to each text.
    """

    def __init__(self, tokenizer: Any, plain: Callable[[list[Any]], dict[str, Any]], prompt: str = "") -> None:
        self.tokenizer = tokenizer
        self.plain = plain
        self.prompt = prompt
        self.trusted: bool | None = None
        self._other_inputs: dict[str, Any] = {}  # the same in all batches, such as zeros for BERT's token types
        self._has_warned = False

    def __call__(self, inputs: list[Any]) -> dict[str, Any]:
        """Return the inputs of a batch on the CPU."""
        if self.trusted is False or not all(isinstance(text, str) and text.strip() for text in inputs):
            return self.plain(inputs)
        if self.trusted is None:
            plain = self.plain(inputs)
            self._other_inputs = {
                name: value for name, value in plain.items() if name not in ("input_ids", "attention_mask")
            }
            self.trusted = _equal(plain, self._quick(inputs, plain))
            return plain
        features = self._quick(inputs, {})
        return self.plain(inputs) if features is None else features

    def _quick(self, texts: Sequence[str], plain: dict[str, Any]) -> dict[str, Any] | None:
        tokenizer = self.tokenizer
        prompted = [self.prompt + text for text in texts]
        with turn(tokenizer):
            tokenizer(prompted[:1], truncation=True, verbose=False)  # sets the truncation of the backend
            encodings = backend_encodings(tokenizer, prompted)
        if encodings is None:
            return None
        lengths = np.array([len(encoding) for encoding in encodings])
        if not plain and not self._has_warned and lengths.max() >= tokenizer.model_max_length:
            self._has_warned = True
            return None
        real = np.arange(lengths.max()) < lengths[:, None]
        if tokenizer.padding_side == "left":
            real = real[:, ::-1]
        ids = np.full(real.shape, tokenizer.pad_token_id, dtype=np.int64)
        ids[real] = np.concatenate([encoding.ids for encoding in encodings])
        if not plain and ids.max() >= tokenizer.vocab_size:  # the plain function verifies added tokens
            return None
        features = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}
        return features | {
            name: torch.zeros_like(features["input_ids"]) if isinstance(value, Tensor) else value
            for name, value in self._other_inputs.items()
        }


def _equal(plain: dict[str, Any], quick: dict[str, Any] | None) -> bool:
    """Return True if all plain inputs are present with equal types and values."""
    return quick is not None and all(
        value.dtype == quick[name].dtype and torch.equal(value, quick[name])
        if isinstance(value, Tensor) and isinstance(quick.get(name), Tensor)
        else name in quick and quick[name] is value
        for name, value in plain.items()
    )
