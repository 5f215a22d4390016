"""``measure`` and ``select_layer``: read every layer of a model, given by name or as an encoder."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import polars as pl

from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.arguments import TokenBudget
from midlayer_encoders.encoder.choosing import check_own, complete_encoder, with_encoder
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.selection import Selection, select


def load_encoder(model: str | LayerEncoder, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the encoder of a named model with all its layers, or verify that the options match an encoder's own."""
    if not isinstance(model, LayerEncoder):
        return cast(LayerEncoder, complete_encoder(LayerEncoder, model, options))
    check_own(model, options)
    return model


def measure(
    model: str | LayerEncoder,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: TokenBudget = "auto",
    progress: Progress | None = None,
    **options: Any,
) -> pl.DataFrame:
    """Return the tidy frame of the metrics of every layer.

    Token metrics read the raw states; the others read one vector per text, with the encoder's norm, pooling and default
    prompt. Invariance metrics share their views: the sixteen passes of LiDAR serve InfoNCE and DiME.
    ``alignment`` needs one more pass, over copies of the texts without a quarter of their words.

    Args:
        model: folder or hub name, read with ``norm="none"`` like the paper; or an encoder of the whole model, or of one
            cut after the last layer of interest.
        texts: inputs: texts, or for a model of images or audio what it takes (``docs/media.md``).
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or a list of layers.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves,
            V lists of N texts.
        seed: seed of the views and of the copies.
        dataset: name of the texts in the frame.
        token_budget: tokens in a batch; ``"auto"`` finds the fastest size for the device.
        progress: called after each batch, in tokens (an image or waveform counts as one), with the
            stage ``"measuring"``, and after each metric with ``"computing"``.
        options: keywords of :class:`~midlayer_encoders.EncoderOptions`; with an encoder they must equal its options.
    """
    if isinstance(model, str | os.PathLike):
        options.setdefault("norm", "none")
        model = os.fspath(model)
    elif not isinstance(model, LayerEncoder):
        raise OptionError(f"`model` must be a folder, a hub name or a LayerEncoder, but got {short_repr(model)}.")
    encoder = load_encoder(model, options)
    return measure_layers(
        encoder,
        texts,
        metrics=metrics,
        layers=layers,
        norm=encoder.norm,
        views=views,
        seed=seed,
        dataset=dataset,
        token_budget=token_budget,
        progress=progress,
    )


def select_layer(
    model: str | LayerEncoder | pl.DataFrame,
    texts: Sequence[str] | None = None,
    labels: Sequence[int | str | None] | None = None,
    *,
    rule: str = "auto",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    all_rules: bool = False,
    max_texts: int = 500,
    seed: int = 0,
    **options: Any,
) -> Selection:
    """Return the layer of a model to use, the reason, and the choice of every other rule.

    Args:
        model: folder or hub name, an encoder of the whole model, or a tidy frame of one model from a sweep or from
            :func:`~midlayer_encoders.measure`.
        texts: a few hundred of your texts. They are read only for labels and for metrics.
        labels: the class of each text, ``None`` for unlabeled texts.
        rule: ``"auto"``, ``"last"``, ``"fixed-depth"``, ``"half-match"``, ``"few-labels"``, ``"valley-midpoint"``,
            ``"min-dime"``, ``"min-infonce"``, ``"min-dataset-entropy"`` or ``"min-prompt-entropy"``.
        recipes: candidates, as in :func:`~midlayer_encoders.sweep`: names, :class:`~midlayer_encoders.Recipe` objects
            or ``"all"``. The selection's ``recipe`` and ``layer`` then follow the labels if
            these make one clearly better, and otherwise the model's kind (``docs/selection.md``). By default
            ``word-echo`` and the plain text for a causal model that was not tuned for embeddings; with 16 different
            texts or more, ``word-echo+center``, centered on them.
        all_rules: measure what every rule needs, in three passes over the texts.
        max_texts: maximum number of texts to read.
        seed: seed of augmented views, folds and resamples.
        options: keywords of :class:`~midlayer_encoders.EncoderOptions`, if ``model`` is a name.

    Example:
        >>> import polars as pl
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> sts = [0.1, 0.3, 0.6, 0.5, 0.2]
        >>> rows = [("m", "main", k, k / 4, "score", "STS", "spearman", v) for k, v in enumerate(sts)]
        >>> selection = select_layer(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> selection.layer, selection.reason
        (2, 'few-labels: the score on STS is highest there, 60.0')
    """
    source: Any = model
    if isinstance(model, str | os.PathLike):
        source = load_encoder(os.fspath(model), options)
    elif not isinstance(model, LayerEncoder | pl.DataFrame):
        raise OptionError(f"`model` must be a folder, hub name, LayerEncoder or frame, but got {short_repr(model)}.")
    elif options:
        raise OptionError(f"`{next(iter(options))}` cannot be combined with an encoder or a frame.")
    selection = select(
        source, texts, labels, rule=rule, recipes=recipes, all_rules=all_rules, max_texts=max_texts, seed=seed
    )
    has_files = isinstance(source, LayerEncoder) and not source.in_memory
    return with_encoder(LayerEncoder, selection, source.source, source.options) if has_files else selection
