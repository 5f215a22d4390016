"""Score every layer on every task: all layers at once if possible, otherwise one by one with mteb."""

import glob
import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from mteb.abstasks import AbsTask
from mteb.results import TaskResult

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import Stage
from midlayer_encoders.errors import FATAL, error_summary
from midlayer_encoders.files import read_artifact, read_sealed, sealed, write_file
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.sweeping.baselines import Baseline
from midlayer_encoders.sweeping.compression import CompressedRows, Compression
from midlayer_encoders.sweeping.embedder import Embedder
from midlayer_encoders.sweeping.mteb_jobs import Job, Score, Workers, finished_scores, quiet_mteb, run_job, with_data
from midlayer_encoders.sweeping.notes import TOGETHER, ScoringResult
from midlayer_encoders.sweeping.scoring import Read, resampled_scores
from midlayer_encoders.sweeping.scoring.recording import Recorded, record, scores_together
from midlayer_encoders.tasks.tfidf import task_texts

MAX_CONFIRMED = 3  # layers per task: the best, the second best and the last
_FORMAT = 2  # of the score files; another number invalidates them
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

    def _cores_free(self) -> bool:
        """Return True if the cores are idle while texts are embedded."""
        return self.embedder.encoder.device.type == "cuda"

    def score(self, jobs_by_task: Sequence[Sequence[Job]]) -> ScoringResult:
        """Score every layer on every task, and confirm some of the scores with mteb."""
        planning = self.embedder.planning
        planning.expect(len(jobs_by_task))
        self.scoring.expect(sum(map(len, jobs_by_task)))
        scores: list[Score] = []
        to_confirm: list[Job] = []
        methods: dict[str, str] = {}
        baselines: dict[str, dict[str, list[float]]] = {}
        tokens: dict[str, float] = {}
        # Beside a GPU the tasks follow each other, so that the jobs of two at a time get the cores.
        num_tasks = min(len(jobs_by_task), 2) if self._cores_free() else len(jobs_by_task)
        workers = Workers(self.workers, MAX_CONFIRMED * num_tasks)
        if self.folder is not None and not all(_saved_files(self.folder, jobs[0].task.name) for jobs in jobs_by_task):
            workers.start()
        futures: list[Future[Score]] = []
        in_background = self._cores_free() and workers.count > 1
        try:
            for jobs in jobs_by_task:
                planning.step(0)  # loading a task's data may take longer than everything else
                name = jobs[0].task.name
                tied = _tied(jobs)
                task_scores, reason, others = self._score_at_once([job for job in jobs if job not in tied])
                if reason is not None:
                    methods[name] = f"by mteb, because {reason}"
                    scores += self._score_with_mteb(jobs)
                    continue
                methods[name] = TOGETHER
                scores += task_scores
                scores += self._run(tied, self.scoring, workers) if tied else []
                if _TOKENS in others:
                    tokens[name] = others.pop(_TOKENS)[0]
                baselines[name] = others
                confirmed = []
                for compression, group in groupby(task_scores, key=lambda score: score.compression):
                    layers = layers_to_confirm(list(group))
                    of_group = [job for job in jobs if job.encoder.compression == compression]
                    confirmed += [job for job in of_group if job.layer in layers]
                to_confirm += confirmed
                if in_background:  # while the device embeds the texts of the next task
                    futures += workers.begin(confirmed)
            return ScoringResult(scores, self._confirm(to_confirm, workers, futures), methods, baselines, tokens)
        except BaseException:
            workers.kill()
            raise

    def _score_at_once(self, jobs: Sequence[Job]) -> tuple[list[Score], str | None, dict[str, list[float]]]:
        """Return the scores of all layers and baselines and the tokens per text, or why mteb must score it."""
        if self.folder is None:
            return [], "it was requested", {}
        stages = self.embedder.planning, self.scoring
        before = [stage.done for stage in stages]
        try:
            reason = scores_together(jobs[0].task.make())
            if reason is not None:
                return [], reason, {}
            scores, others = self._score_together(jobs, self.folder)
            return scores, None, others
        except FATAL:
            raise
        except Exception as error:  # mteb reports what is wrong with the task, or can score it
            for stage, done in zip(stages, before, strict=True):
                stage.step(done - stage.done)
            return [], error_summary(error), {}

    def _score_together(self, jobs: Sequence[Job], folder: Path) -> tuple[list[Score], dict[str, list[float]]]:
        """Return the scores of the jobs of a task, score and resamples of each baseline, and the tokens per text."""
        first = jobs[0]
        header, values = _saved_scores(folder, first)
        missing = [job for job in jobs if _identity(job) not in values]
        self.scoring.step(len(jobs) - len(missing))
        baselines = [baseline for baseline in self.baselines if baseline.applies(_task(first))]
        others = {baseline.key: baseline.name for baseline in baselines}
        if self.embedder.encoder.media == ["text"]:
            others[_TOKENS] = _TOKENS

        if missing or not set(others) <= set(values):
            calls: list[Sequence[str]] | None = None if jobs[-1].encoder.compression == Compression() else []
            recorded, mean_tokens = self._record(first, calls)  # also embeds the texts
            self.embedder.planning.step()
            for compression, group in groupby(missing, key=lambda job: job.encoder.compression):
                by_layer = {job.layer: job for job in group}
                read: Read = first.encoder.store.read
                if calls is not None:
                    read = CompressedRows(read, calls, compression).read_rows
                computed = self._main_scores(first, recorded, list(by_layer), read, self.scoring)
                values |= {_identity(by_layer[layer]): value for layer, value in computed.items()}
            values |= {each.key: self._baseline(each, first) for each in baselines if each.key not in values}
            values |= {_TOKENS: [mean_tokens]} if _TOKENS in others else {}
            numbers = {name: [None if math.isnan(x) else x for x in row] for name, row in values.items()}
            write_file(folder / f"{header['task']}.0.json", sealed({"of": header, "scores": numbers}))
        else:
            self.embedder.planning.step()
        scores, new = [], set(map(_identity, missing))
        for job in jobs:
            score, *resampled = values[_identity(job)]
            kept = _identity(job) not in new
            scores.append(job.score(header["main_score"], score, resampled=resampled, kept=kept))
        return scores, {name: values[key] for key, name in others.items()}

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
        return self._main_scores(job, recorded, [0], lambda _, texts: encoder.vectors(texts))[0]

    def _main_scores(
        self, job: Job, recorded: Sequence[Recorded], layers: Sequence[int], read: Read, stage: Stage | None = None
    ) -> dict[int, list[float]]:
        """Return the main score of each layer and its resamples, combined over splits and subsets as mteb does."""
        if not layers:
            return {}
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
        task = _task(job)
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

    def _confirm(self, jobs: Sequence[Job], workers: Workers, futures: Sequence[Future[Score]]) -> list[Score]:
        """Score some layers of all tasks with mteb, or wait for the scores that are under way."""
        if not jobs:
            return []
        self.confirming.expect(len(jobs))
        return self._run(jobs, self.confirming, workers, futures)

    def _run(
        self, jobs: Sequence[Job], stage: Stage, workers: Workers, futures: Sequence[Future[Score]] = ()
    ) -> list[Score]:
        """Run each job on stored vectors, or wait for the futures of all jobs."""
        scores = {}
        for score in finished_scores(futures) if futures else workers.run(jobs):
            stage.step()
            scores[score.place] = score
        for job in jobs:
            if scores[job.score().place].lacked_a_text:  # its shard was damaged or removed
                scores[job.score().place] = run_job(job, self.embedder)
        return [scores[job.score().place] for job in jobs]


