"""Metrics of every layer for any subset of the texts, from one pass over them and their views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from midlayer_encoders import metrics as metric_functions
from midlayer_encoders._types import Layer, Norm
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.metrics import METRICS, PAPER_METRICS, TooFewTextsError, current_name
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

_NOT_COMPARABLE = ("matrix_entropy", "cka", "block_influence", "neighbor_overlap", "half_match")
_TWO_TOKEN_METRICS = ("prompt_entropy", "prompt_effective_rank")  # like their classes, they leave out shorter texts

COMPARABLE = tuple(name for name in METRICS if name not in _NOT_COMPARABLE)
"""Metrics that are defined for one layer and any subset of the texts."""


@dataclass(frozen=True)
class TextMeasurements:
    """One model's layers on N texts.

    Attributes:
        layers: the L layers.
        num_layers: number of blocks of the model.
        text_values: for each token metric the value for each layer and text, ``(L, N)`` float64; NaN for texts that
            are too short.
        vectors: one for each layer and text, ``(L, N, D)`` float32.
        views: one for each layer, view and text, ``(L, V, N, D)`` float32.
    """

    layers: tuple[int, ...]
    num_layers: int
    text_values: dict[str, Tensor]
    vectors: Tensor
    views: Tensor

    def value(self, metric: str, texts: Tensor | None = None) -> Tensor:
        """Return a metric of every layer over all texts, or those at some positions, shape ``(L,)`` float64."""
        positions = texts if texts is not None else torch.arange(self.vectors.shape[1])
        kind = METRICS[metric].kind
        if kind == "tokens":
            return self.text_values[metric][:, positions].nanmean(dim=1)
        function = getattr(metric_functions, metric)
        if kind == "pooled":
            return torch.stack([function(vectors[positions].double()) for vectors in self.vectors])
        views = self.views[:, :, positions].double()
        if metric == "lidar":
            return torch.stack([function(layer_views) for layer_views in views])
        return torch.stack([function(first, second) for first, second in views[:, :2]])


def comparable(metrics: str | Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested metrics, or raise if models cannot be compared by one of them.

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


def measure_texts(
    encoder: LayerEncoder,
    texts: Sequence[str],
    *,
    views: Sequence[Sequence[str]],
    metrics: Sequence[str],
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "none",
    done: Callable[[int], None] | None = None,
) -> TextMeasurements:
    """Return the measurements of a model from one pass over the texts, and one over each view of them.

    Args:
        encoder: with the whole model.
        texts: N texts.
        views: V lists of N texts.
        metrics: names out of :data:`COMPARABLE`.
        layers: ``"all"`` or a list.
        norm: of the vectors; the encoder's pooling and default prompt apply.
        done: called after each batch with the number of texts in it.
    """
    prompt = encoder.default_prompt
    reader = layer_reader(encoder, layers=layers, norm=norm, prompt=prompt)
    rows = {layer: row for row, layer in enumerate(reader.layers)}
    token_metrics = [name for name in metrics if METRICS[name].kind == "tokens"]
    shape = (len(rows), len(texts))
    text_values = {name: torch.full(shape, torch.nan, dtype=torch.float64) for name in token_metrics}

    def measure_tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        for name in token_metrics:
            values = getattr(metric_functions, name)(states, mask).double().cpu()
            if name in _TWO_TOKEN_METRICS:
                values = torch.where(mask.sum(dim=1).cpu() >= 2, values, torch.nan)
            text_values[name][rows[layer], positions] = values

    vectors = []
    for view, view_texts in enumerate((texts, *views)):
        receive = measure_tokens if token_metrics and view == 0 else None
        batches = batches_of(encoder, view_texts, prompt=prompt)
        vectors.append(reader.vectors(view_texts, batches, tokens=receive, done=done))
    for name in token_metrics:
        if bool(text_values[name].isnan().all(dim=1).any()):
            raise TooFewTextsError(
                f"Texts long enough for {name} must be at least 1, but there are 0: give longer texts."
            )
    empty = vectors[0].new_empty(len(rows), 0, *vectors[0].shape[1:])
    stacked_views = torch.stack(vectors[1:], dim=1) if len(vectors) > 1 else empty
    return TextMeasurements(tuple(reader.layers), encoder.num_layers, text_values, vectors[0], stacked_views)
