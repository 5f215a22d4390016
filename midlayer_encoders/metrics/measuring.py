"""Metrics of every layer over a list of inputs, from one forward pass for the inputs, their copies and each view."""

import logging
from collections.abc import Sequence
from typing import Any

import polars as pl

from midlayer_encoders._types import Layer, Norm, Progress, Stage
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.metrics.feeding import compute_metrics, num_copies, num_views, token_receiver, update_views
from midlayer_encoders.metrics.media_views import augment_media
from midlayer_encoders.metrics.text_views import augment, drop_words
from midlayer_encoders.reading.batches import LayerSource, batches_of, input_sizes, tokens_that_fit
from midlayer_encoders.reading.media_inputs import medium_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.recipes import CHARACTERS_PER_TOKEN
from midlayer_encoders.validation import check_count, check_list, check_progress, check_seed, check_text

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
) -> pl.DataFrame:
    """Return the tidy frame of :func:`~midlayer_encoders.measure`, with the norm of the vectors as an argument.

    Sweeps and selection measure raw states, like the paper, while they score states with the final norm.
    """
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
    stage = Stage(progress, "measuring", sum(map(sum, sizes)))

    tokens_per_batch = tokens_that_fit(source) if budget == "auto" else budget
    offset = 0
    for inputs, tokens_of_inputs in zip(passes, sizes, strict=True):
        batches = batches_of(source, inputs, token_budget=tokens_per_batch, prompt=prompt)
        sorted_batches = [sorted(batch) for batch in batches]  # texts first, then copies and each view
        tokens = token_receiver(layer_metrics, len(texts)) if not offset else None
        for positions, vectors in reader.embed(inputs, sorted_batches, tokens=tokens):
            places = [offset + position for position in positions]
            update_views(layer_metrics, reader.layers, vectors, places, len(texts))
            stage.step(sum(tokens_of_inputs[position] for position in positions))
        offset += len(inputs)
    computing = Stage(progress, "computing", len(layer_metrics))
    computing.step(0)
    values = compute_metrics(layer_metrics, named=metrics not in ("all", "paper"), done=computing.step)
    subject = source.spec  # reads all weights
    return tidy_frame(
        row
        for name, by_layer in values.items()
        for row in tidy_rows(by_layer, subject, kind="metric", dataset=dataset, name=name)
    )


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
