"""All layers of a task scored together from the store; the scores are kept, apart from mteb's, for the next run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from midlayer_encoders._types import Stage
from midlayer_encoders.files import read_artifact, write_file
from midlayer_encoders.scoring import Read, layer_scores
from midlayer_encoders.store import TextNotStoredError
from midlayer_encoders.sweeping.baselines import Baseline
from midlayer_encoders.sweeping.jobs import Job, Score, quiet_mteb, with_data
from midlayer_encoders.sweeping.stored_layer import Embedder
from midlayer_encoders.tasks import isolated_random, task_texts

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

    from midlayer_encoders.scoring.recording import Recorded

__all__ = ["MOST_CONFIRMED", "Together", "layers_to_confirm", "why_not_together"]

MOST_CONFIRMED = 3  # layers of a task: the best, the second best and the last
_FORMAT = 1  # of the files; another number is another way to score


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
        planning: counts tasks of which it is known what mteb asks.
        baselines: what is scored beside the layers, by the first process.
    """

    embedder: Embedder
    folder: Path
    stage: Stage
    planning: Stage = field(default_factory=lambda: Stage(None, "planning"))
    baselines: Sequence[Baseline] = ()

    def scores(self, jobs: Sequence[Job]) -> tuple[list[Score], dict[str, float]]:
        """Return the score of each job, all of one task, and of each baseline by its name; an error is raised."""
        start = time.perf_counter()
        group = self.embedder.group
        known = group.share(partial(self._known, jobs[0]))
        header, kept = known[group.rank][0], dict(item for _, scores in known for item in scores.items())
        lacking = [job for job in jobs if _identity(job) not in kept]
        self.stage.step(len(jobs) - len(lacking))
        baselines = [one for one in self.baselines if one.applies(_task(jobs[0]))]
        if lacking or any(one.key not in kept for one in baselines):
            for found in group.share(partial(self._fill, jobs[0], lacking, header, kept, baselines)):
                kept |= found
            self.stage.step(len(lacking) - len(group.part(lacking)))
        else:
            self.planning.step()
        seconds, name = (time.perf_counter() - start) / len(jobs), str(header["main_score"])
        scores = [Score(job.task.name, job.layer, name, kept[_identity(job)], seconds, together=True) for job in jobs]
        return scores, {one.name: kept[one.key] for one in baselines}

    def _known(self, job: Job) -> tuple[dict[str, Any], dict[str, float]]:
        """Return what the task's scores depend on, and those that any process kept of the task as it is now."""
        header = _header(_task(job), job)
        found: dict[str, float] = {}
        for path in sorted(self.folder.glob(f"{header['task']}.*.json")):
            found |= read_artifact(path, partial(_read, header=header)) or {}
        return header, found

    def _fill(
        self,
        first: Job,
        lacking: Sequence[Job],
        header: Mapping[str, Any],
        kept: Mapping[str, float],
        baselines: Sequence[Baseline],
    ) -> dict[str, float]:
        """Score this process's part of what is lacking, keep it, and return it."""
        asked, group = self._asked(first), self.embedder.group  # a process without a part embeds its share all the same
        self.planning.step()
        mine = {job.layer: job for job in group.part(lacking)}
        try:
            scores = self._scored(first, asked, list(mine))
        except TextNotStoredError:  # its shard was damaged or pruned since it was asked for
            if group.world > 1:
                raise
            scores = self._scored(first, self._asked(first), list(mine))
        found = {_identity(mine[layer]): value for layer, value in scores.items()}
        if group.rank == 0:
            found |= {one.key: self._baseline(one, first) for one in baselines if one.key not in kept}
        if found:
            written = {name: None if math.isnan(value) else value for name, value in {**kept, **found}.items()}
            content = json.dumps({"of": header, "scores": written}, indent=1)
            write_file(self.folder / f"{header['task']}.{group.rank}.json", content.encode())
        return found

    def _asked(self, job: Job) -> list[Recorded]:
        """Return what mteb asks on the task; every text of it is then in the store."""
        from midlayer_encoders.scoring.recording import record

        with isolated_random(), quiet_mteb():
            layer = job.stored_layer(self.embedder)
            return record(with_data(job.task).make(), layer.keys, similarity=job.similarity)

    def _baseline(self, baseline: Baseline, job: Job) -> float:
        """Return the score of a baseline on the task."""
        from midlayer_encoders.scoring.recording import record

        with isolated_random(), quiet_mteb():
            loaded = with_data(job.task).make()
            if baseline.searches:
                return baseline.score(loaded)
            encoder = baseline.made_for(task_texts(loaded))
            asked = record(loaded, lambda inputs, **_: [text for batch in inputs for text in batch["text"]])
        each = [self._each(one, [0], lambda _, texts: encoder.vectors(texts)) for one in asked]
        return _main_scores(_task(job), asked, each, [0])[0]

    def _scored(self, job: Job, asked: Sequence[Recorded], layers: Sequence[int]) -> dict[int, float]:
        """Return the main score of each layer."""
        if not layers:
            return {}
        read, last = job.store.read, len(asked) - 1
        steps = [self.stage.step if number == last else _nothing for number in range(len(asked))]
        each = [self._each(one, layers, read, step) for one, step in zip(asked, steps, strict=True)]
        return _main_scores(_task(job), asked, each, layers)

    def _each(
        self, one: Recorded, layers: Sequence[int], read: Read, step: Callable[[int], None] = _nothing
    ) -> dict[int, float]:
        return layer_scores(one.question, one.keys, layers, read, device=self.embedder.encoder.device, done=step)


def _task(job: Job) -> AbsTask:
    with isolated_random(), quiet_mteb():
        return job.task.make()


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
        "settings": _settings(task),
    }


def _settings(task: AbsTask) -> dict[str, Any]:
    """Return the plain attributes of a task, such as how many examples of a class it draws."""
    names = {name for kind in type(task).__mro__ for name in vars(kind)} | set(vars(task))
    found = {name: getattr(task, name, None) for name in sorted(names) if name[0] != "_" and name != "data_loaded"}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str)}


def _read(path: Path, *, header: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores in a file; none where they are of something else."""
    kept = json.loads(path.read_bytes())
    if kept["of"] != header:
        return {}
    return {str(name): math.nan if value is None else float(value) for name, value in kept["scores"].items()}
