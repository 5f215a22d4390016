"""Preview a sweep: the data of the tasks, the lengths of texts, and estimates of time and disk space."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, Unpack, cast

import numpy as np
from mteb.abstasks import AbsTask

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder, complete_encoder
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.reading.batches import batches_of, count_tokens, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader, site_layers
from midlayer_encoders.recipes import Recipe, fitting_recipes, recipes_of
from midlayer_encoders.scoring import resampled_scores
from midlayer_encoders.scoring.recording import Recorded, record, scores_together
from midlayer_encoders.sweeping.baselines import MINILM, MINILM_PARAMETERS, baselines_for, missing_baselines
from midlayer_encoders.sweeping.embedder import item_key, max_batch_texts, num_dims, store_key
from midlayer_encoders.sweeping.layer_sweep import SweepSettings
from midlayer_encoders.sweeping.mteb_jobs import Prompts, quiet_mteb, with_data
from midlayer_encoders.sweeping.notes import TOGETHER
from midlayer_encoders.sweeping.task_scoring import MAX_CONFIRMED
from midlayer_encoders.tasks import (
    TaskSource,
    TextsSource,
    isolated_random,
    limited_sources,
    task_label,
    task_sources,
    task_texts,
)
from midlayer_encoders.tasks.overview import TaskOverview, task_overview
from midlayer_encoders.tasks.sources import Tasks, task_items
from midlayer_encoders.validation import check_flag

_MAX_COUNTED = 20_000  # texts of a task whose tokens are counted
_TIMED_SHARES = (0.5, 0.9, 0.1, 0.7, 0.3)  # positions of the timed batches among all tokens
_MAX_SECONDS = 15.0  # after which no other batch, or task, is timed
_MAX_NUMBERS = 1 << 28  # in a layer of a task whose scoring is timed

_Pair: TypeAlias = tuple[str, str]  # a prompt and a text


@dataclass(frozen=True, kw_only=True)
class TaskPreview:
    """What a sweep would do with one task.

    Attributes:
        name: name of the task, or the argument that does not name one.
        error: why the sweep would reject it; ``None`` if it would not.
        data: summary of its data.
        scoring: all layers together, or by mteb, and why.
        texts: distinct texts to embed, each with its prompt.
        tokens: ``median``, ``95 %`` and ``longest`` number of tokens before truncation; empty without a model.
        truncated: share of texts that are longer than the model's limit.
    """

    name: str
    error: str | None = None
    data: TaskOverview | None = None
    scoring: str = ""
    texts: int = 0
    tokens: Mapping[str, int] = field(default_factory=dict)
    truncated: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a sweep would do.

    Attributes:
        tasks: preview of each task.
        model: name of the model.
        error: why the model cannot be swept; ``None`` if it can.
        layers: number of layers to score.
        dim: number of dimensions of a vector.
        max_tokens: number of tokens after which a text is truncated; ``None`` for no limit.
        texts: distinct texts to embed, over all tasks.
        device: device of the model.
        seconds: estimates of ``embedding``, ``scoring``, ``other`` and ``whole`` from a few batches, without imports,
            starting workers, TF-IDF and BM25.
        timed: number of timed batches.
        not_timed: tasks whose scoring is not in the estimate.
        store_bytes: disk space of the vectors.
        missing: baselines that are not installed.
    """

    tasks: Sequence[TaskPreview]
    model: str
    error: str | None = None
    layers: int = 0
    dim: int = 0
    max_tokens: int | None = None
    texts: int = 0
    device: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    timed: int = 0
    not_timed: Sequence[str] = ()
    store_bytes: int = 0
    missing: Sequence[str] = ()


