"""Metrics of every layer over a list of inputs, from one forward pass for the inputs, their copies and each view."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from midlayer_encoders._types import Layer, Norm, Progress, Stage
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import tidy_frame, tidy_rows
from midlayer_encoders.metrics import LayerMetric, make_metrics
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
        metric.distributed_available_fn = lambda: False
    passes = _passes(source, texts, layer_metrics, views, seed)
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


def _passes(
    source: LayerSource, texts: list[Any], metrics: Mapping[str, LayerMetric], views: int | list[list[Any]], seed: int
) -> list[Sequence[Any]]:
    """Return the inputs of each pass: the texts, the shortened copies and the views that metrics need.

    The first view of images and waveforms replaces the shortened copies of texts.
    """
    medium = medium_of(texts[0], source.media)

    def make_views(views: int) -> list[Any]:
        if medium != "text":
            return augment_media(texts, medium, views=views, seed=seed, max_pixels=source.max_pixels)
        # nlpaug takes time by the square of a text's length, and changes few words, perhaps none that the model reads.
        most = None if source.max_seq_length is None else CHARACTERS_PER_TOKEN * source.max_seq_length
        return augment([text[:most] for text in texts], views=views, seed=seed)

    count, has_copies = num_views(metrics), num_copies(metrics)
    num_made = max(count, has_copies if medium != "text" else 0)
    made = views if not isinstance(views, int) and views else make_views(views=num_made) if num_made else []
    copies = [drop_words(texts, seed=seed) if medium == "text" else made[0]] if has_copies else []
    if isinstance(texts[0], str) and count:
        # Batches over all views need less padding than batches per view. The batches of the texts stay the same.
        return [texts, *copies, [text for view in made[:count] for text in view]]
    return [texts, *copies, *made[:count]]
