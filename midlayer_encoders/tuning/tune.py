"""Cut, then train: an encoder tuned on pairs, with every layer scored before and after."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import polars as pl
from sentence_transformers import SentenceTransformer

from midlayer_encoders._random import isolated_random
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import (
    LOCK,
    expand_home,
    folder_lock,
    parse_json_object,
    read_artifact,
    read_text_file,
    write_file,
)
from midlayer_encoders.frame import tidy_frame
from midlayer_encoders.report.results import write_frame
from midlayer_encoders.report.versions import versions
from midlayer_encoders.sweeping import SweepSettings, sweep
from midlayer_encoders.sweeping.sweep_result import task_labels
from midlayer_encoders.tasks import task_sources
from midlayer_encoders.tuning.trainer_internals import check_packages
from midlayer_encoders.tuning.training import METRICS, Trained, Training, check_training, read_trained, train
from midlayer_encoders.tuning.training_pairs import read_pairs
from midlayer_encoders.tuning.tune_result import TuneResult
from midlayer_encoders.validation import check_path, check_progress

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["tune"]

_RUN, _DONE = "tuning.json", "trained.json"
_MADE_FOR_ONE = ("center", "whiten", "embed_filter")  # fitted to the vectors of the model as it was


def tune(
    model: str,
    layer: Layer,
    pairs: Path | str | Sequence[Mapping[str, Any]],
    *,
    out: Path | str,
    lora: bool | int = False,
    epochs: float = 1.0,
    max_steps: int | None = None,
    batch_size: int = 32,
    learning_rate: float | None = None,
    held_out: float = 0.1,
    patience: int = 3,
    checkpoints: int = 10,
    mini_batch: int | None = None,
    matryoshka: Sequence[int] | None = None,
    adaptive: bool = False,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = "builtin",
    seed: int = 0,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> TuneResult:
    """Cut a model at a layer, tune what is left on pairs, and return the encoder with what changed at every layer.

    Args:
        model: folder or name on the hub of a text model, or ``"built-in"``.
        layer: where it is cut, as in :class:`LayerEncoder`; the blocks after it are neither loaded nor trained.
        pairs: a file (JSONL, CSV, TSV, parquet) or a list of dicts. ``anchor`` and ``positive`` (or ``query`` and
            ``positive``, ``sentence1`` and ``sentence2``): other positives of a batch are the negatives, with hard ones
            from ``negative``, ``negative_2`` …; with ``score``, or ``label`` 0 or 1: the order of the scores (CoSENT);
            ``text`` and ``label``: texts of a label are paired, and only other labels are negatives.
        out: folder for everything: ``model`` (plain sentence-transformers), ``report.html``, frames, the sweeps
            ``before`` and ``after``. A run that was stopped goes on when it is called again with the same arguments.
        lora: train adapters of this rank (``True``: 16) in every linear layer, merged into the weights at the end;
            otherwise all weights are trained.
        epochs: passes over the pairs.
        max_steps: number of steps instead of ``epochs``.
        batch_size: pairs a step; more are more in-batch negatives.
        learning_rate: at its peak, after a tenth of the steps; 5e-5, or 5e-4 with ``lora``, by default.
        held_out: share of the pairs that is not trained on. Its loss chooses the checkpoint and stops the run.
        patience: evaluations without a lower loss after which the run stops.
        checkpoints: how often, over the run, the held-out pairs are evaluated and a checkpoint is written; 0 for none.
        mini_batch: rows in memory at a time, for batches that do not fit (``CachedMultipleNegativesRankingLoss``).
        matryoshka: numbers of leading dimensions to train beside all of them (``MatryoshkaLoss``).
        adaptive: train earlier layers too (``AdaptiveLayerLoss``); refused where it reads other states than a cut does.
        tasks: as in :func:`~midlayer_encoders.sweep`, scored before and after; ``()`` for none.
        seed: of every random draw.
        progress: called with the stage ``"training"`` (steps), and those of the sweeps as ``"before: scoring"``.
        options: as in :class:`~midlayer_encoders.EncoderOptions`; ``dtype`` is ``"float32"`` here by default. On a GPU
            passes run under autocast in bfloat16.

    Raises:
        OptionError: for arguments that cannot be meant, and an ``out`` that holds something else.
        TaskFileError: for pairs that nothing can be learned from.
    """
    training = Training(
        lora=lora, epochs=epochs, max_steps=max_steps, batch_size=batch_size, learning_rate=learning_rate,
        held_out=held_out, patience=patience, checkpoints=checkpoints, mini_batch=mini_batch, matryoshka=matryoshka,
        adaptive=adaptive, seed=seed,
    )  # fmt: skip
    check_packages(lora=bool(training.lora))
    check_progress(progress)
    folder = _checked_folder(out)
    for name in _MADE_FOR_ONE:
        if options.get(name):
            raise OptionError(f"`{name}` must be left out: it is fitted to vectors that tuning changes. Add it after.")
    data = read_pairs(pairs)
    data.split(training.held_out, training.seed)  # too few rows are refused before the model is loaded, and wrong tasks
    scored = tasks if (not isinstance(tasks, tuple) or tasks) and task_sources(tasks) else None
    encoder = _encoder(model, layer, options)
    check_training(encoder, data, training)
    with folder_lock(folder):
        _claim(folder, {"pairs": data.digest, "encoder": encoder.spec.digest, **asdict(training)})
        before, failed = _scores(encoder, scored, folder, "before", progress)
        trained = _trained(encoder, folder, lambda: train(encoder, data, training, folder, Stage(progress, "training")))
        after, failed_after = _scores(encoder, scored, folder, "after", progress)
        how = {"Pairs": f"{data.name}, {len(data.rows)} rows", **trained.words, **_cost(encoder), **versions()}
        frame = pl.concat([before, after])
        result = TuneResult(frame, folder, encoder, trained, how, (*failed, *failed_after))
        result.save()
    return result


def _scores(
    encoder: LayerEncoder, tasks: Any, folder: Path, when: str, progress: Progress | None
) -> tuple[pl.DataFrame, list[str]]:
    """Return the scores of every layer as it is now, and the tasks that failed; nothing without tasks."""
    if tasks is None:
        return tidy_frame([]), []
    report = None if progress is None else lambda stage, *done: progress(f"{when}: {stage}", *done)
    # One worker: what mteb confirms here is little, and starting processes takes longer.
    settings = SweepSettings(workers=1)
    found = sweep(encoder, tasks, out=folder / when, baselines=False, progress=report, settings=settings)
    labels = task_labels(found.frame["dataset"].unique().to_list())
    frame = found.frame.filter(pl.col("kind") == "score").with_columns(
        pl.lit(when).alias("revision"), pl.col("dataset").replace(labels)
    )
    return frame, [f"{task} failed {when}: {error}" for task, error in found.failures.items()]


def _encoder(model: str, layer: Layer, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the cut encoder, in float32 unless another dtype is asked for: steps of half precision are lost."""
    encoder = LayerEncoder(model, layer, **{"dtype": "float32", **options})
    if encoder.media != ["text"] or encoder.mixture:
        what = "several layers" if encoder.mixture else " and ".join(encoder.media)
        raise OptionError(f"`model` must be of text alone, cut at one layer, to be tuned, but got {what}.")
    encoder.check_export()  # what cannot be written in the end is refused now
    return encoder


