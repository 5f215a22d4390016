"""Sweep one model under one recipe: embed each text once, then score all layers from the store."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import joblib
import polars as pl

from midlayer_encoders._types import EncoderSpec, Stage
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import result_name, result_revision
from midlayer_encoders.files import check_links, folder_lock, write_file
from midlayer_encoders.frame import at_site, tidy_frame, tidy_rows
from midlayer_encoders.measuring import measure_layers
from midlayer_encoders.reading.reader import layer_reader, site_layers
from midlayer_encoders.recipes import PLAIN, RECIPES, Recipe
from midlayer_encoders.store import text_key
from midlayer_encoders.sweeping.baselines import baselines_for
from midlayer_encoders.sweeping.mapped_store import map_identity, mapped_store
from midlayer_encoders.sweeping.mteb_jobs import Job, Score
from midlayer_encoders.sweeping.notes import ScoringResult, sweep_notes
from midlayer_encoders.sweeping.processes import Group
from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts, Vectors, item_key, open_store
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.sweeping.sweep_settings import SweepRequest
from midlayer_encoders.sweeping.task_scoring import BatchScorer, TaskScorer
from midlayer_encoders.tasks import TaskSource, TextsSource, source_texts

_CENTER_TEXTS = 512  # a few hundred texts settle a mean
_PLURALS = {"text": "texts", "image": "images", "audio": "waveforms"}


class SingleSweep:
    """A sweep, or this process's share of it."""

    def __init__(
        self,
        request: SweepRequest,
        encoder: LayerEncoder,
        sources: Sequence[TaskSource],
        group: Group,
        recipe: Recipe = RECIPES[PLAIN],
        center_file: Path = Path("center.txt"),
        center_texts: Sequence[str] = (),
    ) -> None:
        self.request = request
        self.encoder = encoder
        self.sources = sources
        self.group = group
        self.layers = site_layers(request.layers, encoder.layer, request.site, name=encoder.name)
        layer_reader(encoder, layers=self.layers, site=request.site)  # rejects an unreadable site before any work
        self.spec = replace(encoder.spec, site=request.site)
        self.folder = request.folder(encoder)
        self.recipe = recipe
        self.center_file = center_file
        self.center_texts = center_texts if recipe.center else []
        self.progress = request.progress if group.rank == 0 else None
        self.baselines = baselines_for(encoder, Stage(self.progress, "comparing")) if request.baselines else []

    def run(self) -> SweepResult:
        """Return the result, the same in every process."""
        own_store = [] if self.request.store else [self.folder / "embeddings"]
        check_links(self.folder, [self.folder / "mteb", self.folder / "together", *own_store])
        with nullcontext() if self.group.rank else folder_lock(self.folder):
            start = time.perf_counter()
            settings = self.request.settings
            store = self.request.store or self.folder / "embeddings"
            embedder = Embedder(
                self.encoder,
                open_store(store, self.spec, self.layers, self.encoder, settings.store_dtype),
                settings.token_budget,
                Stage(self.progress, "embedding"),
                self.group,
                settings.compile,
                Stage(self.progress, "planning"),
                self.request.site,
            )
            vectors, spec = self._vectors(embedder)
            scoring = self._scorer(embedder).score(
                [self._jobs(source, spec, vectors) for source in self.sources if not isinstance(source, TextsSource)]
            )
            # The rest is fast: the first process does it and shares the result.
            finish = partial(self._finish, scoring, start, embedder) if self.group.rank == 0 else lambda: None
            return cast(SweepResult, self.group.share(finish)[0])

    def _vectors(self, embedder: Embedder) -> tuple[Vectors, EncoderSpec]:
        """Return the vectors as the recipe transforms them, and the spec that identifies them."""
        if not self.recipe.changes_vectors:
            return embedder.store, self.spec
        if self.recipe.center and self.group.rank == 0:
            write_file(self.center_file, ("\n".join(self.center_texts) + "\n").encode())
        identity = json.dumps([self.spec.prompting, map_identity(self.recipe, self.center_texts)], sort_keys=True)
        return mapped_store(embedder, self.recipe, self.center_texts), replace(self.spec, prompting=identity)

    def _scorer(self, embedder: Embedder) -> TaskScorer:
        settings = self.request.settings
        stage = Stage(self.progress, "scoring")
        batch_scorer = BatchScorer(embedder, self.folder / "together", stage, embedder.planning, self.baselines)
        return TaskScorer(
            embedder,
            batch_scorer if settings.scoring == "together" else None,
            settings.workers or max(int(joblib.cpu_count()) // settings.devices, 1),
            embedder.planning,
            stage,
            Stage(self.progress, "confirming"),
            _cores_free(self.encoder),
        )

    def _jobs(self, source: TaskSource, spec: EncoderSpec, vectors: Vectors) -> list[Job]:
        """Return the jobs of a task, one per layer."""
        prompts = Prompts.of(self.encoder)
        modalities = tuple(self.encoder.media)
        specs = [replace(spec, layer=layer) for layer in self.layers]
        return [
            Job(
                source,
                spec.layer,
                vectors,
                result_name(spec),
                result_revision(spec),
                prompts,
                modalities,
                self.folder / "mteb",
                spec.similarity,
            )
            for spec in specs
        ]

    def _finish(self, scoring: ScoringResult, start: float, embedder: Embedder) -> SweepResult:
        """Compute metrics and notes, and save the result."""
        frames = [self._score_frame(scoring.scores, "score"), self._score_frame(scoring.confirmed, "confirmed")]
        if self.request.has_metrics:
            frames.append(self._metrics())
        notes = sweep_notes(
            self.encoder,
            self.spec,
            self.sources,
            scoring,
            self.layers,
            baselines=self.baselines,
            seconds=time.perf_counter() - start,
            tokens=embedder.tokens,
        )
        flags = ("whiten", "embed_filter", "normalize")
        vectors: dict[str, Any] = {name: True for name in flags if getattr(self.recipe, name)}
        if self.recipe.center:
            vectors["center"] = str(self.center_file)
        result = SweepResult(pl.concat(frames), self.folder, replace(notes, vectors=vectors))
        result.save()
        return result

    def _score_frame(self, scores: Sequence[Score], kind: Literal["score", "confirmed"]) -> pl.DataFrame:
        spec = at_site(self.spec, self.spec.site)
        return tidy_frame(
            row
            for score in scores
            if score.error is None
            for row in tidy_rows({score.layer: score.value}, spec, kind=kind, dataset=score.task, name=score.metric)
        )

    def _metrics(self) -> pl.DataFrame:
        """Compute the metrics on some of the tasks' inputs."""
        medium = self.encoder.media[0]
        sample = _sample(self.sources, medium, self.request.settings.metric_texts)
        return measure_layers(
            self.encoder,
            sample,
            dataset=f"{len(sample)} {_PLURALS[medium]} of the tasks",
            metrics=self.request.metrics,
            layers=self.layers,
            site=self.request.site,
            views=self.request.settings.views,
            progress=self.progress,
        )


def _cores_free(encoder: LayerEncoder) -> bool:
    """Return True if the cores are idle while texts are embedded."""
    return encoder.device.type == "cuda"


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
    items = {item_key(item): item for source in sources for item in _task_media(source.make(), medium)}
    return [items[key] for key in sorted(items)[:count]]


def _task_media(task: Any, medium: str) -> Iterator[Any]:
    """Yield the images or waveforms of a task, in the order of its data."""
    if not task.data_loaded:
        task.load_data()
    yield from _dataset_media(task.dataset, medium)


def _dataset_media(dataset: Any, medium: str) -> Iterator[Any]:
    """Yield from the columns that datasets decodes as images or audio, in all subsets and splits."""
    if hasattr(dataset, "features") and not isinstance(dataset.column_names, dict):
        for column, feature in dataset.features.items():
            if type(feature).__name__.lower() == medium:
                yield from (item for item in dataset[column] if item is not None)
    elif isinstance(dataset, Mapping):
        for part in dataset.values():
            yield from _dataset_media(part, medium)