def preview(
    model: str | LayerEncoder,
    tasks: Tasks,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    metrics: str | Sequence[str] = (),
    baselines: bool = True,
    progress: Progress | None = None,
    settings: SweepSettings | None = None,
    **options: Unpack[EncoderKeywords],
) -> Preview:
    """Return what :func:`sweep` would do with the same arguments, without writing anything.

    The result contains the error of a task that would be rejected, and of a model that cannot be loaded. The time is
    estimated from a few batches of the tasks' texts, and from scoring one layer of random vectors on each task.

    Args:
        model: as in :func:`sweep`.
        tasks: as in :func:`sweep`.
        text_column: as in :func:`sweep`.
        label_column: as in :func:`sweep`.
        limit: as in :func:`sweep`.
        layers: as in :func:`sweep`.
        site: as in :func:`sweep`.
        recipes: as in :func:`sweep`.
        metrics: as in :func:`sweep`.
        baselines: as in :func:`sweep`.
        progress: called with the stages ``"looking"`` (tasks) and ``"timing"`` (batches and tasks).
        settings: as in :func:`sweep`.
        options: as in :func:`sweep`.
    """
    settings = SweepSettings.with_deprecated(settings, cast(dict[str, Any], options))
    encoder, error = _load(model, options)
    passes = num_passes(metrics) if metrics else 0
    summary: dict[str, Any] = {"model": str(model), "error": error}
    if encoder is not None:  # rejects other invalid arguments before tasks are read
        swept_layers = site_layers(layers, encoder.layer, site, name=encoder.name)
        encoders = [encoder]
        if recipes is not None:
            candidates = fitting_recipes(encoder, recipes_of("recipes", recipes))
            encoders = [encoder.with_recipe(recipe.apart()) for recipe in candidates]
        summary |= {
            "model": encoder.name,
            "layers": len(swept_layers),
            "dim": num_dims(encoder, encoder.norm),
            "max_tokens": encoder.max_seq_length,
            "device": str(encoder.device),
        }
    items = task_items(tasks)
    looking = Stage(progress, "looking", len(items))
    inspected: list[_InspectedTask] = []
    for item in items:
        inspected += _inspect(item, encoder, limit, text_column=text_column, label_column=label_column)
        looking.step()
    summary["tasks"] = [task.preview for task in inspected]
    if check_flag("baselines", baselines):
        summary["missing"] = missing_baselines(task.task for task in inspected if task.task is not None)
    pairs = list(dict.fromkeys(pair for task in inspected for pair in task.pairs))
    if encoder is None or not pairs:
        return Preview(**summary)
    timing = Stage(progress, "timing")
    tokens = tokens_that_fit(encoder) if settings.token_budget == "auto" else settings.token_budget
    one_pass, timed = _time_embedding(encoder, swept_layers, site, tokens, pairs, timing)
    one_layer, not_timed = _time_scoring(encoder, [task for task in inspected if task.task is not None], timing)
    by_store = {store_key(each.spec): each for each in encoders}  # recipes with the same vectors share a pass
    sample = [text for _, text in _sample(pairs, 512)]
    lengths = [sum(count_tokens(each, sample)) for each in (encoder, *by_store.values())]
    metric_passes = passes * min(settings.metric_texts, len(pairs)) / len(pairs) * len(encoders)
    size = sum(parameter.numel() for parameter in encoder.parameters())
    has_minilm = baselines and any(each.name == MINILM for each in baselines_for(encoder, Stage(None, "")))
    seconds = {
        "embedding": one_pass * sum(lengths[1:]) / lengths[0],
        "scoring": one_layer * (len(swept_layers) + MAX_CONFIRMED) * len(encoders),
        "other": one_pass * (metric_passes + has_minilm * MINILM_PARAMETERS / size),
    }
    numbers = len(pairs) * len(swept_layers) * summary["dim"] * len(by_store)
    return Preview(
        **summary,
        texts=len(pairs),
        seconds=seconds | {"whole": sum(seconds.values())},
        timed=timed,
        not_timed=not_timed,
        store_bytes=numbers * np.dtype(settings.store_dtype).itemsize,
    )


def _load(model: str | LayerEncoder, options: Mapping[str, Any]) -> tuple[LayerEncoder | None, str | None]:
    """Return the encoder, or why there is none."""
    try:
        encoder = model if isinstance(model, LayerEncoder) else complete_encoder(model, options)
    except (MidlayerError, OSError) as error:
        return None, str(error)
    if encoder.media != ["text"]:
        return None, f"{encoder.name} takes {', '.join(encoder.media)}: a preview needs a text model."
    return encoder, None


@dataclass
class _InspectedTask:
    """The preview of a task, its texts with their prompts, and how mteb evaluates it."""

    preview: TaskPreview
    task: AbsTask | None = None
    pairs: Sequence[_Pair] = ()
    recorded: Sequence[Recorded] = ()


def _inspect(
    item: Any, encoder: LayerEncoder | None, limit: int | None = None, **columns: str | None
) -> list[_InspectedTask]:
    """Return the tasks that an argument names, or its error."""
    try:
        sources = limited_sources(task_sources(item, **columns), limit)
    except MidlayerError as error:
        name = str(item) if isinstance(item, str | Path) else "data"
        return [_InspectedTask(TaskPreview(name=name, error=str(error)))]
    inspected = []
    for source in sources:
        try:
            with isolated_random(), quiet_mteb():
                inspected.append(_inspect_source(source, encoder))
        except Exception as error:  # the failure of one task does not stop the others, as in a sweep
            message = f"{type(error).__name__}: {error}"
            inspected.append(_InspectedTask(TaskPreview(name=task_label(source.name), error=message)))
    return inspected


