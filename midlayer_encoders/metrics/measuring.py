"""Metrics of every layer over a list of inputs, from one forward pass for the inputs, their copies and each view."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast

import polars as pl

from midlayer_encoders._types import Layer, Norm, Progress, Stage
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.metrics import LayerMetric, make_metrics
from midlayer_encoders.metrics.feeding import compute_metrics, num_copies, num_views, token_receiver, update_views
from midlayer_encoders.metrics.media_views import augment_media
from midlayer_encoders.metrics.text_views import augment, drop_words
from midlayer_encoders.metrics.token_metrics import MeanOverTexts
from midlayer_encoders.processes.group import ALONE, Group
from midlayer_encoders.reading.batches import LayerSource, batches_of, input_sizes, tokens_that_fit
from midlayer_encoders.reading.media_inputs import medium_of
from midlayer_encoders.reading.reader import layer_reader
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
