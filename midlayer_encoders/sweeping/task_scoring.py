"""Score every layer on every task: all layers at once if possible, otherwise one by one with mteb."""

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from mteb.abstasks import AbsTask
from mteb.results import TaskResult

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Stage
from midlayer_encoders.errors import FATAL, error_summary
from midlayer_encoders.files import dump_with_checksum, read_artifact, read_with_checksum, write_file
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.sweeping.baselines import Baseline
from midlayer_encoders.sweeping.compression import CompressedRows, Compression
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.mteb_jobs import Job, Score, Workers, quiet_mteb, run_job, score_identity, with_data
from midlayer_encoders.sweeping.notes import TOGETHER, ScoringResult
from midlayer_encoders.sweeping.scoring import Read, resampled_scores
from midlayer_encoders.sweeping.scoring.recording import Recorded, record, scores_together
from midlayer_encoders.tasks.tfidf import task_texts

MAX_CONFIRMED = 3  # layers per task: the best, the second best and the last
_DIGITS = 7  # of resampled scores
_WITH_TIES = ("Clustering", "Reranking")  # types of tasks that mteb scores for binary vectors
_TOKENS = "tokens per text"  # beside the scores of a task
_COUNTED_TEXTS = 512  # for the tokens per text, of each split and prompt


def layers_to_confirm(scores: Sequence[Score]) -> list[int]:
    """Return the best layer of a task, the second best and the last; of compressed vectors, the best alone."""
    valid = [score for score in scores if score.error is None and not math.isnan(score.value)]
    best = sorted(valid, key=lambda score: -score.value)[:2]
    if scores and scores[0].compression != Compression():
        return [score.layer for score in best[:1]]
    return sorted({score.layer for score in (*best, *scores[-1:])})


