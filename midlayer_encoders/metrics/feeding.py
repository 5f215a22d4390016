"""Hand the states and vectors of texts, of their copies and of their views to metrics, and compute the values."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from midlayer_encoders.metrics import LayerMetric, TooFewTextsError, make_metrics
from midlayer_encoders.reading.reader import TokenReceive
from midlayer_encoders.validation import check_count

_log = logging.getLogger(__name__)


def num_passes(metrics: str | Sequence[str], *, views: int = 16) -> int:
    """Return the number of forward passes over the texts that metrics need, with this many views for LiDAR.

    Example:
        >>> num_passes("paper"), num_passes(["infonce"]), num_passes("curvature")
        (17, 3, 1)
    """
    return 1 + sum(extra_passes(metrics, views=views))


def extra_passes(metrics: str | Sequence[str], *, views: int = 16) -> tuple[int, int]:
    """Return the number of passes over shortened copies of the texts, 0 or 1, and over augmented views of them.

    Example:
        >>> extra_passes("all"), extra_passes(["alignment"])
        ((1, 16), (1, 0))
    """
    layer_metrics = make_metrics(metrics, [0], views=check_count("views", views))
    return num_copies(layer_metrics), num_views(layer_metrics)


def num_views(metrics: Mapping[str, LayerMetric]) -> int:
    """Return the number of views of each text that metrics need, ``0`` if none does."""
    return max((int(getattr(metric, "views", 0)) for metric in metrics.values() if metric.kind == "views"), default=0)


def num_copies(metrics: Mapping[str, LayerMetric]) -> int:
    """Return 1 if a metric compares the texts with shortened copies, and 0 otherwise."""
    return int(any(metric.kind == "copies" for metric in metrics.values()))


def token_receiver(metrics: Mapping[str, LayerMetric], num_texts: int) -> TokenReceive | None:
    """Return a function that updates the token metrics with the raw states of a pass; ``None`` without such metrics.

    Args:
        metrics: metrics by name; updated in place.
        num_texts: number of texts; a batch may hold views too, whose positions follow the texts'.
    """
    token_metrics = [metric for metric in metrics.values() if metric.kind == "tokens"]

    def update(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        index = torch.tensor([position for position in positions if position < num_texts])
        for metric in token_metrics if len(index) else ():
            metric.update(states[: len(index)], mask[: len(index)], layer=layer, index=index)

    return update if token_metrics else None


def update_views(
    metrics: Mapping[str, LayerMetric],
    layers: Sequence[int],
    vectors: Tensor | Sequence[Tensor],
    positions: Sequence[int],
    num_texts: int,
) -> None:
    """Update the metrics that read one vector for each text with a batch that may hold texts, copies and views of them.

    Args:
        metrics: metrics by name; updated in place.
        layers: layers of the vectors.
        vectors: ``(B, D)`` for each layer.
        positions: ascending positions in the list of all texts, followed by the shortened copies if a metric needs
            them, the first view of each text, and so on.
        num_texts: number of texts.
    """
    first_view = 1 + num_copies(metrics)
    texts_end = bisect_left(positions, num_texts)
    copies_end = bisect_left(positions, num_texts * first_view)
    places = torch.tensor(positions)
    index = places % num_texts
    block = places // num_texts
    parts: list[tuple[str, slice, dict[str, Tensor]]] = [
        ("pooled", slice(texts_end), {}),
        ("copies", slice(copies_end), {"view": block[:copies_end]}),
        ("views", slice(copies_end, None), {"view": block[copies_end:] - first_view}),
    ]
    for layer, rows in zip(layers, vectors, strict=True):
        for kind, part, options in parts:
            part_rows = rows[part]
            if 0 < len(part_rows) < len(rows):
                part_rows = part_rows.clone()  # metrics keep the vectors: clones free the rest of the batch
            for metric in metrics.values() if len(part_rows) else ():
                if metric.kind == kind:
                    metric.update(part_rows, layer=layer, index=index[part], **options)


def compute_metrics(
    metrics: Mapping[str, LayerMetric], *, named: bool = True, done: Callable[[], None] | None = None
) -> dict[str, dict[int, float]]:
    """Return the values of each metric by layer; NaN for a layer without a value, as the first of a comparison.

    Args:
        metrics: metrics by name.
        named: whether each metric was requested by name. Metrics of a group that need more texts are left out, with a
            warning in the log.
        done: called after each metric.
    """
    values: dict[str, dict[int, float]] = {}
    errors: dict[str, TooFewTextsError] = {}
    for metric in metrics.values():
        metric.settle()  # start every computation before waiting for the first value
    for name, metric in metrics.items():
        try:
            values[name] = dict(zip(metric.layers, metric.compute().tolist(), strict=True))
        except TooFewTextsError as error:
            errors[name] = error
        if done is not None:
            done()
    if errors and (named or not values):
        raise next(iter(errors.values()))
    for name, reason in errors.items():
        _log.warning("%s is left out. %s", name, reason)
    return values
