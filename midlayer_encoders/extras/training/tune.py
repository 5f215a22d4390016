"""Cut a model at a layer, and tune it on pairs or on masked texts, or train it to return the vectors of a teacher."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from midlayer_encoders import files
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.encoder.options import option_names
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.settings import DistillSettings, TuneSettings, checked_folder, require_packages
from midlayer_encoders.extras.training.fitting import check_training
from midlayer_encoders.extras.training.losses import DistillLoss, MaskedNextTokenLoss, masked_token_head, pair_loss
from midlayer_encoders.extras.training.runs import DistillResult, Run, TuneResult, cut_encoder
from midlayer_encoders.extras.training.trainer_internals import CHECKSUMS
from midlayer_encoders.metrics.label_accuracy import all_alike
from midlayer_encoders.recipes import Recipe
from midlayer_encoders.tasks.tables import Columns
from midlayer_encoders.tasks.training_rows import RowKind, read_rows, read_training_texts, scored_tasks
from midlayer_encoders.validation import check_progress

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

_TRIED = 64  # texts in which a token must be maskable

_CHUNK = 4096  # texts whose vectors are one file, so that an interrupted run resumes
_BATCH = 64
_LOADING_OPTIONS = {"dtype", "trust_remote_code", *option_names("none")}


def tune(
    model: str | LayerEncoder,
    layer: Layer | None,
    pairs: Path | str | Sequence[Mapping[str, Any]] | None = None,
    *,
    texts: Path | str | Sequence[str] | None = None,
    text_column: str | None = None,
    label_column: str | None = None,
    drop_empty: bool = False,
    out: Path | str,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = "builtin",
    settings: TuneSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
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
        text_column: column of the texts in labeled texts, texts and tasks of your own, if it is not ``text``.
        label_column: column of the labels in labeled texts and tasks of your own, if it is not ``label``.
        drop_empty: leave out rows that lack a text or label, and log how many they are.
        out: output folder: ``model`` (plain sentence-transformers), ``report.html``, frames, and the sweeps ``before``
            and ``after``. An interrupted run resumes when it is called again with the same arguments.
        tasks: as in :func:`~midlayer_encoders.sweep`, scored before and after; ``()`` for none.
        settings: settings of the training.
        progress: called with the stage ``"training"`` (in steps) and the stages of the sweeps, such as
            ``"before: scoring"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``dtype`` is ``"float32"`` by default. On a GPU,
            training uses autocast in bfloat16.

    Raises:
        OptionError: for invalid arguments, or if ``out`` holds other files.
        TaskFileError: for pairs that cannot be trained on.
    """
    settings = settings or TuneSettings()
    require_packages("tuning", *(["accelerate", "peft"] if settings.lora else ["accelerate"]))
    check_progress(progress)
    folder = checked_folder(out)
    # Too few rows and unknown tasks raise before the model is loaded.
    columns = Columns(text_column, label_column, drop_empty)
    rows = read_rows(pairs, texts, columns, objective=settings.objective)
    rows.split(settings.held_out, settings.seed)
    sources = scored_tasks(tasks, columns, rows)
    encoder = cut_encoder(model, layer, options)
    check_training(encoder, settings, settings.matryoshka or (), nested=rows.kind != "texts")
    make_loss = partial(_loss, kind=rows.kind, settings=settings)
    loss = make_loss(encoder)
    if isinstance(loss, MaskedNextTokenLoss) and not loss.maskable(encoder.preprocess(rows.texts[:_TRIED])).any():
        raise OptionError(f"`texts` must have several tokens each, but the first of {rows.name} have one.")
    run = Run(encoder, rows, settings, folder, sources, progress)
    with run.claim():
        noun = "Texts" if rows.kind == "texts" else "Pairs"
        return run.train(make_loss, {noun: f"{rows.name}, {len(rows.rows)} rows"}, TuneResult)


def _loss(encoder: LayerEncoder, *, kind: RowKind, settings: TuneSettings) -> nn.Module:
    if kind == "texts":
        return MaskedNextTokenLoss(encoder, masked_token_head(encoder), settings.seed)
    return pair_loss(encoder, kind, settings)