@dataclass(frozen=True)
class TaskScorer:
    """Scores the layers of tasks.

    Attributes:
        embedder: embeds texts that are not stored.
        folder: where the scores of all layers at once are saved, apart from mteb's; ``None`` if mteb scores everything.
        baselines: scored on the same tasks.
        workers: processes that score layers with mteb.
        scoring: counts layers.
        confirming: counts layers that mteb scores once more.
    """

    embedder: Embedder
    folder: Path | None
    baselines: Sequence[Baseline]
    workers: int
    scoring: Stage
    confirming: Stage

    @property
    def _has_idle_cores(self) -> bool:
        """Whether the cores are idle while texts are embedded."""
        return self.embedder.encoder.device.type == "cuda"

    def score(self, jobs_by_task: Sequence[Sequence[Job]]) -> ScoringResult:
        """Score every layer on every task, and confirm some of the scores with mteb."""
        self.embedder.planning.expect(len(jobs_by_task))
        self.scoring.expect(sum(map(len, jobs_by_task)))
        result = ScoringResult()
        to_confirm: list[Job] = []
        futures: list[Future[Score]] = []
        # Beside a GPU the tasks follow each other, so that the jobs of two at a time get the cores.
        num_tasks = min(len(jobs_by_task), 2) if self._has_idle_cores else len(jobs_by_task)
        workers = Workers(self.workers, MAX_CONFIRMED * num_tasks)
        if self.folder is not None and not all(self._file(jobs[0].task.name).exists() for jobs in jobs_by_task):
            workers.start()
        try:
            for jobs in jobs_by_task:
                self.embedder.planning.step(0)  # loading a task's data may take longer than everything else
                tied = _find_ties(jobs)
                task_scores, reason = self._score_at_once([job for job in jobs if job not in tied], result)
                if reason is not None:
                    result.methods[jobs[0].task.name] = f"by mteb, because {reason}"
                    result.scores += self._score_with_mteb(jobs)
                    continue
                result.methods[jobs[0].task.name] = TOGETHER
                result.scores += task_scores + self._run(tied, self.scoring, workers)
                confirmed = _jobs_to_confirm(jobs, task_scores)
                to_confirm += confirmed
                if self._has_idle_cores and workers.count > 1:  # while the device embeds the texts of the next task
                    futures += workers.begin(confirmed)
            if to_confirm:
                self.confirming.expect(len(to_confirm))
            result.confirmed += self._run(to_confirm, self.confirming, workers, futures)
            return result
        except BaseException:
            workers.kill()
            raise

    def _file(self, task: str) -> Path:
        """Return the file with the scores of all layers on a task."""
        return (self.folder or Path()) / f"{task}.json"

    def _score_at_once(self, jobs: Sequence[Job], result: ScoringResult) -> tuple[list[Score], str | None]:
        """Return the scores of all layers, or why mteb must score them; add those of baselines to the result."""
        if self.folder is None:
            return [], "it was requested"
        stages = self.embedder.planning, self.scoring
        before = [stage.done for stage in stages]
        try:
            reason = scores_together(jobs[0].task.make())
            return ([], reason) if reason is not None else (self._score_together(jobs, result), None)
        except FATAL:
            raise
        except Exception as error:  # mteb reports what is wrong with the task, or can score it
            for stage, done in zip(stages, before, strict=True):
                stage.step(done - stage.done)
            return [], error_summary(error)

    def _score_together(self, jobs: Sequence[Job], result: ScoringResult) -> list[Score]:
        """Return the scores of the jobs of a task, and add baselines and the tokens per text to the result."""
        first, task = jobs[0], _task(jobs[0])
        header = score_identity(task, first.encoder.store.key)
        path = self._file(header["task"])
        values = read_artifact(path, partial(_read_scores, header=header)) or {}
        missing = [job for job in jobs if _identity(job) not in values]
        self.scoring.step(len(jobs) - len(missing))
        baselines = [baseline for baseline in self.baselines if baseline.applies(task)]
        counts_tokens = self.embedder.encoder.media == ["text"]
        if missing or not {each.key for each in baselines} | ({_TOKENS} if counts_tokens else set()) <= values.keys():
            calls: list[Sequence[str]] | None = None if jobs[-1].encoder.compression == Compression() else []
            recorded, mean_tokens = self._record(first, calls)  # also embeds the texts
            self.embedder.planning.step()
            for compression, group in groupby(missing, key=lambda job: job.encoder.compression):
                by_layer = {job.layer: job for job in group}
                read: Read = first.encoder.store.read
                if calls is not None:
                    read = CompressedRows(read, calls, compression).read_rows
                computed = self._main_scores(task, recorded, list(by_layer), read, self.scoring)
                values |= {_identity(by_layer[layer]): value for layer, value in computed.items()}
            values |= {each.key: self._baseline(each, first) for each in baselines if each.key not in values}
            values |= {_TOKENS: [mean_tokens]} if counts_tokens else {}
            numbers = {name: [None if math.isnan(x) else x for x in row] for name, row in values.items()}
            write_file(path, dump_with_checksum({"of": header, "scores": numbers}))
        else:
            self.embedder.planning.step()
        if counts_tokens:
            result.tokens[first.task.name] = values[_TOKENS][0]
        result.baselines[first.task.name] = {each.name: values[each.key] for each in baselines}
        new = set(map(_identity, missing))
        return [
            job.score(header["main_score"], score, resampled=resampled, kept=_identity(job) not in new)
            for job in jobs
            for score, *resampled in [values[_identity(job)]]
        ]

    def _record(self, job: Job, calls: list[Sequence[str]] | None = None) -> tuple[list[Recorded], float]:
        """Record how mteb evaluates the task, and the mean tokens of its texts; every text is then in the store.

        If ``calls`` is a list, it receives the keys of each call of ``encode``, and recorded keys name their call.
        """
        encoder = self.embedder.encoder
        counts: list[tuple[float, int]] = []

        def embed(items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
            if encoder.media == ["text"] and items:
                sample = items[:: math.ceil(len(items) / _COUNTED_TEXTS)]
                mean = fmean(count_tokens(encoder, [prompt + text for text in sample]))
                counts.append((mean, len(items)))
            self.embedder(items, keys, prompt)

        with isolated_random(), quiet_mteb():
            layer = replace(job.encoder, ensure=embed)

            def call_keys(*args: Any, **context: Any) -> list[str]:
                assert calls is not None
                calls.append(layer.keys(*args, **context))
                return CompressedRows.keys(len(calls) - 1, calls[-1])

            keys = layer.keys if calls is None else call_keys
            recorded = record(with_data(job.task).make(), keys, similarity=layer.spec.similarity)
        return recorded, sum(mean * texts for mean, texts in counts) / max(sum(texts for _, texts in counts), 1)

    def _baseline(self, baseline: Baseline, job: Job) -> list[float]:
        """Return the score of a baseline on the task, and its scores on resampled items."""
        with isolated_random(), quiet_mteb():
            task = with_data(job.task).make()
            encoder = baseline.encoder_for(task_texts(task))
            recorded = record(task, lambda inputs, **_: [text for batch in inputs for text in batch["text"]])
        return self._main_scores(task, recorded, [0], lambda _, texts: encoder.vectors(texts))[0]

    def _main_scores(
        self, task: AbsTask, recorded: Sequence[Recorded], layers: Sequence[int], read: Read, stage: Stage | None = None
    ) -> dict[int, list[float]]:
        """Return the main score of each layer and its resamples, combined over splits and subsets as mteb does."""
        device = self.embedder.encoder.device
        scores: dict[int, dict[str, dict[str, Any]]] = {layer: {} for layer in layers}
        resampled: dict[int, list[list[float]]] = {layer: [] for layer in layers}
        for evaluation in recorded:
            last = evaluation is recorded[-1]
            step = stage.step if stage is not None and last else lambda _: None
            values = resampled_scores(evaluation.scorer, evaluation.keys, layers, read, device=device, done=step)
            for layer in layers:
                score, *samples = values[layer]
                scores[layer].setdefault(evaluation.split, {})[evaluation.subset] = {"main_score": score}
                resampled[layer].append(samples)
        return {
            layer: [
                float(TaskResult.from_task_results(task, by_split, evaluation_time=0).get_score()),
                # mteb's mean over all splits and subsets; nothing if one of them has no resamples.
                *(round(math.fsum(sample) / len(sample), _DIGITS) for sample in zip(*resampled[layer], strict=False)),
            ]
            for layer, by_split in scores.items()
        }

    def _score_with_mteb(self, jobs: Sequence[Job]) -> list[Score]:
        """Score the layers one by one: the first embeds the texts, the others run in workers."""
        first = run_job(jobs[0], self.embedder)
        self.embedder.planning.step()
        self.scoring.step()
        if first.error is not None:
            return [first]
        return [first, *self._run(jobs[1:], self.scoring, Workers(self.workers, len(jobs) - 1))]

    def _run(
        self, jobs: Sequence[Job], stage: Stage, workers: Workers, futures: Sequence[Future[Score]] = ()
    ) -> list[Score]:
        """Run each job on stored vectors, or wait for the futures of all jobs."""
        scores = {}
        for score in workers.run(jobs, futures):
            stage.step()
            scores[score.place] = score
        for job in jobs:
            if scores[job.score().place].lacked_a_text:  # its shard was damaged or removed
                scores[job.score().place] = run_job(job, self.embedder)
        return [scores[job.score().place] for job in jobs]


def _jobs_to_confirm(jobs: Sequence[Job], scores: Sequence[Score]) -> list[Job]:
    """Return the jobs of the layers that mteb confirms, for each compression of the vectors."""
    places = {
        (compression, layer)
        for compression, group in groupby(scores, key=lambda score: score.compression)
        for layer in layers_to_confirm(list(group))
    }
    return [job for job in jobs if (job.encoder.compression, job.layer) in places]


def _find_ties(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs whose score depends on mteb's rounding: binary vectors are often equally far from others."""
    binary = [job for job in jobs if job.encoder.compression.precision == "binary"]
    return binary if binary and _task(binary[0]).metadata.type in _WITH_TIES else []


def _task(job: Job) -> AbsTask:
    with isolated_random(), quiet_mteb():
        return job.task.make()


def _identity(job: Job) -> str:
    """Return what identifies a layer of an encoder with everything that changes its vectors."""
    return f"{job.encoder.name} {job.encoder.revision}"


def _read_scores(path: Path, *, header: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the scores in a file, with their resamples, or none if they belong to something else."""
    if json.loads(path.read_bytes())["of"] != header:
        return {}
    content = read_with_checksum(path)
    return {
        str(name): [math.nan if number is None else float(number) for number in numbers]
        for name, numbers in content["scores"].items()
    }
