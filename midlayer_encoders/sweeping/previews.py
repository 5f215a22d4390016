"""Preview a sweep: what the tasks are read as, how they are scored, and estimates of time and disk space."""

import random
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack, cast

import numpy as np

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Layer, Progress, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder, complete_encoder
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.models.anatomy import resolve_layers
from midlayer_encoders.reading.batches import batches_of, count_tokens, tokens_that_fit
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.recipes import Recipe, fitting_recipes, recipes_of
from midlayer_encoders.scoring.recording import record, scores_together
from midlayer_encoders.sweeping.embedder import item_key, max_batch_texts, num_dims, store_key
from midlayer_encoders.sweeping.layer_sweep import SweepSettings
from midlayer_encoders.sweeping.mteb_jobs import Prompts, quiet_mteb, with_data
from midlayer_encoders.sweeping.notes import TOGETHER
from midlayer_encoders.tasks import task_label
from midlayer_encoders.tasks.baselines import task_texts
from midlayer_encoders.tasks.sources import Tasks, TaskSource, TextsSource, limited_sources, task_items, task_sources

_MAX_PLANNED = 20_000  # texts whose batches are planned
_TIMED_BATCHES = 5
_MAX_SECONDS = 15.0  # after which no other batch is timed


@dataclass(frozen=True, kw_only=True)
class TaskPreview:
    """What a sweep would do with one task.

    Attributes:
        name: name of the task, or the argument that does not name one.
        error: why the sweep would reject it; ``None`` if it would not.
        type: type of the task.
        why: the reason for this type, such as the names of the columns.
        note: changes to the rows that their owner should know about.
        scoring: all layers together, or by mteb, and why.
        texts: distinct texts to embed, each with its prompt.
    """

    name: str
    error: str | None = None
    type: str = ""
    why: str = ""
    note: str = ""
    scoring: str = ""
    texts: int = 0


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a sweep would do.

    Attributes:
        tasks: preview of each task.
        model: name of the model.
        error: why the model cannot be swept; ``None`` if it can.
        layers: number of layers to score.
        dim: number of dimensions of a vector.
        texts: distinct texts to embed, over all tasks.
        device: device of the model.
        seconds: estimate of the time to embed all texts under all recipes, from a few batches.
        store_bytes: disk space of the vectors.
    """

    tasks: Sequence[TaskPreview]
    model: str
    error: str | None = None
    layers: int = 0
    dim: int = 0
    texts: int = 0
    device: str = ""
    seconds: float = 0.0
    store_bytes: int = 0


def preview(
    model: str | LayerEncoder,
    tasks: Tasks,
    *,
    text_column: str | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    layers: Sequence[Layer] | str = "all",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    progress: Progress | None = None,
    settings: SweepSettings | None = None,
    **options: Unpack[EncoderKeywords],
) -> Preview:
    """Return what :func:`sweep` would do with the same arguments, without writing anything.

    The result contains the error of a task that would be rejected, and of a model that cannot be loaded. The time is
    estimated from a few batches of the tasks' texts.

    Args:
        model: as in :func:`sweep`.
        tasks: as in :func:`sweep`.
        text_column: as in :func:`sweep`.
        label_column: as in :func:`sweep`.
        limit: as in :func:`sweep`.
        layers: as in :func:`sweep`.
        recipes: as in :func:`sweep`.
        progress: called with the stages ``"looking"`` (tasks) and ``"timing"`` (batches).
        settings: as in :func:`sweep`.
        options: as in :func:`sweep`.
    """
    settings = SweepSettings.with_deprecated(settings, cast(dict[str, Any], options))
    encoder, error = _load(model, options)
    encoders = [] if encoder is None else [encoder]
    swept_layers: list[int] = []
    if encoder is not None:  # rejects other invalid arguments before tasks are read
        swept_layers = resolve_layers(layers, encoder.layer, name=encoder.name)
        if recipes is not None:
            candidates = fitting_recipes(encoder, recipes_of("recipes", recipes))
            encoders = [encoder.with_recipe(recipe.apart()) for recipe in candidates]
    items = task_items(tasks)
    looking = Stage(progress, "looking", len(items))
    previews: list[TaskPreview] = []
    texts: set[str] = set()  # with their prompts
    for item in items:
        previews += _inspect(item, encoder, texts, limit, text_column=text_column, label_column=label_column)
        looking.step()
    if encoder is None:
        return Preview(tasks=previews, model=str(model), error=error)
    dim = num_dims(encoder, encoder.norm)
    by_store = {store_key(each.spec): each for each in encoders}  # recipes with the same vectors share a pass
    seconds = 0.0
    if texts:
        tokens = tokens_that_fit(encoder) if settings.token_budget == "auto" else settings.token_budget
        stage = Stage(progress, "timing", _TIMED_BATCHES)
        seconds = _time_embedding(encoder, swept_layers, tokens, sorted(texts), stage)
        sample = _sample(sorted(texts), 512)
        lengths = [sum(count_tokens(each, sample)) for each in (encoder, *by_store.values())]
        seconds *= sum(lengths[1:]) / lengths[0]
    numbers = len(texts) * len(swept_layers) * dim * len(by_store)
    return Preview(
        tasks=previews,
        model=encoder.name,
        layers=len(swept_layers),
        dim=dim,
        texts=len(texts),
        device=str(encoder.device),
        seconds=seconds,
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


def _inspect(
    item: Any, encoder: LayerEncoder | None, texts: set[str], limit: int | None = None, **columns: str | None
) -> list[TaskPreview]:
    """Return the previews of the tasks that an argument names, or its error; add the texts to embed to ``texts``."""
    try:
        sources = limited_sources(task_sources(item, **columns), limit)
    except MidlayerError as error:
        return [TaskPreview(name=str(item) if isinstance(item, str | Path) else "data", error=str(error))]
    previews = []
    for source in sources:
        try:
            with isolated_random(), quiet_mteb():
                previews.append(_inspect_source(source, encoder, texts))
        except Exception as error:  # the failure of one task does not stop the others, as in a sweep
            message = f"{type(error).__name__}: {error}"
            previews.append(TaskPreview(name=task_label(source.name), error=message))
    return previews


def _inspect_source(source: TaskSource, encoder: LayerEncoder | None, texts: set[str]) -> TaskPreview:
    label = task_label(source.name)
    if isinstance(source, TextsSource):
        return TaskPreview(name=label, type="Unlabeled", why=source.why, scoring="none: it has no labels")
    task = with_data(source).make()
    reason = scores_together(task)
    found: set[str] = set()
    if encoder is not None:
        prompts = Prompts(encoder)

        def keys(inputs: Any, *, task_metadata: Any, prompt_type: Any) -> list[str]:
            prompt = prompts.choose(task_metadata, prompt_type)
            prompted = [prompt + text for batch in inputs for text in batch["text"]]
            found.update(prompted)
            return [item_key(text) for text in prompted]

        if reason is None:
            record(task, keys, similarity=encoder.spec.similarity)
        else:
            found.update(prompts.choose(task.metadata, None) + text for text in task_texts(task))
        texts |= found
    data = getattr(task, "data", None)  # only local tasks have it
    return TaskPreview(
        name=label,
        type=str(task.metadata.type),
        why=getattr(data, "why", "") or ("built in" if data is not None else "a task of mteb"),
        note=getattr(data, "note", ""),
        scoring=TOGETHER if reason is None else f"by mteb, because {reason}",
        texts=len(found),
    )


def _sample(texts: Sequence[str], count: int) -> list[str]:
    """Return a fixed random sample, or all texts if there are no more."""
    return random.Random(0).sample(texts, count) if len(texts) > count else list(texts)


def _time_embedding(
    encoder: LayerEncoder, layers: Sequence[int], tokens: int, texts: Sequence[str], stage: Stage
) -> float:
    """Return an estimate of the seconds that a pass over all texts takes, from batches of short to long texts."""
    sample = _sample(texts, _MAX_PLANNED)
    max_texts = max_batch_texts(tokens, len(layers), num_dims(encoder, encoder.norm))
    plan = batches_of(encoder, sample, token_budget=tokens, max_texts=max_texts)
    count = min(_TIMED_BATCHES, len(plan))
    timed = [plan[(2 * number + 1) * len(plan) // (2 * count)] for number in range(count)]
    seconds = []
    with closing(layer_reader(encoder, layers=layers).passes(sample, [plan[-1], *timed])) as passes:
        next(passes).vectors()  # warms up
        begin = start = time.perf_counter()
        for passed in passes:
            passed.vectors()
            seconds.append(time.perf_counter() - start)
            stage.step()
            start = time.perf_counter()
            if start - begin > _MAX_SECONDS:
                break
    stage.step(stage.total - stage.done)
    return float(np.mean(seconds)) * len(plan) * len(texts) / len(sample)
