"""Texts to token ids without the detour through Python that takes most of a tokenizer's time.

A fast tokenizer of transformers encodes in Rust, with all cores and without Python's lock, and then makes lists and
dictionaries of each text, which the passes of other threads wait for. Here the ids are taken from Rust at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders.reading.turns import turn


def encoded(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the encodings of texts, each with its ``ids`` and length, ``None`` where the tokenizer is not a fast one.

    Truncation and padding are those of the tokenizer's last call, which it keeps: have the :func:`turn` for both.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    encode = getattr(backend, "encode_batch_fast", None) or getattr(backend, "encode_batch", None)
    return None if encode is None else encode(list(texts))


class TextInputs:
    """Makes the inputs of batches of texts: those that are made of them otherwise, and sooner.

    The first batch is made both ways; unless all is equal, the others are made the plain way too. Whatever is no text,
    or blank, is left to the plain way always, and so is the first text that may be truncated, which is warned there.

    Args:
        tokenizer: of the texts.
        plain: makes the inputs of a batch; its way must stay the same from batch to batch.
        prompt: that ``plain`` puts before each text.
    """

    def __init__(self, tokenizer: Any, plain: Callable[[list[Any]], dict[str, Any]], prompt: str = "") -> None:
        self.tokenizer, self.plain, self.prompt = tokenizer, plain, prompt
        self.trusted: bool | None = None
        self._alike: dict[str, Any] = {}  # what is the same in every batch; zeros where the types of BERT's tokens are
        self._truncated = False

    def __call__(self, inputs: list[Any]) -> dict[str, Any]:
        """Return the inputs of a batch, on the host."""
        if self.trusted is False or not all(isinstance(text, str) and text.strip() for text in inputs):
            return self.plain(inputs)
        if self.trusted is None:
            plain = self.plain(inputs)
            self._alike = {key: value for key, value in plain.items() if key not in ("input_ids", "attention_mask")}
            self.trusted = _equal(plain, self._quick(inputs, plain))
            return plain
        made = self._quick(inputs, {})
        return self.plain(inputs) if made is None else made

    def _quick(self, texts: Sequence[str], plain: dict[str, Any]) -> dict[str, Any] | None:
        tokenizer = self.tokenizer
        whole = [self.prompt + text for text in texts]
        if not hasattr(tokenizer, "backend_tokenizer"):
            return None
        with turn(tokenizer):
            tokenizer(whole[:1], truncation=True, verbose=False)  # sets how the backend truncates, as it is set now
            found = encoded(tokenizer, whole)
        if found is None:
            return None
        lengths = np.array([len(one) for one in found])
        if not plain and not self._truncated and lengths.max() >= tokenizer.model_max_length:
            self._truncated = True
            return None
        real = np.arange(lengths.max()) < lengths[:, None]
        if tokenizer.padding_side == "left":
            real = real[:, ::-1]
        ids = np.full(real.shape, tokenizer.pad_token_id, dtype=np.int64)
        ids[real] = np.fromiter(chain.from_iterable(one.ids for one in found), np.int64, int(lengths.sum()))
        if not plain and ids.max() >= tokenizer.vocab_size:  # an added token: has it an embedding? The plain way asks
            return None
        made = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}
        return made | {
            name: torch.zeros_like(made["input_ids"]) if isinstance(value, Tensor) else value
            for name, value in self._alike.items()
        }


def _equal(plain: dict[str, Any], quick: dict[str, Any] | None) -> bool:
    """Return whether all that the plain way made was made, in the same types and order."""
    return quick is not None and all(
        value.dtype == quick[name].dtype and torch.equal(value, quick[name])
        if isinstance(value, Tensor) and isinstance(quick.get(name), Tensor)
        else name in quick and quick[name] is value
        for name, value in plain.items()
    )
