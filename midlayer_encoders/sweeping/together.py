"""All layers of a task scored together from the store; the scores are kept, apart from mteb's, for the next run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders._types import Stage
from midlayer_encoders.files import read_kept, write_file
from midlayer_encoders.scoring import Read, layer_scores
from midlayer_encoders.store import TextNotStoredError
from midlayer_encoders.sweeping.jobs import Job, Score, quiet_mteb, with_data
from midlayer_encoders.sweeping.stored_layer import Embedder
from midlayer_encoders.tasks import TfidfEncoder, isolated_random, task_texts

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

    from midlayer_encoders.scoring.recording import Recorded

__all__ = ["MOST_CONFIRMED", "Together", "layers_to_confirm", "why_not_together"]

MOST_CONFIRMED = 3  # layers of a task: the best, the second best and the last
_FORMAT = 1  # of the files; another number is another way to score
_BASELINE = "tfidf"  # under this name its score stands beside those of layers


def _nothing(_: int) -> None:
    """Count nothing."""


def why_not_together(job: Job) -> str | None:
    """Return why a job's task is left to mteb, or ``None`` where all layers are scored together."""
    from midlayer_encoders.scoring.support import scores_together

    return scores_together(job.task.make())


def layers_to_confirm(scores: Sequence[Score]) -> list[int]:
    """Return the best layer of a task, the second best and the last."""
    valid = [score for score in scores if score.error is None and not math.isnan(score.value)]
    best = sorted(valid, key=lambda score: -score.value)[:2]
    return sorted({score.layer for score in (*best, *scores[-1:])})


