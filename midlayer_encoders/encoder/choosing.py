"""``measure`` and ``select_layer`` for a model given by name or as an encoder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

import polars as pl

from midlayer_encoders._types import Layer, Progress, ReadSite
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.reading.batches import TokenBudget
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.selection import Selection, select


def measure(
    model: str | LayerEncoder,
    texts: Sequence[Any],
    *,
    metrics: str | Sequence[str] = "paper",
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    views: int | Sequence[Sequence[Any]] = 16,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: TokenBudget = "auto",
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> pl.DataFrame:
    """Return the tidy frame of the metrics of every layer.

    Token metrics read the raw states; the others read one vector per text, with the encoder's norm, pooling and default
    prompt. Invariance metrics share their views: the sixteen passes of LiDAR serve InfoNCE and DiME.

    Args:
        model: folder or hub name, read with ``norm="none"`` like the paper; or an encoder of the whole model, or of one
            cut after the last layer of interest.
        texts: inputs: texts, or for a model of images or audio what it takes (``docs/media.md``).
        metrics: ``"paper"``, ``"all"``, one name or several.
        layers: ``"all"`` or a list of layers.
        site: ``"block"``, or ``"attention"`` or ``"mlp"`` for their outputs in each block, from layer 1 up. The frame's
            revision names it, as in ``"default:mlp"``.
        views: number of views of each text for LiDAR (InfoNCE and DiME take the first two), or the views themselves,
            V lists of N texts.
        seed: seed of the views.
        dataset: name of the texts in the frame.
        token_budget: tokens in a batch; ``"auto"`` finds the fastest size for the device.
        progress: called after each batch, with the stage ``"measuring"``.
        options: keywords of :class:`~midlayer_encoders.EncoderOptions`; with an encoder they must equal its options.
    """
    if isinstance(model, str | os.PathLike):
        options.setdefault("norm", "none")
        encoder = LayerEncoder(os.fspath(model), -1, **options)
    elif isinstance(model, LayerEncoder):
        encoder = model
        encoder.check_own(options)
    else:
        raise OptionError(f"`model` must be a folder, a hub name or a LayerEncoder, but got {short_repr(model)}.")
    return measure_layers(
        encoder,
        texts,
        metrics=metrics,
        layers=layers,
        norm=encoder.norm,
        site=site,
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
    mixture: bool = False,
    max_texts: int = 500,
    seed: int = 0,
    **options: Unpack[EncoderKeywords],
) -> Selection:
    """Return the layer of a model to use, the reason, and the choice of every other rule.

    Args:
        model: folder or hub name, an encoder of the whole model, or a tidy frame of one model from a sweep or from
            :func:`~midlayer_encoders.measure`.
        texts: a few hundred of your texts.
        labels: the class of each text, ``None`` for unlabeled texts.
        rule: ``"auto"``, ``"last"``, ``"fixed-depth"``, ``"half-match"``, ``"few-labels"``, ``"valley-midpoint"``,
            ``"min-dime"``, ``"min-infonce"``, ``"min-dataset-entropy"``, ``"min-prompt-entropy"``, or several of the
            last four ranked together, as in ``"min-dime+dataset-entropy"``.
        recipes: as in :func:`~midlayer_encoders.sweep`, names, :class:`~midlayer_encoders.Recipe` objects or ``"all"``:
            also choose the recipe. The result is then a ``RecipeSelection``, whose ``recipe`` and ``layer`` follow the
            labels if these make one clearly better, and otherwise the model's kind (``docs/selection.md``).
        all_rules: measure what every rule needs, in three passes over the texts instead of one.
        mixture: also learn a weighted mean of several layers from the labels; ``LayerEncoder(model,
            **selection.keywords)`` uses it if it is clearly better than the best single layer.
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
        source = LayerEncoder(os.fspath(model), -1, **options)
    elif not isinstance(model, LayerEncoder | pl.DataFrame):
        raise OptionError(
            f"`model` must be a folder, a hub name, a LayerEncoder or a frame of results, but got {short_repr(model)}."
        )
    elif options:
        raise OptionError(f"`{next(iter(options))}` must be left out with an encoder or a frame.")
    return select(
        source,
        texts,
        labels,
        rule=rule,
        recipes=recipes,
        all_rules=all_rules,
        mixture=mixture,
        max_texts=max_texts,
        seed=seed,
    )
