"""Sweep every layer over every task, under one recipe or several: embed each text once, then score from the store."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import polars as pl

from midlayer_encoders._isolation import isolated_random, usable_cores
from midlayer_encoders._types import EncoderSpec, Progress, Stage, content_digest
from midlayer_encoders.encoder.options import make_options
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.whole_model import load_encoder
from midlayer_encoders.errors import FATAL, OptionError
from midlayer_encoders.files import LOCK, folder_lock, make_folder, write_file
from midlayer_encoders.frame.schema import check_fork, tidy_frame
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.frame.tidy_result import kept_frame
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.recipes import PLAIN, SMALLEST_SAMPLE, Recipe, fitting_recipes, recipes_of
from midlayer_encoders.report.results import versions
from midlayer_encoders.sweeping.baselines import baselines_for
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.compression import Compression
from midlayer_encoders.sweeping.embedder import (
    Embedder,
    Vectors,
    item_key,
    joined_dim,
    map_identity,
    mapped_store,
    open_store,
    store_key,
)
from midlayer_encoders.sweeping.mteb_jobs import Job, Prompts, StoredLayer, check_data, quiet_mteb, with_data
from midlayer_encoders.sweeping.notes import ScoringResult, score_remarks, sweep_notes
from midlayer_encoders.sweeping.request import SweepArguments
from midlayer_encoders.sweeping.scoring.recording import record, scores_together
from midlayer_encoders.sweeping.store import text_key
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.sweeping.task_scoring import TaskScorer
from midlayer_encoders.tasks.sources import TaskSource
from midlayer_encoders.tasks.tfidf import source_texts

_log = logging.getLogger(__name__)
_CENTER_TEXTS = 512  # enough for a stable mean
_METRICS = 1  # raised when the value of a metric changes
_PLURALS = {"text": "texts", "image": "images", "audio": "waveforms"}


def run_sweep(request: SweepArguments) -> SweepResult:
    """Run a sweep in this process; the sweeps of several recipes share the store, and baselines are scored once."""
    check_fork()
    if request.out is None or not request.out.is_dir():  # an earlier run may have all scores
        check_data(request.sources)
    encoder = load_encoder(request.model, request.options)
    sweeps = single_sweeps(request, encoder)
    first = next(sweeps)  # which rejects unsuitable recipes
    if request.recipes is None:
        (result,) = first.run().values()
        return result
    folder = request.folder(encoder)
    with folder_lock(folder):
        parts = {name: each for single in chain([first], sweeps) for name, each in single.run().items()}
        result = SweepResult.of(parts, folder)
        result.save()
        return result


def single_sweeps(request: SweepArguments, encoder: LayerEncoder, only: str | None = None) -> Iterator[SingleSweep]:
    """Yield the sweep under each recipe, or under one of them; the first recipe's scores the baselines."""
    if request.recipes is None:
        yield SingleSweep(request, encoder)
        return
    fitting = fitting_recipes(encoder, request.recipes)
    recipes = [recipe for recipe in fitting if only in (None, recipe.name)]
    if "Normalize" in encoder.after_pooling:  # spans are not scaled before they are joined
        recipes = [replace(recipe, normalize=True) if recipe.join else recipe for recipe in recipes]
    # This rejects an unsuitable recipe before a task runs. Spans are joined when they are read from the store.
    encoders = [encoder.with_recipe(recipe.apart()) for recipe in recipes]
    centered = [recipe.name for recipe in recipes if recipe.center]
    if centered and request.center_texts is None:
        request.center_texts = single_line_texts(request.sources, Stage(request.progress, "reading"))
    if centered and len(request.center_texts or []) < SMALLEST_SAMPLE:
        raise OptionError(
            f"`recipes` must not include {centered[0]!r} for these tasks: centering needs at least "
            f"{SMALLEST_SAMPLE} single-line texts, and the tasks have {len(request.center_texts or [])}."
        )
    folder = request.folder(encoder)
    latest: dict[str, tuple[int, int]] = {}
    for place, (recipe, recipe_encoder) in enumerate(zip(recipes, encoders, strict=True)):
        progress = request.progress
        recipe_request = request.change(
            out=folder / "recipes" / _folder_name(recipe.name),
            store=request.store or folder / "embeddings",
            baselines=request.baselines and recipe.name == fitting[0].name,
            progress=progress and _accumulate_progress(progress, latest, len(recipes) - place),
        )
        yield SingleSweep(recipe_request, recipe_encoder, recipe, folder / "center.txt")


