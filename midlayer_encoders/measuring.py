"""Metrics of every layer over a list of texts: one forward pass for the texts and one for each view of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from midlayer_encoders._types import Layer, Norm, Pooling
from midlayer_encoders.anatomy import resolve_layers
from midlayer_encoders.augment import augment
from midlayer_encoders.augment_media import augment_media
from midlayer_encoders.capture import LayerReader, plan_batches
from midlayer_encoders.errors import OptionError
from midlayer_encoders.inputs import check_taken, medium_of
from midlayer_encoders.media import sound_lengths, suffers_from_padding
from midlayer_encoders.metrics import METRICS, LayerMetric, LiDAR, TooFewTextsError, make_metrics

if TYPE_CHECKING:
    import polars as pl

    from midlayer_encoders.encoder import LayerEncoder

__all__ = [
    "count_tokens",
    "layer_reader",
    "make_for_views",
    "measure",
    "metric_frame",
    "num_passes",
    "num_views",
    "plan",
    "update_metrics",
]

_IMAGES = 32  # images or sounds in a batch, at the most
_HOP = 320  # samples that most models of sound make one state of
_log = logging.getLogger(__name__)

_COUNTED = 1024  # texts tokenised at a time to count them: all at once would be held in memory

Advance = Callable[[int], None]
"""Told how many texts more were passed through the model."""


def measure(
    encoder: LayerEncoder,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "none",
    pooling: Pooling = "mean",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: int = 4096,
    advance: Advance | None = None,
) -> pl.DataFrame:
    """Return the tidy frame of the metrics of every layer.

    Token metrics read the raw states, as the paper's do; the others one vector for each text, of which ``norm`` and
    ``pooling`` say how it is made. Invariance metrics share their views: LiDAR's sixteen passes serve InfoNCE and DiME.

    Args:
        encoder: with the whole model, ``LayerEncoder(model, layer=-1)``, or cut after the last layer of interest.
        texts: what to pass through it: texts, or for a model of images or sound what it takes (``docs/media.md``).
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or some.
        norm: of the pooled vectors; ``"none"`` is the paper's.
        pooling: how token states become one vector.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves,
            V lists of N texts.
        seed: of the views.
        dataset: what the frame calls the texts.
        token_budget: tokens in a batch.
        advance: told after each batch how many texts it held.
    """
    if not texts:
        raise OptionError("`texts` must hold at least one text, but got none.")
    reader = layer_reader(encoder, layers=layers, norm=norm, pooling=pooling)
    made = make_for_views(metrics, reader.layers, views if isinstance(views, int) else len(views))
    wanted = num_views(made)
    passes = _passes(encoder, texts, wanted, seed) if isinstance(views, int) else (texts, *views[:wanted])
    for view, passed in enumerate(passes, start=-1):
        batches = plan(encoder, passed, token_budget=token_budget)
        for positions in update_metrics(reader, made, passed, batches, view=view):
            if advance is not None:
                advance(len(positions))
    return metric_frame(encoder, made, dataset=dataset, named=not isinstance(metrics, str) or metrics in METRICS)


def num_passes(metrics: str | Sequence[str], *, views: int = 16) -> int:
    """Return how many forward passes over the texts these metrics take, with so many views for LiDAR.

    Example:
        >>> num_passes("paper"), num_passes(["infonce"]), num_passes("curvature")
        (17, 3, 1)
    """
    return 1 + num_views(make_for_views(metrics, [0], views))


def make_for_views(metrics: str | Sequence[str], layers: Sequence[int], views: int) -> dict[str, LayerMetric]:
    """Return the metrics, where LiDAR takes so many views of each text."""
    made = make_metrics(metrics, layers)
    return {name: LiDAR(layers, views=views) if isinstance(metric, LiDAR) else metric for name, metric in made.items()}


def num_views(metrics: dict[str, LayerMetric]) -> int:
    """Return how many views of each text these metrics want, ``0`` where none does."""
    return max((int(getattr(metric, "views", 0)) for metric in metrics.values() if metric.kind == "views"), default=0)


def _passes(encoder: LayerEncoder, texts: Sequence[Any], views: int, seed: int) -> Iterator[Sequence[Any]]:
    """Yield the texts, images or sounds, then each view of them."""
    yield texts
    if not views:
        return
    medium = medium_of(texts[0], encoder.media)
    if medium == "text":
        yield from augment(texts, views=views, seed=seed)
    else:
        yield from augment_media(texts, medium, views=views, seed=seed, max_pixels=encoder.max_pixels)


def layer_reader(
    encoder: LayerEncoder,
    *,
    layers: Sequence[Layer] | str,
    norm: Norm = "final",
    pooling: Pooling = "mean",
    prompt: str = "",
) -> LayerReader:
    """Return what reads the layers of an encoder's model, of texts after ``prompt``, from one pass a batch."""
    model: Any = encoder[0].model
    if len(encoder) > 2:
        raise OptionError(
            f"`encoder` must be a model and its pooling to read its layers, but {type(encoder[-1]).__name__} follows "
            "them, which is made for one layer. Make it without `centre`."
        )
    anatomy = encoder.anatomy
    # Not all blocks that are kept: raw states need one more, and after the last layer it is not one of the model's.
    wanted = resolve_layers(layers, encoder.layer, name=encoder.name)

    def preprocess(inputs: list[Any]) -> dict[str, Tensor]:
        return encoder.model_inputs(inputs, prompt=prompt or None)

    encoder.eval()
    return LayerReader(model, preprocess, anatomy, wanted, norm, pooling)


