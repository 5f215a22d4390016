"""Metrics of every layer over a list of texts: one forward pass for the texts and one for each view of them."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from midlayer_encoders._types import Layer, Norm, Pooling, Progress, ReadSite, Stage
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.frame import at_site, tidy_frame, tidy_rows
from midlayer_encoders.media import medium_of
from midlayer_encoders.metrics import LayerMetric, LiDAR, TooFewTextsError, make_metrics
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import TokenReceive, layer_reader
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.validation import check_count, check_list, check_progress, check_seed, check_text
from midlayer_encoders.views.media_views import augment_media
from midlayer_encoders.views.text_views import augment

if TYPE_CHECKING:
    import polars as pl

__all__ = [
    "agreed",
    "compute_metrics",
    "make_for_views",
    "measure",
    "measure_layers",
    "num_passes",
    "num_views",
    "token_receiver",
    "update_metrics",
    "update_views",
]

_log = logging.getLogger(__name__)

_T = TypeVar("_T")


def measure(
    encoder: LayerSource,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    norm: Norm | None = None,
    pooling: Pooling | None = None,
    site: ReadSite = "block",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Return the tidy frame of the metrics of every layer, read as the encoder reads it.

    Token metrics read the raw states; the others one vector for each text, made with the encoder's own norm, pooling
    and default prompt. The paper's metrics read raw states throughout: ``LayerEncoder(model, -1, norm="none")``.
    Invariance metrics share their views: LiDAR's sixteen passes serve InfoNCE and DiME.

    Args:
        encoder: with the whole model, ``LayerEncoder(model, layer=-1)``, or cut after the last layer of interest.
        texts: what to pass through it: texts, or for a model of images or audio what it takes (``docs/media.md``).
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or some.
        norm: the encoder's; another is an error.
        pooling: likewise.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up. The frame's
            revision names it, as ``"default:mlp"``.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves,
            V lists of N texts.
        seed: of the views.
        dataset: what the frame calls the texts.
        token_budget: tokens in a batch.
        progress: called after each batch, with the stage ``"measuring"``.
    """
    if not hasattr(encoder, "anatomy"):
        raise OptionError(
            f"`encoder` must be a LayerEncoder, but got {short_repr(encoder)}. Write LayerEncoder(model, layer=-1)."
        )
    agreed("norm", norm, encoder.norm)
    agreed("pooling", pooling, encoder.pooling)
    return measure_layers(
        encoder, texts, metrics=metrics, layers=layers, norm=encoder.norm, site=site, views=views, seed=seed,
        dataset=dataset, token_budget=token_budget, progress=progress,
    )  # fmt: skip


def agreed(argument: str, value: _T | None, own: _T) -> _T:
    """Return the encoder's own setting, or raise where another was asked for beside it."""
    if value is not None and not (type(value) is type(own) and value == own):
        raise OptionError(
            f"`{argument}` must be the encoder's, {own!r}, but got {short_repr(value)}. "
            f"Leave it out, or make the encoder with {argument}={short_repr(value)}."
        )
    return own


