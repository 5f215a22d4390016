"""Texts to token ids without the detour through Python that takes most of a tokenizer's time.

A fast tokenizer of transformers encodes in Rust, with all cores and without Python's lock, and then makes lists and
dictionaries of each text, which the passes of other threads wait for. Here the ids are taken from Rust at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.reading.turns import turn

__all__ = ["TextInputs", "encoded"]


def encoded(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the encodings of texts, each with its ``ids`` and length, ``None`` where the tokenizer is not a fast one.

    Truncation and padding are those of the tokenizer's last call, which it keeps: have the :func:`turn` for both.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    encode = getattr(backend, "encode_batch_fast", None) or getattr(backend, "encode_batch", None)
    return None if encode is None else encode(list(texts))  # type: ignore[no-any-return]


class TextInputs:
    """Makes a model's inputs of batches of texts: what its source makes of them, and sooner.

    The first batch is made both ways; unless all is equal, the source makes all others too.

    Args:
        source: whose inputs they are.
        prompt: put before each text.
    """

    def __init__(self, source: LayerSource, prompt: str) -> None:
        self.source, self.prompt = source, prompt
        self.trusted: bool | None = None
        self._zeros: list[str] = []  # names of what is zero everywhere, as the types of BERT's tokens

    def __call__(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        """Return the inputs of a batch, on the host."""
        if self.trusted is False or not all(isinstance(text, str) and text.strip() for text in inputs):
            return self._plain(inputs)
        if self.trusted is None:
            plain = self._plain(inputs)
            self._zeros = [name for name in plain if name not in ("input_ids", "attention_mask")]
            self.trusted = _equal(plain, self._quick(inputs))
            return plain
        return self._quick(inputs) or self._plain(inputs)

    def _plain(self, inputs: Sequence[Any]) -> dict[str, Tensor]:
        return self.source.host_inputs(inputs, prompt=self.prompt or None)

    def _quick(self, texts: Sequence[str]) -> dict[str, Tensor] | None:
        tokenizer = self.source.tokenizer
        whole = [self.prompt + text for text in texts]
        with turn(tokenizer):
            tokenizer(whole[:1], truncation=True, verbose=False)  # sets how the backend truncates, as it is set now
            found = encoded(tokenizer, whole)
        if found is None:
            return None
        lengths = np.array([len(one) for one in found])
        real = np.arange(lengths.max()) < lengths[:, None]
        if tokenizer.padding_side == "left":
            real = real[:, ::-1]
        ids = np.full(real.shape, tokenizer.pad_token_id, dtype=np.int64)
        ids[real] = np.fromiter(chain.from_iterable(one.ids for one in found), np.int64, int(lengths.sum()))
        made = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}
        return made | {name: torch.zeros_like(made["input_ids"]) for name in self._zeros}


def _equal(plain: dict[str, Tensor], quick: dict[str, Tensor] | None) -> bool:
    return quick is not None and all(
        name in quick and value.dtype == quick[name].dtype and torch.equal(value, quick[name])
        for name, value in plain.items()
    )
