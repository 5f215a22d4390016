"""Metrics of every layer over a list of inputs, from one forward pass for the inputs, their copies and each view."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Layer, Norm, Progress, Stage
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.metrics import LayerMetric, TooFewTextsError, make_metrics
from midlayer_encoders.metrics.media_views import augment_media
from midlayer_encoders.metrics.text_views import augment, drop_words
from midlayer_encoders.metrics.token_metrics import MeanOverTexts
from midlayer_encoders.processes.sharing import ALONE, Group
from midlayer_encoders.reading.batches import LayerSource, batches_of, input_sizes, tokens_that_fit
from midlayer_encoders.reading.media_inputs import medium_of
from midlayer_encoders.reading.reader import TokenReceive, layer_reader
from midlayer_encoders.recipes import CHARACTERS_PER_TOKEN
from midlayer_encoders.validation import check_count, check_fork, check_list, check_progress, check_seed, check_text

_log = logging.getLogger(__name__)


def measure_layers(
    source: LayerSource,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    norm: Norm = "none",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: TokenBudget = "auto",
    progress: Progress | None = None,
    group: Group = ALONE,
) -> pl.DataFrame:
    """Return the tidy frame of :func:`~midlayer_encoders.measure`, with the norm of the vectors as an argument.

    Sweeps and selection measure raw states, like the paper, while they score states with the final norm. The processes
    of ``group`` share the passes, and the first one computes the metrics.
    """
    check_fork()
    texts = check_list("texts", texts)
    seed = check_seed(seed)
    views = _check_views(views, len(texts))
    budget = check_budget(token_budget)
    check_text("dataset", dataset)
    check_progress(progress)
    prompt = source.default_prompt if medium_of(texts[0], source.media) == "text" else ""
    reader = layer_reader(source, layers=layers, norm=norm, prompt=prompt, normalize=False)
    layer_metrics = make_metrics(metrics, reader.layers, views=views if isinstance(views, int) else len(views))
    for metric in layer_metrics.values():  # this process has all texts and gathers nothing from others
        metric.distributed_available_fn = _not_distributed
    view_count = num_views(layer_metrics)
    view_passes = _augment(source, texts, view_count, seed) if isinstance(views, int) else views[:view_count]
    copies = [_copies(source, texts, views, seed)] if num_copies(layer_metrics) else []
    if isinstance(texts[0], str) and view_count:
        # Batches over all views need less padding than batches per view. The batches of the texts stay the same.
        view_passes = [[text for view in view_passes for text in view]]

    passes = (texts, *copies, *view_passes)
    sizes = [input_sizes(source, inputs, prompt=prompt) for inputs in passes]
    progress = group.progress(progress)
    stage = Stage(progress, "measuring", sum(map(sum, sizes)))

    def compute() -> pl.DataFrame | None:
        tokens_per_batch = group.first(lambda: tokens_that_fit(source) if budget == "auto" else budget, inside=True)
        shared = _SharedTokens(layer_metrics, group)
        offset = 0
        for inputs, tokens_of_inputs in zip(passes, sizes, strict=True):
            batches = batches_of(source, inputs, token_budget=tokens_per_batch, prompt=prompt)
            sorted_batches = [sorted(batch) for batch in batches]  # texts first, then copies and each view
            tokens = token_receiver(layer_metrics, len(texts)) if not offset else None
            read = reader.embed(inputs, group.part(sorted_batches), tokens=tokens)
            for positions, vectors, numbers in group.in_order((*passed, shared.take()) for passed in read):
                shared.add(numbers)
                places = [offset + position for position in positions]
                update_views(layer_metrics, reader.layers, vectors, places, len(texts))
                stage.step(sum(tokens_of_inputs[position] for position in positions))
            offset += len(inputs)
        shared.merge()
        if not group.is_first:
            return None
        computing = Stage(progress, "computing", len(layer_metrics))
        computing.step(0)
        values = compute_metrics(layer_metrics, named=metrics not in ("all", "paper"), done=computing.step)
        subject = source.spec  # reads all weights
        return tidy_frame(
            row
            for name, by_layer in values.items()
            for row in tidy_rows(by_layer, subject, kind="metric", dataset=dataset, name=name)
        )

    return cast(pl.DataFrame, group.share(compute)[0])


class _SharedTokens:
    """The token metrics of several processes, whose states are too large to be sent.

    The first process adds the numbers of each text in the order of one process; on a GPU, where even one process sums
    in any order, numbers may come with a later batch. Sums over the tokens of all texts, which are matrices, are added
    at the end, so ``matrix_entropy`` equals one process's up to rounding.
    """

    def __init__(self, metrics: Mapping[str, LayerMetric], group: Group) -> None:
        self.group = group
        shared = [metric for metric in metrics.values() if metric.kind == "tokens" and group.world > 1]
        self.means = [metric for metric in shared if isinstance(metric, MeanOverTexts)]
        self.others = [metric for metric in shared if not isinstance(metric, MeanOverTexts)]
        for metric in self.means:
            metric.defer()

    def take(self) -> list[Any]:
        """Return the numbers of this process since the last call."""
        return [metric.take() for metric in self.means]

    def add(self, numbers: Sequence[Any]) -> None:
        """Add the numbers that a process has taken, in the first process."""
        for metric, metric_numbers in zip(self.means, numbers, strict=True):
            metric.add(metric_numbers)

    def merge(self) -> None:
        """Add what is left in the other processes, in the first process."""
        for metric in (*self.means, *self.others):
            metric.settle()
            metric.cpu()
        left = iter([(self.take(), [metric.metric_state for metric in self.others])])
        for rank, (numbers, states) in enumerate(self.group.in_order(left)):
            self.add(numbers)
            for metric, state in zip(self.others, states, strict=True):
                if rank:
                    metric.merge_state(state)


def _not_distributed() -> bool:
    return False


def _check_views(views: Any, count: int) -> int | list[list[Any]]:
    """Return the number of views, or the views themselves, each with one entry per text."""
    if not isinstance(views, list | tuple):
        return check_count("views", views)
    lists = [check_list("views", view) for view in views]
    if any(len(view) != count for view in lists):
        raise OptionError(
            f"`views` must be a number, or lists of {count} texts, one for each text, but got lists of "
            f"{', '.join(str(len(view)) for view in lists)}."
        )
    return lists


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


def _copies(source: LayerSource, texts: Sequence[Any], views: int | Sequence[Any], seed: int) -> Sequence[Any]:
    """Return the texts without a quarter of their words; for images and audio the first view, passed or new."""
    if medium_of(texts[0], source.media) == "text":
        return drop_words(texts, seed=seed)
    passed = [] if isinstance(views, int) else views
    return (passed or _augment(source, texts, 1, seed))[0]


def _augment(source: LayerSource, texts: Sequence[Any], views: int, seed: int) -> Sequence[Sequence[Any]]:
    """Return views of the texts, images or waveforms."""
    medium = medium_of(texts[0], source.media)
    if not views:
        return []
    if medium == "text":
        # nlpaug takes time by the square of a text's length, and changes few words, perhaps none that the model reads.
        most = None if source.max_seq_length is None else CHARACTERS_PER_TOKEN * source.max_seq_length
        return augment([text[:most] for text in texts], views=views, seed=seed)
    return augment_media(texts, medium, views=views, seed=seed, max_pixels=source.max_pixels)


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
    parts: list[tuple[slice, dict[str, dict[str, Any]]]] = [
        (slice(texts_end), {"pooled": {}, "copies": {"view": 0}}),
        (slice(texts_end, copies_end), {"copies": {"view": 1}}),
        (slice(copies_end, None), {"views": {"view": places[copies_end:] // num_texts - first_view}}),
    ]
    for layer, rows in zip(layers, vectors, strict=True):
        for part, options in parts:
            part_rows = rows[part]
            if 0 < len(part_rows) < len(rows):
                part_rows = part_rows.clone()  # metrics keep the vectors: clones free the rest of the batch
            for metric in metrics.values() if len(part_rows) else ():
                if metric.kind in options:
                    metric.update(part_rows, layer=layer, index=index[part], **options[metric.kind])


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