def count_tokens(encoder: LayerEncoder, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text, after it is cut off at the encoder's longest."""
    counts: list[int] = []
    for start in range(0, len(texts), _COUNTED):
        some = list(texts[start : start + _COUNTED])
        counted = encoder.tokenizer(some, truncation=True, max_length=encoder.max_seq_length, verbose=False)
        counts += [len(ids) for ids in counted["input_ids"]]
    return counts


def plan(encoder: LayerEncoder, texts: Sequence[Any], *, token_budget: int = 4096, prompt: str = "") -> list[list[int]]:
    """Return batches over the whole list; images count as one token each, sounds as the states that are made of them.

    Where padding would change a sound's states, a batch holds sounds of one length.
    """
    medium = medium_of(texts[0], encoder.media) if texts else "image"
    if texts:
        check_taken(medium, encoder.media, texts[0], model=encoder.name)
    if medium == "text":
        return plan_batches(count_tokens(encoder, [prompt + text for text in texts]), token_budget=token_budget)
    if medium == "image":
        return plan_batches([1] * len(texts), token_budget=token_budget, max_texts=_IMAGES)
    lengths = sound_lengths(texts, encoder.sampling_rate)
    batches = plan_batches([-(-length // _HOP) for length in lengths], token_budget=token_budget, max_texts=_IMAGES)
    model: Any = encoder[0].model
    if not suffers_from_padding(model):
        return batches
    return [
        [position for position in batch if lengths[position] == length]
        for batch in batches
        for length in sorted({lengths[position] for position in batch}, reverse=True)
    ]


def update_metrics(
    reader: LayerReader,
    metrics: dict[str, LayerMetric],
    texts: Sequence[Any],
    batches: Sequence[Sequence[int]],
    *,
    view: int = -1,
) -> Iterator[list[int]]:
    """Pass the texts through the model once and update what wants them; yield the positions of each batch.

    Args:
        reader: reads the layers.
        metrics: by name; updated in place.
        texts: the whole list, or one view of it.
        batches: positions in it.
        view: number of the view from ``0``; ``-1`` for the texts themselves.
    """
    of_tokens = [metric for metric in metrics.values() if metric.kind == "tokens"] if view < 0 else []
    of_vectors = [metric for metric in metrics.values() if metric.kind == ("pooled" if view < 0 else "views")]

    def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        for metric in of_tokens:
            metric.update(layer, states, mask, index=torch.tensor(positions))

    for positions, vectors in reader.embed(texts, batches, tokens=tokens if of_tokens else None):
        index = torch.tensor(positions)
        extra = {"index": index} if view < 0 else {"index": index, "view": view}
        for layer, rows in zip(reader.layers, vectors, strict=True):
            for metric in of_vectors:
                metric.update(layer, rows, **extra)
        yield positions


def metric_frame(
    encoder: LayerEncoder, metrics: dict[str, LayerMetric], *, dataset: str, named: bool = True
) -> pl.DataFrame:
    """Return the tidy frame of computed metrics; what a first layer cannot have (a change to it) is left out.

    Args:
        encoder: names the model.
        metrics: by name.
        dataset: what the frame calls the texts.
        named: whether each metric was asked for by its name. Of a group, those that want more texts are left out, and
            said in the log.
    """
    import polars as pl

    spec = encoder.spec
    rows = [
        {
            "model": spec.model,
            "revision": spec.revision or "default",
            "layer": layer,
            "depth": layer / spec.num_layers,
            "kind": "metric",
            "dataset": dataset,
            "name": name,
            "value": value,
        }
        for name, values in _computed(metrics, named).items()
        for layer, value in zip(metrics[name].layers, values, strict=True)
        if value == value  # NaN: the first layer of a comparison with the one before
    ]
    return pl.DataFrame(rows)


def _computed(metrics: dict[str, LayerMetric], named: bool) -> dict[str, list[float]]:
    """Return the values of each metric."""
    found: dict[str, list[float]] = {}
    lacking: dict[str, TooFewTextsError] = {}
    for name, metric in metrics.items():
        try:
            found[name] = metric.compute().tolist()
        except TooFewTextsError as error:
            lacking[name] = error
    if lacking and (named or not found):
        raise next(iter(lacking.values()))
    for name, reason in lacking.items():
        _log.warning("%s is left out. %s", name, reason)
    return found