def _accumulate_progress(progress: Progress, latest: dict[str, tuple[int, int]], sweeps_left: int) -> Progress:
    """Return a callback that adds the steps of the next sweep to the steps of earlier ones, which ``latest`` holds.

    Each of the ``sweeps_left`` sweeps plans the same tasks and scores the same layers.
    """
    earlier = dict(latest)

    def report(stage: str, done: int, total: int) -> None:
        earlier_done, earlier_total = earlier.get(stage, (0, 0))
        latest[stage] = earlier_done + done, earlier_total + total
        times = sweeps_left if stage in ("planning", "scoring") else 1
        progress(stage, earlier_done + done, earlier_total + total * times)

    return report


def _folder_name(recipe: str) -> str:
    """Return a folder name that is unique to the name of a recipe.

    Example:
        >>> _folder_name("one-word+center"), _folder_name("My recipe")
        ('one-word+center', 'My_recipe-3a888024')
    """
    if re.fullmatch(r"[a-z0-9][a-z0-9+-]{0,63}", recipe):
        return recipe
    # Some file systems ignore case.
    return f"{re.sub(r'[^a-zA-Z0-9+-]+', '_', recipe)[:64]}-{content_digest(recipe, 4)}"


@dataclass
class SingleSweep:
    """A sweep under one recipe."""

    request: SweepArguments
    encoder: LayerEncoder
    recipe: Recipe = recipes_of("recipe", PLAIN)[0]
    center_file: Path = Path("center.txt")

    def __post_init__(self) -> None:
        encoder, request = self.encoder, self.request
        self.layers = encoder.vector_reader(request.layers).layers
        if request.has_metrics:
            encoder.check_one_stack("metrics")
        self.spec = encoder.spec
        self.width = joined_dim(encoder.get_embedding_dimension() or 0, self.recipe.join)
        largest = max((each.dims or 0 for each in request.compressions), default=0)
        if largest > self.width:
            raise OptionError(
                f"`dims` must be at most {self.width}, the dimensions of {encoder.name}, but got {largest}."
            )
        self.compressions = [each for each in request.compressions if each.dims != self.width]
        self.folder = request.folder(encoder)
        self.center_texts = (request.center_texts or []) if self.recipe.center else []
        self.baselines = baselines_for(encoder, Stage(request.progress, "comparing")) if request.baselines else []

    def run(self) -> dict[str, SweepResult]:
        """Return the result of each compression of the vectors, by name."""
        with folder_lock(self.folder):
            start = time.perf_counter()
            embedder = self.embedder()
            scoring = self._score(self.request.labeled, embedder)
            metrics = self._measure()
            run = {"seconds": f"{time.perf_counter() - start:.0f}", "tokens in a batch": str(embedder.tokens)}
            notes = sweep_notes(
                self.encoder, self.request.sources, scoring.of(Compression()), self.layers, self.baselines, run
            )
            center = {"center": str(self.center_file)} if self.recipe.center else {}
            vectors: dict[str, Any] = {**({"normalize": True} if self.recipe.normalize else {}), **center}
            notes = replace(notes, vectors=vectors, options=self._options(), dimensions=self.width)
            results = {}
            for compression in self.compressions:
                result = self._result(scoring.of(compression), notes, metrics, compression)
                result.save()
                results[", ".join(filter(None, [self.recipe.name, compression.label]))] = result
            return results

    def score_task(self, source: TaskSource) -> dict[str, str]:
        """Score the layers on one of the tasks, for a later :meth:`run` to find, and return errors by task.

        Other processes may score other tasks at the same time, or even the same one.
        """
        make_folder(self.folder)
        (self.folder / LOCK).touch()  # a folder of results, which is not locked here
        scores = self._score([source], self.embedder()).scores
        return {score.task: score.error for score in scores if score.error is not None}

    def embedder(self) -> Embedder:
        """Return what embeds texts into the store."""
        settings, progress = self.request.settings, self.request.progress
        root = self.request.store or self.folder / "embeddings"
        store = open_store(root, self.spec, self.layers, self.encoder, settings.store_dtype)
        stages = Stage(progress, "embedding"), Stage(progress, "planning")
        return Embedder(self.encoder, store, settings.token_budget, *stages)

    def plan(self, store: Vectors, ensure: Callable[[Sequence[Any], Sequence[str], str], None]) -> None:
        """Call a function with the inputs of the tasks that are scored together, in the order of a run."""
        if self.recipe.center:
            prompt = self.encoder.default_prompt
            ensure(self.center_texts, [item_key(text, prompt) for text in self.center_texts], prompt)
        layer = replace(self._layer(store, self.layers[0]), ensure=ensure)
        for source in self.request.labeled:
            try:
                with isolated_random(), quiet_mteb():
                    if scores_together(source.make()) is None:
                        record(with_data(source).make(), layer.keys, similarity=self.spec.similarity)
            except FATAL:
                raise
            except Exception as error:  # scoring the task names it
                _log.debug("%s cannot be planned: %s", source.name, error)

    def _score(self, sources: Sequence[TaskSource], embedder: Embedder) -> ScoringResult:
        """Return the scores of every layer, whose vectors are transformed by the recipe, under each compression."""
        settings, progress = self.request.settings, self.request.progress
        vectors: Vectors = embedder.store
        spec = self.spec
        if self.recipe.changes_vectors or self.recipe.join is not None:
            if self.recipe.center:
                write_file(self.center_file, ("\n".join(self.center_texts) + "\n").encode())
            identity = map_identity(self.recipe, self.center_texts)
            spec = replace(spec, prompting=json.dumps([spec.prompting, identity], sort_keys=True))
            vectors = mapped_store(embedder, self.recipe, self.center_texts)
        layers = [self._layer(vectors, layer, spec, each) for each in self.compressions for layer in self.layers]
        scorer = TaskScorer(
            embedder,
            self.folder / "together" if settings.scoring == "together" else None,
            self.baselines,
            settings.workers or usable_cores(),
            Stage(progress, "scoring"),
            Stage(progress, "confirming"),
        )
        return scorer.score([[Job(source, layer, self.folder / "mteb") for layer in layers] for source in sources])

    def _layer(
        self,
        vectors: Vectors,
        layer: int,
        spec: EncoderSpec | None = None,
        compression: Compression = Compression(),  # noqa: B008  # frozen
    ) -> StoredLayer:
        spec = replace(spec or self.spec, truncate_dim=compression.dims or self.spec.truncate_dim)
        spec = spec.at_layer(self.encoder.layer_argument(layer))
        return StoredLayer(vectors, layer, spec, Prompts(self.encoder), tuple(self.encoder.media), compression)

    def _measure(self) -> pl.DataFrame:
        """Return the metrics of some items of the tasks, from an earlier run if nothing has changed."""
        request = self.request
        if not request.has_metrics:
            return tidy_frame([])
        medium = self.encoder.media[0]
        sample = _sample(request.sources, medium, request.settings.metric_texts)
        measure = partial(
            measure_layers,
            self.encoder,
            sample,
            dataset=f"{len(sample)} {_PLURALS[medium]} of the tasks",
            metrics=request.metrics,
            layers=self.layers,
            views=request.settings.views,
            progress=request.progress,
        )
        return kept_frame(self.folder / "metrics" / f"{self._metrics_key(sample)}.parquet", measure)

    def _metrics_key(self, sample: Sequence[Any]) -> str:
        """Return the key of the metrics of some items: everything that changes them."""
        keys = [item_key(item) for item in sample]
        request = [self.request.metrics, self.layers, self.request.settings.views]
        identity = [_METRICS, versions(("midlayer-encoders",)), store_key(self.spec), keys, *request]
        return content_digest(json.dumps(identity))

    def _result(
        self, scoring: ScoringResult, notes: Notes, metrics: pl.DataFrame, compression: Compression
    ) -> SweepResult:
        """Return the result of a compression, whose notes differ from a whole vector's, and without metrics."""
        folder = self.folder
        dims = compression.dims or self.width
        if len(self.request.compressions) > 1:
            how = {"recipe": self.recipe.name, "dims": dims, "precision": compression.precision}
            notes = replace(notes, compression=how, dimensions=dims)
        if compression != Compression():
            folder = folder.with_name(f"{folder.name},{compression.label.replace(' dims', '').replace(', ', '-')}")
            options = notes.options | ({} if compression.dims is None else {"truncate_dim": dims})
            remarks = score_remarks(self.request.sources, scoring, {})
            notes = replace(notes, options=options, failures=scoring.failures, remarks=remarks)
        frames = [scoring.frame("score", self.spec), scoring.frame("confirmed", self.spec)]
        frames += [metrics] if compression == Compression() else []
        rows = [(score.task, score.layer, score.resampled) for score in scoring.scores if score.resampled]
        resamples = pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row")
        num_kept = sum(score.kept for score in scoring.scores)
        return SweepResult(pl.concat(frames), folder, notes, resamples=resamples, num_kept=num_kept)

    def _options(self) -> dict[str, Any]:
        """Return the options that recreate the encoder of a layer, whose spans are joined."""
        options = self.encoder.options
        if self.recipe.join is not None:  # the encoder of the sweep keeps its spans apart
            recipe_fields = self.recipe.non_defaults()
            changed = {name: value for name, value in options.non_defaults().items() if name not in recipe_fields}
            options = make_options({**changed, "recipe": self.recipe.before_vectors()})
        return options.recreating()


