"""What a sweep would do, before it is done: the tasks' data, how long texts are, and about what it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from midlayer_encoders._types import Layer, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.measuring import num_passes
from midlayer_encoders.reading.batches import TokenBudget
from midlayer_encoders.reading.reader import site_layers
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.store import StoreDtype
from midlayer_encoders.sweeping.baselines import lacks_bm25
from midlayer_encoders.sweeping.items import item_key
from midlayer_encoders.sweeping.jobs import quiet_mteb
from midlayer_encoders.sweeping.notes import TOGETHER
from midlayer_encoders.sweeping.stored_layer import Prompts, num_dims, store_key
from midlayer_encoders.sweeping.sweep_settings import METRIC_TEXTS
from midlayer_encoders.sweeping.timing import Pair, Timing, minilm_share, some_of, times_longer
from midlayer_encoders.sweeping.together import MOST_CONFIRMED
from midlayer_encoders.tasks import (
    TaskOverview,
    TaskSource,
    TextsSource,
    isolated_random,
    task_label,
    task_overview,
    task_sources,
    task_texts,
)

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

    from midlayer_encoders.scoring.recording import Recorded

__all__ = ["Preview", "TaskPreview", "preview"]


@dataclass(frozen=True, kw_only=True)
class TaskPreview:
    """What a sweep would do with one task.

    Attributes:
        name: of the task, or the word that none could be made of.
        error: why the sweep would refuse it; ``None`` where it would not.
        data: what its data holds.
        scoring: all layers together, or by mteb layer by layer, and why.
        texts: distinct texts to embed, each under its prompt.
        tokens: ``median``, ``95 %`` and ``longest`` of them, before truncation; empty without a model.
        truncated: share of texts longer than the model takes.
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
        tasks: one by one.
        model: its name.
        error: why the model cannot be swept; ``None`` where it can.
        layers: how many would be scored.
        dim: dimensions of a vector.
        max_tokens: after which a text is truncated; ``None`` for no limit.
        texts: distinct texts to embed, over all tasks.
        device: of the model.
        seconds: an estimate of ``embedding``, ``scoring``, ``other`` and ``whole``, from a few batches that were run;
            imports, starting workers, TF-IDF and BM25 come on top.
        timed: how many batches that was.
        not_timed: tasks whose scoring is not in the estimate.
        store_bytes: that the vectors take on disk.
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
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask],
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    metrics: str | Sequence[str] = (),
    store_dtype: StoreDtype = "float32",
    token_budget: TokenBudget = "auto",
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    progress: Progress | None = None,
    **options: Unpack[EncoderKeywords],
) -> Preview:
    """Return what :func:`sweep` would do with the same arguments; nothing is written.

    A task that would be refused is in the result with the reason, and so is a model that cannot be loaded. Time is
    estimated from a few batches of the tasks' own texts, and one layer of random vectors scored on each task.

    Args:
        model: as in :func:`sweep`, and so are the others.
        tasks: likewise.
        layers: likewise.
        site: likewise.
        metrics: likewise.
        store_dtype: likewise.
        token_budget: likewise.
        recipes: likewise.
        progress: called with the stages ``"looking"`` (at tasks) and ``"timing"`` (of batches and tasks).
        options: likewise.
    """
    encoder, error = _loaded(model, options)
    passes = num_passes(metrics) if metrics else 0
    about: dict[str, Any] = {"model": str(model), "error": error}
    if encoder is not None:  # what is wrong in other arguments is raised before the tasks are read
        wanted = site_layers(layers, encoder.layer, site, name=encoder.name)
        made = (
            [encoder.with_recipe(one) for one in recipes_of("recipes", recipes)] if recipes is not None else [encoder]
        )
        about |= {
            "model": encoder.name, "layers": len(wanted), "dim": num_dims(encoder, encoder.norm),
            "max_tokens": encoder.max_seq_length, "device": str(encoder.device),
        }  # fmt: skip
    several = tasks if isinstance(tasks, Sequence) and not isinstance(tasks, str) else [tasks]
    looking = Stage(progress, "looking", len(several))
    looks: list[_Look] = []
    for name in several:
        looks += _looks(name, encoder)
        looking.step()
    about["tasks"] = [look.found for look in looks]
    about["missing"] = lacks_bm25(look.task for look in looks if look.task is not None)
    asked = list(dict.fromkeys(pair for look in looks for pair in look.asked))
    if encoder is None or not asked:
        return Preview(**about)
    stores = {store_key(one.spec): one for one in made}
    timing = Timing(encoder, wanted, site, token_budget, Stage(progress, "timing"))
    one_pass = timing.embedding(asked)
    one_layer, not_timed = timing.scoring([(look.found.name, look.recorded) for look in looks if look.task is not None])
    measured = passes * min(METRIC_TEXTS, len(asked)) / len(asked)
    seconds = {
        "embedding": one_pass * sum(times_longer(encoder, one, asked) for one in stores.values()),
        "scoring": one_layer * (len(wanted) + MOST_CONFIRMED) * len(made),
        "other": one_pass * (measured * len(made) + minilm_share(encoder)),
    }
    numbers = len(asked) * len(wanted) * about["dim"] * len(stores)
    return Preview(
        **about,
        texts=len(asked),
        seconds=seconds | {"whole": sum(seconds.values())},
        timed=timing.timed,
        not_timed=not_timed,
        store_bytes=numbers * (2 if store_dtype == "float16" else 4),
    )