@dataclass(frozen=True)
class Together:
    """Scores all layers of tasks.

    Attributes:
        embedder: embeds what the store lacks.
        folder: where scores are kept.
        stage: counts layers.
        rank: number of this process; it scores every ``world``-th layer.
        world: number of processes.
        barrier: waits for the others.
        baselines: whether TF-IDF is scored beside the layers, by the first process.
    """

    embedder: Embedder
    folder: Path
    stage: Stage
    rank: int = 0
    world: int = 1
    barrier: Callable[[], None] = lambda: None
    baselines: bool = False

    def baseline(self, job: Job) -> float | None:
        """Return the score of TF-IDF on a job's task, or ``None`` where it was not scored here."""
        with isolated_random(), quiet_mteb():
            task = job.task.make()
        return self._kept(task, _header(task, job)).get(_BASELINE)

    def scores(self, jobs: Sequence[Job]) -> list[Score]:
        """Return the score of each job, all of one task; an error is raised."""
        start = time.perf_counter()
        with isolated_random(), quiet_mteb():
            task = jobs[0].task.make()
        header = _header(task, jobs[0])
        kept = self._kept(task, header)
        self.barrier()
        lacking = [job for job in jobs if _identity(job) not in kept]
        self.stage.step(len(jobs) - len(lacking))
        if lacking or (self.baselines and _BASELINE not in kept):
            self._fill(task, jobs, lacking, header, kept)
            self.barrier()
            self.stage.step(len(lacking) - len(lacking[self.rank :: self.world]))
            kept = self._kept(task, header)
        seconds = (time.perf_counter() - start) / len(jobs)
        name = str(task.metadata.main_score)
        return [Score(job.task.name, job.layer, name, kept[_identity(job)], seconds, together=True) for job in jobs]

    def _fill(
        self, task: AbsTask, jobs: Sequence[Job], lacking: Sequence[Job], header: Any, kept: Mapping[str, float]
    ) -> None:
        """Score this process's part of what is lacking, and keep it."""
        asked = self._asked(jobs[0])
        mine = {job.layer: job for job in lacking[self.rank :: self.world]}
        try:
            found = self._scored(task, asked, list(mine))
        except TextNotStoredError:  # its shard was damaged or pruned since it was asked for
            if self.world > 1:
                raise
            found = self._scored(task, self._asked(jobs[0]), list(mine))
        scores = {**kept, **{_identity(mine[layer]): value for layer, value in found.items()}}
        if self.baselines and self.rank == 0 and _BASELINE not in kept:
            scores[_BASELINE] = self._tfidf(task, jobs[0])
        if scores != kept:
            plain = {name: None if math.isnan(value) else value for name, value in scores.items()}
            write_file(self._path(task, self.rank), json.dumps({"of": header, "scores": plain}, indent=1).encode())

    def _asked(self, job: Job) -> list[Recorded]:
        """Return what mteb asks on the task; every text of it is then in the store."""
        from midlayer_encoders.scoring.recording import record

        with isolated_random(), quiet_mteb():
            layer = job.stored_layer(self.embedder)
            return record(with_data(job.task).make(), layer.keys, similarity=job.similarity)

    def _tfidf(self, task: AbsTask, job: Job) -> float:
        """Return the score of TF-IDF on the task."""
        from midlayer_encoders.scoring.recording import record

        with isolated_random(), quiet_mteb():
            loaded = with_data(job.task).make()
            encoder = TfidfEncoder(task_texts(loaded))
            asked = record(loaded, lambda inputs, **_: [text for batch in inputs for text in batch["text"]])
        each = [self._each(one, [0], lambda _, texts: encoder.vectors(texts)) for one in asked]
        return _main_scores(task, asked, each, [0])[0]

    def _scored(self, task: AbsTask, asked: Sequence[Recorded], layers: Sequence[int]) -> dict[int, float]:
        """Return the main score of each layer."""
        if not layers:
            return {}
        read, last = self.embedder.store.read, len(asked) - 1
        steps = [self.stage.step if number == last else _nothing for number in range(len(asked))]
        each = [self._each(one, layers, read, step) for one, step in zip(asked, steps, strict=True)]
        return _main_scores(task, asked, each, layers)

    def _each(
        self, one: Recorded, layers: Sequence[int], read: Read, step: Callable[[int], None] = _nothing
    ) -> dict[int, float]:
        return layer_scores(one.question, one.keys, layers, read, device=self.embedder.encoder.device, done=step)

    def _path(self, task: AbsTask, rank: int | str) -> Path:
        return self.folder / f"{task.metadata.name}.{rank}.json"

    def _kept(self, task: AbsTask, header: Any) -> dict[str, float]:
        """Return the scores that any process kept of the task as it is now."""
        found: dict[str, float] = {}
        for path in sorted(self.folder.glob(self._path(task, "*").name)):
            found |= read_kept(path, partial(_read, header=header)) or {}
        return found


def _main_scores(
    task: AbsTask, asked: Sequence[Recorded], each: Sequence[Mapping[int, float]], layers: Sequence[int]
) -> dict[int, float]:
    """Return the main score of each layer, over splits and subsets as mteb takes them together."""
    from mteb.results import TaskResult

    found = {}
    for layer in layers:
        scores: dict[str, dict[str, Any]] = {}
        for one, values in zip(asked, each, strict=True):
            scores.setdefault(one.split, {})[one.subset] = {"main_score": values[layer]}
        found[layer] = float(TaskResult.from_task_results(task, scores, evaluation_time=0).get_score())
    return found


def _identity(job: Job) -> str:
    """Return what names a layer of an encoder with everything that changes its vectors."""
    return f"{job.name} {job.revision}"


def _header(task: AbsTask, job: Job) -> dict[str, Any]:
    """Return what else changes a score."""
    return {
        "format": _FORMAT,
        "task": task.metadata.name,
        "data": task.metadata.revision,
        "main_score": task.metadata.main_score,
        "splits": list(task.eval_splits),
        "subsets": list(task.hf_subsets),
        "store": job.store.key,
        "mteb": version("mteb"),
    }


def _read(path: Path, *, header: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a file; none where they are of something else."""
    kept = json.loads(path.read_bytes())
    if kept["of"] != header:
        return {}
    return {str(name): math.nan if value is None else float(value) for name, value in kept["scores"].items()}
