"""Code shared by the experiments on token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import tidy_frame, tidy_rows
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.reader import LayerReader, layer_reader

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


MIN_BLOCKS = 3
MIN_TOKENS = 3

TextFunction = Callable[[Tensor, Tensor], Tensor]
"""Maps states ``(B, T, D)`` and their mask ``(B, T)`` to one number per text, ``(B,)``."""


def check_experiment(encoder: LayerEncoder, texts: Sequence[str], *, least: int = 2) -> None:
    """Raise an :class:`OptionError` if the model has too few blocks or there are too few texts."""
    if encoder.layer < MIN_BLOCKS:
        raise OptionError(
            f"`encoder` must hold {MIN_BLOCKS} blocks or more for a curve over depth, but got {encoder.layer}. "
            "Pass the whole model: LayerEncoder(model, layer=-1)."
        )
    if len(texts) < least:
        raise OptionError(f"`texts` must hold {least} texts or more, but got {len(texts)}.")


def tokenized(encoder: LayerEncoder, texts: Sequence[str], *, max_length: int = 128) -> list[list[int]]:
    """Return the token ids of each text, truncated to ``max_length``; raise an error if a text is too short."""
    if max_length < MIN_TOKENS:
        raise OptionError(f"`max_length` must be {MIN_TOKENS} tokens or more, but got {max_length}.")
    longest = min(max_length, encoder.max_seq_length or max_length)
    with turn(encoder.tokenizer):
        encodings = encoder.tokenizer(list(texts), truncation=True, max_length=longest, verbose=False)
    ids: list[list[int]] = [list(map(int, text_ids)) for text_ids in encodings["input_ids"]]
    short = next((position for position, text_ids in enumerate(ids) if len(text_ids) < MIN_TOKENS), None)
    if short is not None:
        raise OptionError(
            f"`texts` must have {MIN_TOKENS} tokens or more each, but text {short} ({texts[short][:40]!r}) has "
            f"{len(ids[short])}. Leave it out."
        )
    return ids


def ids_reader(encoder: LayerEncoder, *, layers: Sequence[Layer] | str = "all") -> LayerReader:
    """Return a reader of raw layers that takes lists of token ids and pads them on the right."""
    pad = encoder.tokenizer.pad_token_id or 0

    def padded(batch: list[Any]) -> dict[str, Tensor]:
        longest = max(map(len, batch))
        ids = torch.tensor(
            [[*text_ids, *[pad] * (longest - len(text_ids))] for text_ids in batch], device=encoder.device
        )
        if all(len(text_ids) == longest for text_ids in batch):
            return {"input_ids": ids}  # attention without a mask is faster
        lengths = torch.tensor([len(text_ids) for text_ids in batch], device=encoder.device)
        return {
            "input_ids": ids,
            "attention_mask": (torch.arange(longest, device=ids.device) < lengths[:, None]).long(),
        }

    return replace(layer_reader(encoder, layers=layers, norm="none"), preprocess=padded)


def text_values(
    reader: LayerReader,
    ids: Sequence[Sequence[int]],
    function: TextFunction,
    *,
    token_budget: int = 4096,
) -> Tensor:
    """Return one number per layer and text, shape ``(L, N)`` float64, from one pass."""
    values = torch.full((len(reader.layers), len(ids)), torch.nan, dtype=torch.float64)
    rows = {layer: row for row, layer in enumerate(reader.layers)}

    def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        values[rows[layer], positions] = function(states, mask).double().cpu()

    for _ in reader.embed(
        ids, plan_batches([len(text_ids) for text_ids in ids], token_budget=token_budget), tokens=tokens
    ):
        pass
    return values


def experiment_frame(
    encoder: LayerEncoder, rows: Iterable[Mapping[str, Any]], *, dataset: str, extra: Mapping[str, Any]
) -> pl.DataFrame:
    """Return the tidy frame of rows with ``layer``, ``name``, ``value`` and the columns in ``extra``."""
    spec = encoder.spec
    return tidy_frame(
        (
            tidy
            for row in rows
            for tidy in tidy_rows(
                {row["layer"]: row["value"]}, spec, kind="metric", dataset=dataset, name=row["name"],
                extra={column: row[column] for column in extra},
            )
        ),
        extra=extra,
    )  # fmt: skip