def distill(
    model: str | LayerEncoder,
    layer: Layer | None,
    texts: Path | str | Sequence[str],
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    drop_empty: bool = False,
    limit: int | None = None,
    out: Path | str,
    teacher: str | LayerEncoder | None = None,
    teacher_layer: Layer = -1,
    teacher_recipe: str | Recipe | None = None,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = "builtin",
    settings: DistillSettings | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> DistillResult:
    """Cut a model at a layer, train it on the vectors of a teacher, and return it with the scores of every layer.

    Args:
        model: folder or name on the hub of a text model, ``"built-in"``, or an encoder, which is trained in place.
        layer: layer to cut at, as in :class:`LayerEncoder`. ``None`` for an encoder, which is already cut.
        texts: a list, or a file with a text per line or a column ``text``; no labels are needed.
        text_column: column of the texts in a file and in tasks of your own, if it is not ``text``.
        label_column: column of the labels in tasks of your own, if it is not ``label``.
        drop_empty: leave out rows that lack a text or label, and log how many they are.
        limit: use only the first ``limit`` texts.
        out: output folder: ``model`` (plain sentence-transformers), ``report.html``, frames, the vectors and scores of
            the teacher, and the sweeps ``before`` and ``after``. An interrupted run resumes when it is called again
            with the same arguments.
        teacher: folder or name of another embedding model, or an encoder; by default ``model`` itself, uncut.
        teacher_layer: layer of the teacher.
        teacher_recipe: recipe of the teacher, such as ``"word-echo"``; by default, the teacher reads as its folder
            says, or with the options of the student if both are the same model.
        tasks: as in :func:`~midlayer_encoders.sweep`, scored before and after; ``()`` for none.
        settings: settings of the training.
        progress: called with the stages ``"teacher"`` (in texts) and ``"training"`` (in steps), and with those of the
            sweeps, such as ``"before: scoring"``.
        options: of the student, as in :class:`~midlayer_encoders.EncoderOptions`; ``dtype`` is ``"float32"`` by
            default. On a GPU, training uses autocast in bfloat16.

    Raises:
        OptionError: for invalid arguments, or if ``out`` holds other files.
    """
    settings = settings or DistillSettings()
    require_packages("tuning", *(["accelerate", "peft"] if settings.lora else ["accelerate"]))
    check_progress(progress)
    folder = checked_folder(out)
    columns = Columns(text_column, label_column, drop_empty)
    rows = read_training_texts(texts, columns, limit)
    rows.split(settings.held_out, settings.seed)
    sources = scored_tasks(tasks, columns, rows)
    student = cut_encoder(model, layer, options)
    check_training(student, settings)
    teacher_encoder = _load_teacher(model, teacher, teacher_layer, teacher_recipe, options)
    _check_teacher(student, teacher_encoder, settings)
    run = Run(student, rows, settings, folder, sources, progress)
    name = f"{teacher_encoder.name}, layer {teacher_encoder.layer} of {teacher_encoder.num_layers}"
    if teacher_recipe is not None:
        name += f", {teacher_recipe if isinstance(teacher_recipe, str) else teacher_recipe.name}"
    with run.claim(teacher=teacher_encoder.spec.digest):
        run.score("teacher", teacher_encoder, [teacher_encoder.layer])
        vectors = _teacher_vectors(teacher_encoder, rows.texts, folder, Stage(progress, "teacher"))
        del teacher_encoder
        how = {"Texts": f"{rows.name}, {len(rows.rows)} rows", "Teacher": name}
        return run.train(lambda encoder: DistillLoss(encoder, vectors, settings.match), how, DistillResult)


def _load_teacher(
    model: str | LayerEncoder,
    teacher: str | LayerEncoder | None,
    layer: Layer,
    recipe: str | Recipe | None,
    options: Mapping[str, Any],
) -> LayerEncoder:
    """Return the teacher: an encoder as it is, another model, or the same model with the options of the student."""
    if isinstance(teacher, LayerEncoder):
        if recipe is not None or layer not in (-1, teacher.layer):
            raise OptionError("`teacher_layer` and `teacher_recipe` do not apply to a teacher that is an encoder.")
        return teacher
    if teacher is None and isinstance(model, LayerEncoder):
        raise OptionError("`teacher` must be given if `model` is an encoder, which may not have all of its blocks.")
    keywords: dict[str, Any] = {"dtype": "float32", **options}
    if teacher is not None:
        keywords = {name: value for name, value in keywords.items() if name in _LOADING_OPTIONS}
    elif recipe is not None:
        keywords = {name: value for name, value in keywords.items() if name not in option_names("reading")}
    return LayerEncoder(str(teacher or model), layer, **{**keywords, **({"recipe": recipe} if recipe else {})})


def _check_teacher(student: LayerEncoder, teacher: LayerEncoder, settings: DistillSettings) -> None:
    """Raise if a student cannot learn anything from a teacher."""
    if student.spec.digest == teacher.spec.digest:
        raise OptionError(
            f"`teacher` must differ from the student, but both are layer {student.layer} of {student.name}: choose an "
            "earlier `layer`, or pass `teacher_recipe`."
        )
    widths = [encoder.get_embedding_dimension() for encoder in (student, teacher)]
    if settings.match != "similarities" and widths[0] != widths[1]:
        raise OptionError(
            f"`match` must be 'similarities' for vectors of different widths: {widths[0]} of the student and "
            f"{widths[1]} of the teacher."
        )


def _teacher_vectors(teacher: LayerEncoder, texts: Sequence[str], folder: Path, stage: Stage) -> torch.Tensor:
    """Return the teacher's vectors ``(N, D)``, and keep them in the folder of the run."""
    path = folder / "teacher_vectors"
    files.make_folder(path)
    checksums = files.read_artifact(path / CHECKSUMS, files.read_with_checksum) or {}
    stage.expect(len(texts))
    chunks = []
    for start in range(0, len(texts), _CHUNK):
        part = list(texts[start : start + _CHUNK])
        file = path / f"{start}.npy"
        if file.name not in checksums or files.file_checksums(path, file.name) != {file.name: checksums[file.name]}:
            vectors = teacher.encode(part, batch_size=_BATCH, show_progress_bar=False)
            with files.atomic_write(file) as temporary, temporary.open("wb") as stream:
                np.save(stream, np.asarray(vectors, dtype=np.float32))
            checksums |= files.file_checksums(path, file.name)
            files.write_file(path / CHECKSUMS, files.dump_with_checksum(checksums))
        chunks.append(np.load(file))
        stage.step(len(part))
    vectors = torch.from_numpy(np.concatenate(chunks))
    if all_alike(vectors[None], texts).item():
        raise OptionError(f"`teacher` must return different vectors for different texts, but {teacher.name} does not.")
    return vectors