def measure_layers(
    source: LayerSource,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "none",
    site: ReadSite = "block",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> pl.DataFrame:
    """Return the tidy frame of :func:`measure`, with the norm of the vectors named instead of taken from the encoder.

    Sweeps and selection read raw states here, as the paper's metrics do, while they score normed ones.
    """
    texts, seed = check_list("texts", texts), check_seed(seed)
    views = _checked_views(views, len(texts))
    check_count("token_budget", token_budget, "tokens")
    check_text("dataset", dataset)
    check_progress(progress)
    prompt = source.default_prompt if medium_of(texts[0], source.media) == "text" else ""
    reader = layer_reader(source, layers=layers, norm=norm, prompt=prompt, site=site)
    made = make_for_views(metrics, reader.layers, views if isinstance(views, int) else len(views))
    for (
        metric
    ) in made.values():  # this process has all texts: nothing is gathered from others that measure too, or wait
        metric.distributed_available_fn = _alone
    wanted = num_views(made)
    passes: Iterable[Sequence[Any]]
    passes = _passes(source, texts, wanted, seed) if isinstance(views, int) else (texts, *views[:wanted])
    stage = Stage(progress, "measuring", len(texts) * (1 + wanted))
    if isinstance(texts[0], str) and wanted:
        # Batches of all views at once hold less padding than batches of each. The texts' own do not change with them.
        own, *others = passes
        passes = (own, [text for view in others for text in view])
    before = 0
    for passed in passes:
        batches = batches_of(source, passed, token_budget=token_budget, prompt=prompt)
        places = [sorted(batch) for batch in batches]  # the texts first, then each view
        tokens = token_receiver(made, texts=len(texts)) if not before else None
        for positions, vectors in reader.embed(passed, places, tokens=tokens):
            update_views(made, reader.layers, vectors, [before + position for position in positions], len(texts))
            stage.step(len(positions))
        before += len(passed)
    named = metrics not in ("all", "paper")
    found, of = compute_metrics(made, named=named), at_site(source.spec, site)
    return tidy_frame(
        row
        for name, values in found.items()
        for row in tidy_rows(values, of, kind="metric", dataset=dataset, name=name)
    )


def _alone() -> bool:
    return False


def _checked_views(views: Any, count: int) -> int | list[list[Any]]:
    """Return the number of views, or the views themselves, each of as many texts as there are."""
    if not isinstance(views, list | tuple):
        return check_count("views", views)
    made = [check_list("views", view) for view in views]
    if any(len(view) != count for view in made):
        raise OptionError(
            f"`views` must be a number, or lists of {count} texts, one for each text, but got lists of "
            f"{', '.join(str(len(view)) for view in made)}."
        )
    return made


def num_passes(metrics: str | Sequence[str], *, views: int = 16) -> int:
    """Return how many forward passes over the texts these metrics take, with so many views for LiDAR.

    Example:
        >>> num_passes("paper"), num_passes(["infonce"]), num_passes("curvature")
        (17, 3, 1)
    """
    return 1 + num_views(make_for_views(metrics, [0], check_count("views", views)))


def make_for_views(metrics: str | Sequence[str], layers: Sequence[int], views: int) -> dict[str, LayerMetric]:
    """Return the metrics, where LiDAR takes so many views of each text."""
    made = make_metrics(metrics, layers)
    for name, metric in made.items():
        if isinstance(metric, LiDAR):
            made[name] = LiDAR(layers, views=views, exponential=metric.options["exponential"])
    return made


def num_views(metrics: Mapping[str, LayerMetric]) -> int:
    """Return how many views of each text these metrics want, ``0`` where none does."""
    return max((int(getattr(metric, "views", 0)) for metric in metrics.values() if metric.kind == "views"), default=0)


def _passes(source: LayerSource, texts: Sequence[Any], views: int, seed: int) -> Iterator[Sequence[Any]]:
    """Yield the texts, images or waveforms, then each view of them."""
    yield texts
    if not views:
        return
    medium = medium_of(texts[0], source.media)
    if medium == "text":
        yield from augment(texts, views=views, seed=seed)
    else:
        yield from augment_media(texts, medium, views=views, seed=seed, max_pixels=source.max_pixels)


def token_receiver(
    metrics: Mapping[str, LayerMetric], view: int = -1, *, texts: int | None = None
) -> TokenReceive | None:
    """Return what updates the token metrics with the raw states of a pass; ``None`` where none wants them.

    Args:
        metrics: by name; updated in place.
        view: number of the view; nothing reads the token states of one.
        texts: number of texts, where a batch holds views too: positions from there on, which come last, are of those.
    """
    of_tokens = [metric for metric in metrics.values() if metric.kind == "tokens"] if view < 0 else []

    def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        index = torch.tensor([position for position in positions if texts is None or position < texts])
        for metric in of_tokens if len(index) else ():
            metric.update(layer, states[: len(index)], mask[: len(index)], index=index)

    return tokens if of_tokens else None


def update_metrics(
    metrics: Mapping[str, LayerMetric],
    layers: Sequence[int],
    vectors: Tensor | Sequence[Tensor],
    positions: Sequence[int] | Tensor,
    *,
    view: int | Tensor = -1,
) -> None:
    """Update the metrics that want one vector for each text.

    Args:
        metrics: by name; updated in place.
        layers: of the vectors.
        vectors: ``(B, D)`` for each layer.
        positions: of the B texts in the whole list.
        view: number of the view from ``0``, of all or of each; ``-1`` for the texts themselves.
    """
    index = torch.as_tensor(positions)
    of_views = isinstance(view, Tensor) or view >= 0
    extra = {"index": index, "view": view} if of_views else {"index": index}
    wanting = [metric for metric in metrics.values() if metric.kind == ("views" if of_views else "pooled")]
    for layer, rows in zip(layers, vectors, strict=True):
        for metric in wanting:
            metric.update(layer, rows, **extra)


def update_views(
    metrics: Mapping[str, LayerMetric],
    layers: Sequence[int],
    vectors: Tensor | Sequence[Tensor],
    positions: Sequence[int],
    texts: int,
) -> None:
    """Update the metrics with a batch that may hold texts and views of them.

    Args:
        metrics: by name; updated in place.
        layers: of the vectors.
        vectors: ``(B, D)`` for each layer.
        positions: ascending, of the batch in the list of all texts, followed by the first view of each, and so on.
        texts: number of texts.
    """
    own = bisect_left(positions, texts)
    if own:
        # Each layer's in its own memory, since the metrics keep them; likewise below.
        some = vectors if own == len(positions) else [rows[:own].clone() for rows in vectors]
        update_metrics(metrics, layers, some, positions[:own])
    if own < len(positions):
        some = [rows[own:].clone() for rows in vectors] if own else vectors
        places = torch.tensor(positions[own:])
        update_metrics(metrics, layers, some, places % texts, view=places // texts - 1)


def compute_metrics(metrics: Mapping[str, LayerMetric], *, named: bool = True) -> dict[str, dict[int, float]]:
    """Return the values of each metric by layer; NaN where a layer can have none, as the first of a comparison.

    Args:
        metrics: by name.
        named: whether each metric was asked for by its name. Of a group, those that need more texts are left out, with
            a warning in the log.
    """
    found: dict[str, dict[int, float]] = {}
    lacking: dict[str, TooFewTextsError] = {}
    for metric in metrics.values():
        metric.settle()  # before the first value is waited for
    for name, metric in metrics.items():
        try:
            found[name] = dict(zip(metric.layers, metric.compute().tolist(), strict=True))
        except TooFewTextsError as error:
            lacking[name] = error
    if lacking and (named or not found):
        raise next(iter(lacking.values()))
    for name, reason in lacking.items():
        _log.warning("%s is left out. %s", name, reason)
    return found