def _checked_folder(out: Path | str) -> Path:
    """Return the folder of a run, or raise where it holds anything else."""
    check_path("out", out)
    if out is None:
        raise OptionError("`out` must be a folder, but got None.")
    folder = expand_home(out)
    held = {one.name for one in folder.iterdir()} if folder.is_dir() else set()
    if held - {LOCK} and _RUN not in held:  # a run that was killed at once left its lock alone
        raise OptionError(f"`out` must be a new or empty folder, or that of a run before, but {folder} holds others.")
    return folder


def _claim(folder: Path, given: dict[str, Any]) -> None:
    """Write down what a run is given, or raise where the folder is that of another run."""
    given = json.loads(json.dumps(given))  # as it is read again
    kept = read_artifact(
        folder / _RUN, lambda path: parse_json_object(read_text_file(path, OptionError), str(path), OptionError)
    )
    if kept is None:
        write_file(folder / _RUN, json.dumps(given, indent=2).encode())
    elif kept != given:
        changed = ", ".join(name for name in given if kept.get(name) != given[name])
        raise OptionError(
            f"`out` must be new, or called with the same arguments to go on, but the run in {folder} had other values "
            f"of: {changed}. Name another folder, or remove this one."
        )


def _trained(encoder: LayerEncoder, folder: Path, run: Callable[[], Trained]) -> Trained:
    """Tune an encoder and write its plain folder, or load what the run before did."""
    home = folder / "model"
    done = read_artifact(folder / _DONE, read_trained) if home.is_dir() else None
    if done is not None:
        encoder.load_state_dict(SentenceTransformer(str(home), device="cpu").state_dict())
    else:
        with isolated_random():
            done = run()
        encoder.save_pretrained(str(home))
        write_frame(done.metrics, folder / METRICS)
        write_file(folder / _DONE, json.dumps(done.to_json()).encode())
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # three times the weights each
    return done


def _cost(encoder: LayerEncoder) -> dict[str, str]:
    count = sum(one.numel() for one in encoder.parameters())
    return {"Layer": f"{encoder.layer} of {encoder.num_layers}", "Parameters": f"{count / 1e6:.1f}M"}
