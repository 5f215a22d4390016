"""Cut a model at a layer, tune it on pairs or on masked texts, and score every layer before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast

from torch import nn

from midlayer_encoders._types import Layer, Progress
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError, take_deprecated
from midlayer_encoders.tuning.losses import MaskedNextTokenLoss, masked_token_head, pair_loss
from midlayer_encoders.tuning.runs import Run, TuneResult, checked_folder, cut_encoder, scored_tasks
from midlayer_encoders.tuning.settings import TuneSettings
from midlayer_encoders.tuning.trainer_internals import check_packages
from midlayer_encoders.tuning.training import check_training
from midlayer_encoders.tuning.training_rows import RowKind, TrainingRows, read_pairs, read_training_texts
from midlayer_encoders.validation import check_progress

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

_TRIED = 64  # texts in which a token must be maskable
_DEPRECATED = {field.name: f"settings.{field.name}" for field in fields(TuneSettings)}


def tune(
    model: str | LayerEncoder,
    layer: Layer | None,
    pairs: Path | str | Sequence[Mapping[str, Any]] | None = None,
    *,
    texts: Path | str | Sequence[str] | None = None,
    text_column: str | None = None,
    out: Path | str,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = "builtin",
    settings: TuneSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> TuneResult:
    """Cut a model at a layer, tune it, and return the encoder with the scores of every layer before and after.

    Args:
        model: folder or name on the hub of a text model, ``"built-in"``, or an encoder, which is tuned in place.
        layer: layer to cut at, as in :class:`LayerEncoder`; later blocks are neither loaded nor trained. ``None`` for
            an encoder, which is already cut.
        pairs: a file (JSONL, CSV, TSV, parquet) or a list of dicts; the columns determine the loss. With ``anchor`` and
            ``positive`` (or ``query`` and ``positive``, ``sentence1`` and ``sentence2``), the other positives of a
            batch are the negatives, in addition to ``negative``, ``negative_2``, and so on. With a ``score``, or a
            ``label`` of 0 or 1, the loss is CoSENT. With ``text`` and ``label``, texts of the same label are paired,
            and only texts of other labels are negatives.
        texts: instead of pairs, for ``TuneSettings(objective="mntp")``: a list, or a file with a text per line or a
            column ``text``.
        text_column: column of the texts in a file, if it is not ``text``.
        out: output folder: ``model`` (plain sentence-transformers), ``report.html``, frames, and the sweeps ``before``
            and ``after``. An interrupted run resumes when it is called again with the same arguments.
        tasks: as in :func:`~midlayer_encoders.sweep`, scored before and after; ``()`` for none.
        settings: settings of the training.
        progress: called with the stage ``"training"`` (in steps) and with those of the sweeps, such as
            ``"before: scoring"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``dtype`` is ``"float32"`` by default. On a GPU,
            training uses autocast in bfloat16.

    Raises:
        OptionError: for invalid arguments, or if ``out`` holds other files.
        TaskFileError: for pairs that cannot be trained on.
    """
    replaced = take_deprecated(cast(dict[str, Any], options), _DEPRECATED)
    settings = replace(settings or TuneSettings(), **replaced.get("settings", {}))
    check_packages(lora=bool(settings.lora))
    check_progress(progress)
    folder = checked_folder(out)
    # Too few rows and unknown tasks raise before the model is loaded.
    rows = _read_rows(pairs, texts, text_column, settings)
    rows.split(settings.held_out, settings.seed)
    tasks = scored_tasks(tasks)
    encoder = cut_encoder(model, layer, options)
    check_training(encoder, settings, settings.matryoshka or (), nested=rows.kind != "texts")
    make_loss = partial(_loss, kind=rows.kind, settings=settings)
    loss = make_loss(encoder)
    if isinstance(loss, MaskedNextTokenLoss) and not loss.maskable(encoder.preprocess(rows.texts[:_TRIED])).any():
        raise OptionError(f"`texts` must have several tokens each, but the first of {rows.name} have one.")
    run = Run(encoder, rows, settings, folder, tasks, progress)
    with run.claimed():
        noun = "Texts" if rows.kind == "texts" else "Pairs"
        result = TuneResult(**run.train(make_loss, {noun: f"{rows.name}, {len(rows.rows)} rows"}))
        result.save()
    return result


def _read_rows(pairs: Any, texts: Any, column: str | None, settings: TuneSettings) -> TrainingRows:
    needed, other = ("texts", "pairs") if settings.objective == "mntp" else ("pairs", "texts")
    values = {"pairs": pairs, "texts": texts}
    if values[needed] is None or values[other] is not None:
        raise OptionError(
            f"`{needed}` must be given, and `{other}` left out, with objective={settings.objective!r}, which trains on "
            f"{needed}."
        )
    return read_pairs(pairs) if texts is None else read_training_texts(texts, column)


def _loss(encoder: LayerEncoder, *, kind: RowKind, settings: TuneSettings) -> nn.Module:
    if kind == "texts":
        return MaskedNextTokenLoss(encoder, masked_token_head(encoder), settings.seed)
    return pair_loss(encoder, kind, settings)