def _tied(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs whose score depends on mteb's rounding: binary vectors are often equally far from others."""
    binary = [job for job in jobs if job.encoder.compression.precision == "binary"]
    return binary if binary and _task(binary[0]).metadata.type in _WITH_TIES else []


def _task(job: Job) -> AbsTask:
    with isolated_random(), quiet_mteb():
        return job.task.make()


def _identity(job: Job) -> str:
    """Return what identifies a layer of an encoder with everything that changes its vectors."""
    return f"{job.encoder.name} {job.encoder.revision}"


def _header(task: AbsTask, job: Job) -> dict[str, Any]:
    """Return everything else that changes a score."""
    names = {name for kind in type(task).__mro__ for name in vars(kind)} | set(vars(task))
    attributes = {name: getattr(task, name, None) for name in sorted(names) if name[0] != "_" and name != "data_loaded"}
    return {
        "format": _FORMAT,
        "task": task.metadata.name,
        "data": task.metadata.revision,
        "main_score": task.metadata.main_score,
        "splits": list(task.eval_splits),
        "subsets": list(task.hf_subsets),
        "store": job.encoder.store.key,
        "mteb": version("mteb"),
        "settings": {key: value for key, value in attributes.items() if isinstance(value, bool | int | float | str)},
    }


def _saved_scores(folder: Path, job: Job) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return what the scores of a task depend on, and the scores that any process has saved."""
    header = _header(_task(job), job)
    values: dict[str, list[float]] = {}
    for path in _saved_files(folder, header["task"]):
        values |= read_artifact(path, partial(_read_scores, header=header)) or {}
    return header, values


def _saved_files(folder: Path, task: str) -> list[Path]:
    """Return the files with the scores of a task, one for each process that has saved some."""
    return sorted(folder.glob(f"{glob.escape(task)}.*.json"))


def _read_scores(path: Path, *, header: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the scores in a file, with their resamples, or none if they belong to something else."""
    if json.loads(path.read_bytes())["of"] != header:
        return {}
    content = read_sealed(path)
    return {
        str(name): [math.nan if number is None else float(number) for number in numbers]
        for name, numbers in content["scores"].items()
    }