def single_line_texts(sources: Sequence[TaskSource], stage: Stage) -> list[str]:
    """Return some of the tasks' texts that have one line each, so that a text file can hold them."""
    stage.expect(len(sources))
    texts: set[str] = set()
    for source in sources:
        texts.update(source_texts(source))
        stage.step()
    lines = (text for text in texts if text.strip() and len(text.splitlines()) == 1)
    return sorted(lines, key=text_key)[:_CENTER_TEXTS]


def _sample(sources: Sequence[TaskSource], medium: str, count: int) -> list[Any]:
    """Return some of the tasks' texts, images or waveforms; the order of the tasks does not matter."""
    if medium == "text":
        texts = {text for source in sources for text in source_texts(source) if text.strip()}
        return sorted(texts, key=text_key)[:count]
    items = {item_key(item): item for source in sources for item in _media(with_data(source).make().dataset, medium)}
    return [items[key] for key in sorted(items)[:count]]


def _media(dataset: Any, medium: str) -> Iterator[Any]:
    """Yield the images or audio in all subsets and splits: columns that ``datasets`` decodes, or named as mteb does."""
    if hasattr(dataset, "features") and not isinstance(dataset.column_names, dict):
        for column, feature in dataset.features.items():
            if medium in (column, type(feature).__name__.lower()):
                yield from (item for item in dataset[column] if item is not None)
    elif isinstance(dataset, Mapping):
        for part in dataset.values():
            yield from _media(part, medium)
