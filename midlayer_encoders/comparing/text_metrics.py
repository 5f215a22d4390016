"""What is kept of one model to compare it with another: a number for each text, or vectors, of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from midlayer_encoders._types import Layer, Norm
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.metrics import (
    METRICS,
    PAPER_METRICS,
    TooFewTextsError,
    alpha_req,
    anisotropy,
    current_name,
    curvature,
    dataset_entropy,
    dime,
    effective_rank,
    first_token_share,
    infonce,
    intrinsic_dimension,
    lidar,
    logdet_entropy,
    prompt_effective_rank,
    prompt_entropy,
)
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["COMPARABLE", "Kept", "comparable", "keep"]

PerText: TypeAlias = Callable[[Tensor, Tensor], Tensor]

_OF_TOKENS: dict[str, PerText] = {
    "prompt_entropy": prompt_entropy,
    "curvature": curvature,
    "prompt_effective_rank": prompt_effective_rank,
    "first_token_share": first_token_share,
}
_TWO_TOKENS = ("prompt_entropy", "prompt_effective_rank")  # shorter texts are left out, as their classes do
_OF_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dataset_entropy": dataset_entropy,
    "effective_rank": effective_rank,
    "anisotropy": anisotropy,
    "intrinsic_dimension": intrinsic_dimension,
    "alpha_req": alpha_req,
    "logdet_entropy": logdet_entropy,
}
_OF_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "infonce": lambda views: infonce(views[0], views[1]),
    "lidar": lidar,
    "dime": lambda views: dime(views[0], views[1]),
}

COMPARABLE = tuple(name for name in METRICS if name in {*_OF_TOKENS, *_OF_ROWS, *_OF_VIEWS})
"""Metrics of one layer that some of the texts have, too; the others compare layers, or pool the tokens of all texts."""


@dataclass(frozen=True)
class Kept:
    """One model's layers on N texts.

    Attributes:
        layers: L of them.
        num_layers: number of blocks.
        numbers: of each token metric a number for each layer and text, ``(L, N)`` float64; NaN where a text is too
            short to have one.
        vectors: one for each layer and text, ``(L, N, D)`` float32.
        views: one for each layer, view and text, ``(L, V, N, D)`` float32.
    """

    layers: tuple[int, ...]
    num_layers: int
    numbers: dict[str, Tensor]
    vectors: Tensor
    views: Tensor

    def value(self, metric: str, texts: Tensor | None = None) -> Tensor:
        """Return a metric of every layer over all texts, or those at some positions, shape ``(L,)`` float64."""
        some = texts if texts is not None else torch.arange(self.vectors.shape[1])
        if metric in _OF_TOKENS:
            return self.numbers[metric][:, some].nanmean(dim=1)
        if metric in _OF_ROWS:
            return torch.stack([_OF_ROWS[metric](rows[some].double()) for rows in self.vectors])
        return torch.stack([_OF_VIEWS[metric](rows[:, some].double()) for rows in self.views])


def comparable(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of metrics that models can be compared by.

    Example:
        >>> comparable("paper")
        ('prompt_entropy', 'dataset_entropy', 'effective_rank', 'curvature', 'infonce', 'lidar', 'dime')
    """
    groups = {"all": COMPARABLE, "paper": PAPER_METRICS}
    if isinstance(metrics, str):
        metrics = current_name(metrics)
        check_choice("metrics", metrics, [*groups, *COMPARABLE])
        return groups.get(metrics, (metrics,))
    if not isinstance(metrics, list | tuple) or not metrics:
        got = "none" if isinstance(metrics, list | tuple) else f"{short_repr(metrics)}. Write a list of names"
        raise OptionError(f"`metrics` must be 'all', 'paper', or some of {', '.join(COMPARABLE)}, but got {got}.")
    names = [current_name(name) if isinstance(name, str) else name for name in metrics]
    for name in names:
        check_choice("metrics", name, COMPARABLE)
    return tuple(dict.fromkeys(names))


def keep(
    encoder: LayerEncoder,
    texts: Sequence[str],
    *,
    views: Sequence[Sequence[str]],
    metrics: Sequence[str],
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "none",
    done: Callable[[int], None] | None = None,
) -> Kept:
    """Return what is kept of a model: one pass over the texts, and one over each view of them.

    Args:
        encoder: with the whole model.
        texts: N texts.
        views: V lists of N texts.
        metrics: names out of :data:`COMPARABLE`.
        layers: ``"all"`` or some.
        norm: of the vectors, which are pooled, after its default prompt, as the encoder does it.
        done: called after each batch with the number of texts in it.
    """
    prompt = encoder.default_prompt
    reader = layer_reader(encoder, layers=layers, norm=norm, prompt=prompt)
    rows = {layer: row for row, layer in enumerate(reader.layers)}
    wanted = [name for name in metrics if name in _OF_TOKENS]
    numbers = {name: torch.full((len(rows), len(texts)), torch.nan, dtype=torch.float64) for name in wanted}

    def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        for name in wanted:
            found = _OF_TOKENS[name](states, mask).double().cpu()
            if name in _TWO_TOKENS:
                found = torch.where(mask.sum(dim=1).cpu() >= 2, found, torch.nan)
            numbers[name][rows[layer], positions] = found

    passes = []
    for view, passed in enumerate((texts, *views)):
        of_tokens = tokens if wanted and view == 0 else None
        batches = batches_of(encoder, passed, prompt=prompt)
        passes.append(reader.vectors(passed, batches, tokens=of_tokens, done=done))
    for name in wanted:
        if bool(numbers[name].isnan().all(dim=1).any()):
            raise TooFewTextsError(
                f"Texts long enough for {name} must be at least 1, but there are 0: give longer texts."
            )
    empty = passes[0].new_empty(len(rows), 0, *passes[0].shape[1:])
    stacked = torch.stack(passes[1:], dim=1) if len(passes) > 1 else empty
    return Kept(tuple(reader.layers), encoder.num_layers, numbers, passes[0], stacked)
