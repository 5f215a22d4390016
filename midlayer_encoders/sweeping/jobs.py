"""One layer on one task, scored by mteb in any process; layers side by side in workers."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mteb
from joblib.executor import get_memmapping_executor

from midlayer_encoders.errors import MidlayerError, error_summary
from midlayer_encoders.store import TextNotStoredError
from midlayer_encoders.sweeping.processes import FATAL
from midlayer_encoders.sweeping.result_files import ResultFiles
from midlayer_encoders.sweeping.stored_layer import Embedder, Prompts, StoredLayer, UndefinedScoreError, Vectors
from midlayer_encoders.tasks import TaskSource, isolated_random, task_sources

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

__all__ = ["Job", "Score", "Workers", "quiet_mteb", "result", "run_job", "with_data"]

_IDLE = 300  # seconds after which a worker without work ends


@dataclass(frozen=True)
class Job:
    """One layer on one task; can be sent to another process."""

    task: TaskSource
    layer: int
    store: Vectors
    name: str
    revision: str
    prompts: Prompts
    modalities: tuple[str, ...]
    cache: Path
    similarity: str = "cosine"

    def stored_layer(self, embedder: Embedder | None = None) -> StoredLayer:
        """Return the layer as mteb sees it; with an embedder, what the store lacks is made when mteb asks for it."""
        return StoredLayer(
            self.store,
            self.layer,
            name=self.name,
            revision=self.revision,
            prompts=self.prompts,
            modalities=self.modalities,
            similarity=self.similarity,
            ensure=embedder,
        )


@dataclass(frozen=True)
class Score:
    """What came of a job: the main score, by mteb or by all layers together, or the error in words."""

    task: str
    layer: int
    metric: str = ""
    value: float = float("nan")
    seconds: float = 0.0
    error: str | None = None
    lacked_a_text: bool = False
    together: bool = False


def run_job(job: Job, embedder: Embedder | None = None) -> Score:
    """Return the score of one layer on a fresh task object; an error is returned, and raised only of disk or folder.

    mteb keeps its own result file, and returns what is in it when it is there already.
    """
    layer = job.stored_layer(embedder)
    start = time.perf_counter()
    try:
        with isolated_random(), quiet_mteb():
            cache, known = ResultFiles(job.cache), job.task.make()
            if (result := _cached(layer, known, cache)) is None:
                task = with_data(job.task).make()
                mteb.evaluate(layer, task, cache=cache, show_progress_bar=False, co2_tracker=False)
                # What its file holds, rounded as mteb rounds, so that a resumed run has the same numbers.
                result = _cached(layer, known, cache)
    except UndefinedScoreError:
        return Score(job.task.name, job.layer, known.metadata.main_score)
    except FATAL:  # not the task's fault: the next one may fail for it too
        raise
    except Exception as error:  # whatever a task does wrong is that task's failure, and the others go on
        lacked = isinstance(error, TextNotStoredError)
        return Score(job.task.name, job.layer, error=error_summary(error), lacked_a_text=lacked)
    seconds = time.perf_counter() - start
    return Score(job.task.name, job.layer, known.metadata.main_score, float(result.get_score()), seconds)


def _cached(layer: StoredLayer, task: AbsTask, cache: ResultFiles) -> Any:
    """Return what mteb's result file holds, or ``None`` where there is none."""
    try:
        return mteb.evaluate(layer, task, cache=cache, overwrite_strategy="only-cache", show_progress_bar=False)[0]
    except ValueError:
        return None


@lru_cache(maxsize=1)
def with_data(source: TaskSource) -> TaskSource:
    """Return a task with its data, read once in a process: the layers of a task follow each other."""
    task = source.make()
    if not task.data_loaded:
        task.load_data()
    return task_sources(task)[0]


class Workers:
    """Processes that score layers by mteb; they share the cores.

    Args:
        count: how many may run; with one, everything is run in this process.
        most: jobs that there may be at once.
    """

    def __init__(self, count: int, most: int) -> None:
        self.count, self.threads = max(min(count, most), 1), max(count // max(most, 1), 1)

    def start(self) -> None:
        """Have the processes import what they need while this one does something else: it takes them seconds."""
        if self.count > 1:
            pool = self._pool()
            for _ in range(self.count):
                pool.submit(_wait, 0.1)

    def begin(self, jobs: Sequence[Job]) -> list[Future[Score]]:
        """Begin jobs beside whatever this process does next; :func:`result` waits for one."""
        pool = self._pool()
        return [pool.submit(_in_worker, job) for job in jobs]

    def run(self, jobs: Sequence[Job]) -> Iterator[Score]:
        """Yield the scores of jobs as they come."""
        if self.count == 1 or len(jobs) <= 1:
            yield from map(run_job, jobs)
        else:
            begun = self.begin(jobs)
            try:
                yield from map(result, as_completed(begun))
            finally:  # stopped before the end: what no worker has begun yet is not begun
                for one in begun:
                    one.cancel()

    def _pool(self) -> Any:
        # joblib's workers are the same from sweep to sweep, and do not run the caller's script again. They are taken
        # from joblib, not from loky inside it: it would stumble over a pool that it did not make.
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        return get_memmapping_executor(self.count, timeout=_IDLE, env=dict.fromkeys(names, str(self.threads)))


def result(begun: Future[Score]) -> Score:
    """Return the score of a job that a worker was given, when it is there."""
    try:
        return begun.result()
    except BrokenExecutor as error:
        raise MidlayerError(
            "A worker process was killed while it scored layers, perhaps because memory ran out. What was scored is "
            "kept: run again, with fewer `workers` where memory is short."
        ) from error


def _wait(seconds: float) -> None:
    """Keep one worker busy, so that another takes the next call; this module is imported where it runs."""
    time.sleep(seconds)


def _in_worker(job: Job) -> Score:
    import torch

    torch.set_num_threads(1)
    job.store.refresh()
    return run_job(job)


@contextmanager
def quiet_mteb() -> Iterator[None]:
    """Keep mteb's and datasets' notices and bars out of the way of ours."""
    import datasets

    level = logging.getLogger("mteb").level
    logging.getLogger("mteb").setLevel(logging.ERROR)
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger("mteb").setLevel(level)
        if not bars:
            datasets.enable_progress_bars()