def _loaded(model: str | LayerEncoder, options: Mapping[str, Any]) -> tuple[LayerEncoder | None, str | None]:
    """Return the model, or why there is none whose texts can be counted."""
    try:
        encoder = model if isinstance(model, LayerEncoder) else LayerEncoder(model, -1, **options)
    except (MidlayerError, OSError) as error:
        return None, str(error)
    if "text" not in encoder.media:
        return None, f"{encoder.name} takes {', '.join(encoder.media)}: only texts are counted here."
    return encoder, None


@dataclass
class _Look:
    """A task as far as it was looked at: each text that it asks for, with its prompt, and what it asks of them."""

    found: TaskPreview
    task: AbsTask | None = None
    asked: Sequence[Pair] = ()
    recorded: Sequence[Recorded] = ()


def _looks(name: str | Path | AbsTask, encoder: LayerEncoder | None) -> list[_Look]:
    """Return what a word of the tasks means, one or several, or that it means none."""
    try:
        sources = task_sources(name)
    except MidlayerError as error:
        return [_Look(TaskPreview(name=str(name), error=str(error)))]
    return [_look(source, encoder) for source in sources]


def _look(source: TaskSource, encoder: LayerEncoder | None) -> _Look:
    label = task_label(source.name)
    try:
        with isolated_random(), quiet_mteb():
            return _looked(source, encoder, label)
    except Exception as error:  # whatever a task's data does wrong is that task's failure, as in a sweep
        return _Look(TaskPreview(name=label, error=f"{type(error).__name__}: {error}"))


def _looked(source: TaskSource, encoder: LayerEncoder | None, label: str) -> _Look:
    from midlayer_encoders.scoring.recording import record
    from midlayer_encoders.scoring.support import scores_together

    if isinstance(source, TextsSource):
        texts = list(dict.fromkeys(source.texts()))
        found = TaskPreview(name=label, data=task_overview(source, None), scoring="not at all: it has no labels")
        return _Look(found if encoder is None else replace(found, **_lengths(encoder, [("", text) for text in texts])))
    task = source.make()
    overview = task_overview(source, task)
    why = scores_together(task)
    scoring = TOGETHER if why is None else f"by mteb, because {why}"
    found = TaskPreview(name=label, data=overview, scoring=scoring)
    if encoder is None:
        return _Look(found, task)
    prompts, asked = Prompts.of(encoder), dict[Pair, None]()

    def keys(inputs: Any, *, task_metadata: Any, prompt_type: Any) -> list[str]:
        prompt = prompts.choose(task_metadata, prompt_type)
        texts = [text for batch in inputs for text in batch["text"]]
        asked.update(dict.fromkeys((prompt, text) for text in texts))
        return [item_key(text, prompt) for text in texts]

    recorded: Sequence[Recorded] = ()
    if why is None:
        recorded = record(task, keys, similarity=encoder.spec.similarity)
    else:
        prompt = prompts.choose(task.metadata, None)
        asked.update(dict.fromkeys((prompt, text) for text in task_texts(task)))
    pairs = list(asked)
    return _Look(replace(found, texts=len(pairs), **_lengths(encoder, pairs)), task, pairs, recorded)


def _lengths(encoder: LayerEncoder, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return how many tokens texts have, and the share of those that are truncated."""
    counts: list[int] = []
    some, most = some_of(pairs), encoder.max_seq_length
    for start in range(0, len(some), 1024):
        texts = [prompt + text for prompt, text in some[start : start + 1024]]
        counts += map(len, encoder.tokenizer(texts, truncation=False, verbose=False)["input_ids"])
    counts.sort()
    return {
        "tokens": {
            "median": counts[len(counts) // 2], "95 %": counts[len(counts) * 95 // 100], "longest": counts[-1]
        },
        "truncated": sum(count > most for count in counts) / len(counts) if most is not None else 0.0,
    }  # fmt: skip
