"""A sweep of one model under one recipe: each text passes through it once, all layers are scored from the store."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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
from midlayer_encoders.sweeping.items import item_key, task_media
from midlayer_encoders.sweeping.jobs import Job, Score
from midlayer_encoders.sweeping.mapped_store import map_words, mapped_store
from midlayer_encoders.sweeping.notes import Scored, sweep_notes
from midlayer_encoders.sweeping.processes import Group
from midlayer_encoders.sweeping.scorer import Scorer
from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts, Vectors, open_store
from midlayer_encoders.sweeping.sweep_result import SweepResult
from midlayer_encoders.sweeping.sweep_settings import Settings
from midlayer_encoders.sweeping.together import Together
from midlayer_encoders.tasks import TaskSource, TextsSource, source_texts

__all__ = ["SingleSweep", "sample_of_lines"]

_CENTERED_ON = 512  # texts at the most: a few hundred settle a mean
_PLURALS = {"text": "texts", "image": "images", "audio": "waveforms"}


class SingleSweep:
    """A sweep, or this process's part of one."""

    def __init__(
        self,
        settings: Settings,
        encoder: LayerEncoder,
        sources: Sequence[TaskSource],
        group: Group,
        recipe: Recipe = RECIPES[PLAIN],
        center: Path = Path("center.txt"),
        sample: Sequence[str] = (),
    ) -> None:
        self.settings, self.encoder, self.sources, self.group = settings, encoder, sources, group
        self.layers = site_layers(settings.layers, encoder.layer, settings.site, name=encoder.name)
        layer_reader(encoder, layers=self.layers, site=settings.site)  # refuses what cannot be read, before any work
        self.spec, self.folder = replace(encoder.spec, site=settings.site), settings.folder(encoder)
        self.recipe, self.center, self.sample = recipe, center, sample
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
                [
                    _jobs(source, self.layers, spec, embedder, store, self.folder)
                    for source in self.sources
                    if not isinstance(source, TextsSource)
                ]
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
        texts = self.sample if self.recipe.center else []
        if self.recipe.center and self.group.rank == 0:
            write_file(self.center, ("\n".join(texts) + "\n").encode())
        words = json.dumps([self.spec.prompting, map_words(self.recipe, texts)], sort_keys=True)
        return mapped_store(embedder, self.recipe, texts), replace(self.spec, prompting=words)

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
        if settings.measures:
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


def _cores_free(encoder: LayerEncoder) -> bool:
    """Return whether the cores have little to do while texts are embedded."""
    return encoder.device.type == "cuda"


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
    prompts = Prompts.of(encoder)
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


def sample_of_lines(sources: Sequence[TaskSource], reading: Stage) -> list[str]:
    """Return some of the tasks' texts that are one line each, so that a file of lines holds them.

    Args:
        sources: of the tasks.
        reading: counts those that were read.
    """
    reading.expect(len(sources))
    texts: set[str] = set()
    for source in sources:
        texts.update(source_texts(source))
        reading.step()
    lines = (text for text in texts if text.strip() and len(text.splitlines()) == 1)
    return sorted(lines, key=text_key)[:_CENTERED_ON]


def _sample(sources: Sequence[TaskSource], medium: str, count: int) -> list[Any]:
    """Return some of the tasks' texts, images or waveforms, the same for the same tasks in whatever order."""
    if medium == "text":
        texts = {text for source in sources for text in source_texts(source) if text.strip()}
        return sorted(texts, key=text_key)[:count]
    found = {item_key(item): item for source in sources for item in task_media(source.make(), medium)}
    return [found[key] for key in sorted(found)[:count]]