def _inspect_source(source: TaskSource, encoder: LayerEncoder | None) -> _InspectedTask:
    label = task_label(source.name)
    if isinstance(source, TextsSource):
        data = task_overview(source, None)
        texts = [("", text) for text in dict.fromkeys(source.texts())]
        lengths = _lengths(encoder, texts) if encoder is not None else {}
        return _InspectedTask(TaskPreview(name=label, data=data, scoring="none: it has no labels", **lengths))
    task = with_data(source).make()
    data = task_overview(source, task)
    reason = scores_together(task)
    scoring = TOGETHER if reason is None else f"by mteb, because {reason}"
    task_preview = TaskPreview(name=label, data=data, scoring=scoring)
    if encoder is None:
        return _InspectedTask(task_preview, task)
    prompts = Prompts(encoder)
    distinct = dict[_Pair, None]()

    def keys(inputs: Any, *, task_metadata: Any, prompt_type: Any) -> list[str]:
        prompt = prompts.choose(task_metadata, prompt_type)
        texts = [text for batch in inputs for text in batch["text"]]
        distinct.update(dict.fromkeys((prompt, text) for text in texts))
        return [item_key(text, prompt) for text in texts]

    recorded: Sequence[Recorded] = ()
    if reason is None:
        recorded = record(task, keys, similarity=encoder.spec.similarity)
    else:
        prompt = prompts.choose(task.metadata, None)
        distinct.update(dict.fromkeys((prompt, text) for text in task_texts(task)))
    pairs = list(distinct)
    task_preview = replace(task_preview, texts=len(pairs), **_lengths(encoder, pairs))
    return _InspectedTask(task_preview, task, pairs, recorded)


def _lengths(encoder: LayerEncoder, pairs: Sequence[_Pair]) -> dict[str, Any]:
    """Return the numbers of tokens of texts, and the share of truncated texts."""
    counts: list[int] = []
    sample = _sample(pairs)
    for start in range(0, len(sample), 1024):
        texts = [prompt + text for prompt, text in sample[start : start + 1024]]
        counts += map(len, encoder.tokenizer(texts, truncation=False, verbose=False)["input_ids"])
    counts.sort()
    limit = encoder.max_seq_length
    return {
        "tokens": {"median": counts[len(counts) // 2], "95 %": counts[len(counts) * 95 // 100], "longest": counts[-1]},
        "truncated": sum(count > limit for count in counts) / len(counts) if limit is not None else 0.0,
    }


def _sample(pairs: Sequence[_Pair], count: int = _MAX_COUNTED) -> list[_Pair]:
    """Return a fixed random sample, or all pairs if there are no more."""
    return random.Random(0).sample(pairs, count) if len(pairs) > count else list(pairs)


def _time_embedding(
    encoder: LayerEncoder, layers: Sequence[int], site: ReadSite, tokens: int, pairs: Sequence[_Pair], stage: Stage
) -> tuple[float, int]:
    """Return an estimate of the seconds that a pass over all texts takes, and the number of timed batches."""
    sample = _sample(pairs)
    texts = [prompt + text for prompt, text in sample]
    max_texts = max_batch_texts(tokens, len(layers), num_dims(encoder, encoder.norm))
    plan = batches_of(encoder, texts, token_budget=tokens, max_texts=max_texts)
    lengths = count_tokens(encoder, texts)
    longest = np.array([max(lengths[index] for index in batch) for batch in plan])
    padded = longest * [len(batch) for batch in plan]
    middles = (np.cumsum(padded) - padded / 2) / padded.sum()
    # Spread over the tokens, those in the middle first; the shortest batch warms up.
    batches = list(dict.fromkeys(int(np.abs(middles - share).argmin()) for share in _TIMED_SHARES))
    stage.expect(len(batches))
    reader = layer_reader(encoder, layers=layers, site=site)
    rates: list[float] = []  # seconds per padded token
    with closing(reader.passes(texts, [plan[-1], *(plan[index] for index in batches)])) as passes:
        next(passes).vectors()
        begin = start = time.perf_counter()
        for index, passed in zip(batches, passes, strict=False):
            passed.vectors()
            now = time.perf_counter()
            rates.append((now - start) / padded[index])
            start = now
            stage.step()
            if now - begin > _MAX_SECONDS:
                stage.expect(len(rates) - len(batches))
                break
    timed_lengths = longest[batches[: len(rates)]]
    nearest = np.abs(longest[:, None] - timed_lengths).argmin(axis=1)
    seconds = float(padded @ np.array(rates)[nearest])
    return seconds * len(pairs) / len(sample), len(rates)


def _time_scoring(encoder: LayerEncoder, tasks: Sequence[_InspectedTask], stage: Stage) -> tuple[float, list[str]]:
    """Return the seconds to score one layer on all tasks, with random vectors, and the tasks left out."""
    dim = num_dims(encoder, encoder.norm)
    counts = [max((len(evaluation.keys) for evaluation in task.recorded), default=0) for task in tasks]
    max_rows = max((count for count in counts if count * dim <= _MAX_NUMBERS), default=0)
    vectors = np.random.default_rng(0).standard_normal((max_rows, dim), dtype=np.float32)
    seconds = 0.0
    left_out: list[str] = []
    for task, count in zip(tasks, counts, strict=True):
        if not 0 < count <= max_rows or seconds > _MAX_SECONDS:
            left_out.append(task.preview.name)
            continue
        stage.expect(1)
        start = time.perf_counter()
        for evaluation in task.recorded:
            resampled_scores(
                evaluation.scorer, evaluation.keys, [0], lambda _, keys: vectors[: len(keys)], device=encoder.device
            )
        seconds += time.perf_counter() - start
        stage.step()
    return seconds, left_out
