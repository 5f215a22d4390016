"""``select_layer``: which layer of a model to take, from its name, an encoder or a frame of results."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Unpack

import polars as pl

from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.selection import Selection, select

__all__ = ["select_layer"]


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
    """Return which layer of a model to take, why, and what every other rule would have chosen.

    Args:
        model: folder or name on the hub, an encoder of the whole model, or a tidy frame of one model: of a sweep, or
            of :func:`~midlayer_encoders.measure`.
        texts: a few hundred of your own.
        labels: the class of each text, ``None`` for those without.
        rule: ``"auto"``, ``"last"``, ``"fixed-depth"``, ``"half-match"``, ``"few-labels"``, ``"valley-midpoint"``,
            ``"min-dime"``, ``"min-infonce"``, ``"min-dataset-entropy"``, ``"min-prompt-entropy"``, or several of the
            last four ranked together, as ``"min-dime+dataset-entropy"``.
        recipes: as in :func:`~midlayer_encoders.sweep`, names, :class:`~midlayer_encoders.Recipe` objects or ``"all"``:
            also choose how texts are asked. The result is then a ``RecipeSelection``, whose ``recipe`` and ``layer``
            are by labels where they make one surely better, else those of the model's kind (``docs/selection.md``).
        all_rules: measure what every rule needs, in three passes over the texts instead of one.
        mixture: also learn a mean of several layers from the labels: ``LayerEncoder(model, **selection.keywords)`` is
            of it where it is surely better than the best single layer.
        max_texts: how many texts are looked at.
        seed: of augmented views, folds and resamples.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, where ``model`` is a name.

    Example:
        >>> import polars as pl
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> sts = [0.1, 0.3, 0.6, 0.5, 0.2]
        >>> rows = [("m", "main", k, k / 4, "score", "STS", "spearman", v) for k, v in enumerate(sts)]
        >>> chosen = select_layer(pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row"))
        >>> chosen.layer, chosen.reason
        (2, 'few-labels: the score on STS is highest there, 60.0')
    """
    source: Any = model
    if isinstance(model, str | os.PathLike):
        source = LayerEncoder(os.fspath(model), -1, **options)
    elif not isinstance(model, LayerEncoder | pl.DataFrame):
        raise OptionError(
            f"`model` must be a folder, a name on the hub, a LayerEncoder or a frame of results, but got "
            f"{short_repr(model)}."
        )
    elif options:
        raise OptionError(f"`{next(iter(options))}` must not be given with an encoder or a frame: it is the encoder's.")
    return select(
        source, texts, labels, rule=rule, recipes=recipes, all_rules=all_rules, mixture=mixture,
        max_texts=max_texts, seed=seed,
    )  # fmt: skip
