"""Every layer on every task: all layers together where that is known, by mteb where not, some of both to compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import error_summary
from midlayer_encoders.sweeping.jobs import Job, Score, Workers, result, run_job
from midlayer_encoders.sweeping.notes import TOGETHER, Scored
from midlayer_encoders.sweeping.processes import FATAL, Group
from midlayer_encoders.sweeping.stored_layer import Embedder
from midlayer_encoders.sweeping.together import MOST_CONFIRMED, Together, layers_to_confirm, why_not_together

__all__ = ["Scorer"]


@dataclass(frozen=True)
class Scorer:
    """Scores the layers of tasks, shared among the processes of the embedder's group.

    Attributes:
        embedder: embeds what the store lacks.
        together: scores all layers of a task; ``None`` where mteb scores everything.
        workers: processes that score layers by mteb.
        planning: counts tasks of which it is known what mteb asks.
        scoring: counts layers.
        confirming: counts layers that mteb scores once more.
        cores_free: whether the cores have little to do while texts are embedded.
    """

    embedder: Embedder
    together: Together | None
    workers: int
    planning: Stage
    scoring: Stage
    confirming: Stage
    cores_free: bool = False

    @property
    def group(self) -> Group:
        """The processes that share the work."""
        return self.embedder.group

    def scored(self, jobs_of_tasks: Sequence[Sequence[Job]]) -> Scored:
        """Score every layer on every task, and have mteb confirm some of what was scored together."""
        self.planning.expect(len(jobs_of_tasks))
        self.scoring.expect(sum(map(len, jobs_of_tasks)))
        scores: list[Score] = []
        to_confirm: list[Job] = []
        ways: dict[str, str] = {}
        baselines: dict[str, dict[str, float]] = {}
        confirming = Workers(self.workers, MOST_CONFIRMED * len(jobs_of_tasks))
        if self.together is not None:
            confirming.start()
        begun: dict[tuple[str, int], Future[Score]] = {}
        beside = self.cores_free and self.group.world == 1 and confirming.count > 1
        try:
            for jobs in jobs_of_tasks:
                self.planning.step(0)  # its turn: reading a task's data may take longer than all else
                made, why, beside_them = self._by_all(jobs)
                if why is not None:
                    ways[jobs[0].task.name] = f"by mteb, because {why}"
                    scores += self._by_mteb(jobs)
                    continue
                ways[jobs[0].task.name] = TOGETHER
                scores += made
                baselines[jobs[0].task.name] = beside_them
                layers = layers_to_confirm(made)
                chosen = [job for job in jobs if job.layer in layers]
                to_confirm += chosen
                if beside:  # while the device has the next task's texts, the cores are free
                    begun |= {(job.task.name, job.layer): confirming.begin([job])[0] for job in chosen}
        except BaseException:  # what no worker has begun is not begun any more
            for coming in begun.values():
                coming.cancel()
            raise
        return Scored(scores, self._confirmed(to_confirm, confirming, begun), ways, baselines)

    def _by_all(self, jobs: Sequence[Job]) -> tuple[list[Score], str | None, dict[str, float]]:
        """Return the scores of all layers together, or none and why they are left to mteb, and those of baselines."""
        if self.together is None:
            return [], "it was asked to", {}
        before = self.planning.done, self.scoring.done
        try:
            why = self.group.share(partial(why_not_together, jobs[0]))[0]
            if why is not None:
                return [], why, {}
            scores, baselines = self.together.scores(jobs)
            return scores, None, baselines
        except FATAL:  # the next task would fail for it too
            raise
        except Exception as error:  # mteb tells what is wrong with a task, or scores it all the same
            for stage, done in zip((self.planning, self.scoring), before, strict=True):
                stage.step(done - stage.done)
            return [], error_summary(error), {}

    def _by_mteb(self, jobs: Sequence[Job]) -> list[Score]:
        """Score the layers one by one: the first asks for the texts, which embeds them; the others run in workers."""
        first = self._everywhere(jobs[0])
        self.planning.step()
        self.scoring.step()
        if first.error is not None:
            return [first]
        found = {first.layer: first}
        workers = Workers(self.workers, len(self.group.part(jobs[1:])))
        for score in self._shared(jobs[1:], self.scoring, workers):
            found[score.layer] = score
        for job in jobs:  # a text that a worker missed (its shard was damaged or pruned) is embedded now
            if found[job.layer].lacked_a_text:
                found[job.layer] = self._everywhere(job)
        return [found[job.layer] for job in jobs]

    def _confirmed(
        self, jobs: Sequence[Job], workers: Workers, begun: Mapping[tuple[str, int], Future[Score]]
    ) -> list[Score]:
        """Have mteb score some layers of all tasks side by side, from what is stored, or wait for those begun."""
        if not jobs:
            return []
        self.confirming.expect(len(jobs))
        found: dict[tuple[str, int], Score] = {}
        for place, coming in begun.items():
            found[place] = result(coming)
            self.confirming.step()
        rest = [job for job in jobs if (job.task.name, job.layer) not in begun]
        found |= {(score.task, score.layer): score for score in self._shared(rest, self.confirming, workers)}
        for job in jobs:
            if found[job.task.name, job.layer].lacked_a_text:
                found[job.task.name, job.layer] = self._everywhere(job)
        return [found[job.task.name, job.layer] for job in jobs]

    def _everywhere(self, job: Job) -> Score:
        """Return the score of a job that may ask for texts, which the processes then embed together."""
        scores = self.group.share(partial(run_job, job, self.embedder))
        return next((score for score in scores if score.error is not None), scores[0])

    def _shared(self, jobs: Sequence[Job], stage: Stage, workers: Workers) -> list[Score]:
        """Return the scores of jobs, each scored by one process, from what is stored."""

        def scored() -> list[Score]:
            made = []
            for score in workers.run(self.group.part(jobs)):
                stage.step()
                made.append(score)
            return made

        parts = self.group.share(scored)
        stage.step(len(jobs) - len(parts[self.group.rank]))
        return [score for part in parts for score in part]
