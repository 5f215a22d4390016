"""Score one layer on one task with mteb, from stored vectors, in this process or in workers."""

from __future__ import annotations

import json
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import datasets
import mteb
import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub import constants as huggingface_constants
from mteb.abstasks import AbsTask
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.cache import ResultCache
from mteb.models.abs_encoder import AbsEncoder
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.types import PromptType
from sentence_transformers.util import SimilarityFunction

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders._types import EncoderSpec
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.encoder.spec import result_name, result_revision
from midlayer_encoders.errors import FATAL, MidlayerError, OptionError, error_summary
from midlayer_encoders.files import (
    dump_with_checksum,
    explain_full_disk,
    make_folder,
    read_artifact,
    read_with_checksum,
    scratch,
    write_file,
)
from midlayer_encoders.metrics.label_accuracy import all_alike
from midlayer_encoders.models.hub import offline_cause
from midlayer_encoders.sweeping.compression import Compression
from midlayer_encoders.sweeping.embedder import Embedder, Vectors, item_key
from midlayer_encoders.sweeping.process_pool import ProcessPool
from midlayer_encoders.sweeping.store import TextNotStoredError
from midlayer_encoders.tasks.mteb_internals import listed_columns, prompt_name
from midlayer_encoders.tasks.sources import MtebSource, SampledSource, TaskSource, task_sources
from midlayer_encoders.tasks.task_data import whole_name

_POLL_SECONDS = 0.2
_FORMAT = 2  # of the score files; another number invalidates them

# Names under which sentence-transformers looks for the prompt of a query or a document.
_PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


class Prompts:
    """The prompts of an encoder, chosen as sentence-transformers does inside mteb."""

    def __init__(self, encoder: LayerEncoder) -> None:
        self.named = {name: text or "" for name, text in encoder.prompts.items()}
        self.default = encoder.default_prompt_name

    def choose(self, task: TaskMetadata, prompt_type: PromptType | None) -> str:
        """Return the prompt for a task's queries, documents or plain texts; empty if there is none."""
        prompts = self.named
        if not any(prompts.values()):
            return ""
        mteb_prompts = {name: text for name, text in prompts.items() if name != "text"}  # mteb would warn about it
        valid, _ = AbsEncoder.validate_task_to_prompt_name(mteb_prompts, raise_for_invalid_keys=False)
        whole = task.model_copy(update={"name": whole_name(task.name)})  # a sample has the prompts of its task
        name = prompt_name(valid, whole, prompt_type) if valid else None
        if name is not None:
            return prompts[name]
        for fallback in _PROMPT_NAMES.get(prompt_type.value, ()) if prompt_type is not None else ():
            if fallback in prompts:
                return prompts[fallback]
        return prompts.get(self.default or "", "")


class UndefinedScoreError(MidlayerError):
    """A layer has the same vector for all inputs, so a score would be chance or ties."""


class DataUnavailableError(MidlayerError):
    """The data of a task is not cached, and the hub cannot be reached."""


@dataclass(eq=False)
class StoredLayer:
    """An mteb encoder of one layer that reads vectors from the store, by the content of each input.

    Attributes:
        store: holds every layer of every input.
        layer: the layer to read.
        spec: of the encoder cut at the layer; it names mteb's results.
        prompts: prompts of the encoder.
        modalities: modalities of the model.
        compression: of the vectors that are read.
        ensure: called first with the items, their keys and the prompt; embeds items that are not stored.
    """

    store: Vectors
    layer: int
    spec: EncoderSpec
    prompts: Prompts
    modalities: Sequence[str] = ("text",)
    compression: Compression = Compression()
    ensure: Callable[[Sequence[Any], Sequence[str], str], None] | None = None

    def __post_init__(self) -> None:
        self.name = result_name(self.spec)
        precision = self.compression.precision
        self.revision = result_revision(self.spec) + ("" if precision == "float32" else f"-{precision}")
        self.similarity = SimilarityFunction.to_similarity_fn(self.spec.similarity)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(self.spec.similarity)
        self.mteb_model_meta = ModelMeta.create_empty(
            overwrites={
                "name": self.name,
                "revision": self.revision,
                "modalities": list(self.modalities),
                "similarity_fn_name": ScoringFunction(self.spec.similarity),
                "framework": ["PyTorch"],
                "embed_dim": self.compression.dims or self.store.dim,
            }
        )

    def encode(
        self, inputs: Iterable[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None = None, **_: Any
    ) -> npt.NDArray[np.float32]:
        """Return one row per input, shape ``(N, D)``."""
        keys = self.keys(inputs, task_metadata=task_metadata, prompt_type=prompt_type)
        vectors = self.compression.apply(self.store.read(self.layer, keys))
        if all_alike(torch.from_numpy(vectors)[None], keys).item():
            raise UndefinedScoreError(f"All vectors of layer {self.layer} are the same.")
        return vectors

    def keys(self, inputs: Iterable[Any], *, task_metadata: TaskMetadata, prompt_type: PromptType | None) -> list[str]:
        """Return the key of each input, after ``ensure`` has stored them."""
        items: list[Any] = []
        for batch in inputs:  # a task of images may also contain texts
            media = [name for name in self.modalities if name in batch]
            if not media:
                accepted = ", ".join(self.modalities)
                raise OptionError(f"The task provides {', '.join(batch)}, but the model takes {accepted}.")
            if media == ["audio"]:  # a string is the path of a file, whose samples identify it
                items += [Path(item) if isinstance(item, str) else item for item in batch["audio"]]
            elif len(media) == 1:
                items += batch[media[0]]
            else:  # a joint model adds the vectors of a text and its image
                columns = [batch[name] for name in media]
                items += [dict(zip(media, contents, strict=True)) for contents in zip(*columns, strict=True)]
        prompt = self.prompts.choose(task_metadata, prompt_type)
        keys = [item_key(item, prompt) for item in items]
        if self.ensure is not None:
            self.ensure(items, keys, prompt)
        return keys


@dataclass(frozen=True)
class Job:
    """One layer on one task, and the folder of mteb's results; it can be sent to another process."""

    task: TaskSource
    encoder: StoredLayer
    cache: Path

    @property
    def layer(self) -> int:
        """The layer."""
        return self.encoder.layer

    @property
    def result_file(self) -> Path:
        """The result file of mteb."""
        return ResultCache(self.cache).get_task_result_path(self.task.name, self.encoder.mteb_model_meta)

    def score(self, *values: Any, **others: Any) -> Score:
        """Return the score of the layer."""
        return replace(Score(self.task.name, self.layer, *values, **others), compression=self.encoder.compression)


@dataclass(frozen=True)
class Score:
    """The outcome of a job: the main score, or an error message.

    ``resampled`` holds scores on resampled test items, if the layers were scored together. ``kept`` is True for a score
    of an earlier run.
    """

    task: str
    layer: int
    metric: str = ""
    value: float = float("nan")
    error: str | None = None
    lacked_a_text: bool = False
    resampled: Sequence[float] = ()
    compression: Compression = Compression()
    kept: bool = False

    @property
    def place(self) -> tuple[str, int, Compression]:
        """What was scored."""
        return self.task, self.layer, self.compression


def score_identity(task: AbsTask, store: str) -> dict[str, Any]:
    """Return everything but the encoder that changes the scores of a task, and the key of the vectors."""
    names = {name for kind in type(task).__mro__ for name in vars(kind)} | set(vars(task))
    attributes = {name: getattr(task, name, None) for name in sorted(names) if name[0] != "_" and name != "data_loaded"}
    return {
        "format": _FORMAT,
        "task": task.metadata.name,
        "data": task.metadata.revision,
        "main_score": task.metadata.main_score,
        "splits": list(task.eval_splits),
        "subsets": list(task.hf_subsets),
        "store": store,
        "mteb": version("mteb"),
        "settings": {key: value for key, value in attributes.items() if isinstance(value, bool | int | float | str)},
    }


def run_job(job: Job, embedder: Embedder | None = None) -> Score:
    """Score one layer on a new task object; only errors of the disk or the folder are raised.

    If an earlier run has saved the score, it is returned.
    """
    layer = replace(job.encoder, ensure=embedder)
    try:
        with isolated_random(), quiet_mteb():
            task = job.task.make()
            identity = {**score_identity(task, layer.store.key), "model": layer.name, "revision": layer.revision}
            value = read_artifact(job.result_file, partial(_read_score, identity=identity))
            kept = value is not None
            if value is None:
                value = _evaluate(layer, with_data(job.task).make(), job, identity)
    except UndefinedScoreError:
        return job.score(task.metadata.main_score)
    except FATAL:
        raise
    except Exception as error:  # the failure of one task does not stop the others
        return job.score(error=error_summary(error), lacked_a_text=isinstance(error, TextNotStoredError))
    return job.score(task.metadata.main_score, value, kept=kept)


def _evaluate(layer: StoredLayer, task: AbsTask, job: Job, identity: Mapping[str, Any]) -> float:
    """Return mteb's score of a layer, after saving mteb's files with what the score depends on."""
    make_folder(job.cache)  # a full disk must end the sweep here, not task by task
    path = job.result_file
    with scratch(job.cache) as folder, explain_full_disk(path):
        options: dict[str, Any] = {"show_progress_bar": False, "co2_tracker": False}
        score = float(mteb.evaluate(layer, task, cache=ResultCache(folder), **options)[0].get_score())
        result_file = replace(job, cache=folder).result_file
        content = json.loads(result_file.read_bytes())
        write_file(path.with_name("model_meta.json"), result_file.with_name("model_meta.json").read_bytes())
        write_file(path, dump_with_checksum({**content, "midlayer": {"of": identity, "score": score}}))
    return score


def _read_score(path: Path, *, identity: Mapping[str, Any]) -> float | None:
    """Return the score in a file, or ``None`` if it belongs to something else."""
    saved = read_with_checksum(path)["midlayer"]
    return float(saved["score"]) if saved["of"] == identity else None


@lru_cache(maxsize=1)
def with_data(source: TaskSource) -> TaskSource:
    """Return a task with its data, loaded once per process since the layers of a task follow each other."""
    task = source.make()
    if not task.data_loaded:
        cause = offline_cause() if _is_of_mteb(source) else None
        # `datasets` would try to reach the hub for half a minute.
        hubs = [] if cause is None else [huggingface_constants, datasets.config]
        try:
            with ExitStack() as stack:
                for hub in hubs:
                    stack.enter_context(mock.patch.object(hub, "HF_HUB_OFFLINE", True))
                task.load_data()
        except Exception as error:
            if cause is None:
                raise
            raise DataUnavailableError(
                f"The data of {task.metadata.name} is not cached on this machine and the hub cannot be reached "
                f"({cause}). Score your own data or 'builtin', or run it once with a network."
            ) from error
    return task_sources(task)[0]


def _is_of_mteb(source: TaskSource) -> bool:
    """Return True for a task of mteb, or a sample of one."""
    return isinstance(source.source if isinstance(source, SampledSource) else source, MtebSource)


def check_data(sources: Sequence[TaskSource]) -> None:
    """Raise a :class:`DataUnavailableError` if the data of no task can be loaded, before anything is embedded."""
    if not all(map(_is_of_mteb, sources)) or offline_cause() is None:
        return
    for number, source in enumerate(sources, start=1):
        try:
            with isolated_random(), quiet_mteb():
                with_data(source)
                return
        except DataUnavailableError:
            if number == len(sources):
                raise


class Workers:
    """Processes that score layers with mteb and share the cores; the next sweep uses them, too.

    Args:
        cores: number of cores; with one, jobs run in this process.
        max_jobs: maximum number of jobs at a time.
    """

    _pools: ClassVar[dict[tuple[Any, ...], ProcessPool]] = {}

    def __init__(self, cores: int, max_jobs: int) -> None:
        self.count = max(min(cores, max_jobs), 1) if sys.platform != "win32" else 1

    def start(self) -> None:
        """Start the processes and their imports, which take seconds."""
        if self.count > 1:
            self._pool()

    def begin(self, jobs: Sequence[Job]) -> list[Future[Score]]:
        """Start jobs in the background; :meth:`run` yields their scores."""
        pool = self._pool()
        try:
            return [pool.submit(_run_in_worker, job) for job in jobs]
        except (TypeError, pickle.PicklingError) as error:
            raise MidlayerError(
                f"{jobs[0].task.name} cannot be sent to other processes ({error}): sweep with one of `workers`."
            ) from error

    def run(self, jobs: Sequence[Job], futures: Sequence[Future[Score]] = ()) -> Iterator[Score]:
        """Yield the scores of jobs as they finish; those that mteb has saved are read in this process.

        Args:
            jobs: to run.
            futures: of the jobs, if they have begun.
        """
        if not futures:
            saved = [job for job in jobs if job.result_file.exists()]
            others = [job for job in jobs if job not in saved]
            is_alone = self.count == 1 or len(others) <= 1
            yield from map(run_job, [*saved, *(others if is_alone else [])])
            futures = [] if is_alone else self.begin(others)
        pending = set(futures)
        while pending:
            # Short waits, because polars makes long ones deaf to Ctrl-C.
            done, pending = wait(pending, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED)
            try:
                yield from [future.result() for future in done]
            except BrokenExecutor as error:
                raise MidlayerError(
                    "A worker process was killed or could not start, perhaps because memory ran out; if it printed an "
                    "error, that is above. Finished scores are saved: run again, with fewer `workers` if memory is "
                    "short."
                ) from error

    def _pool(self) -> ProcessPool:
        # A fork cannot use its parent's processes; these keep the current folder and the path of their start.
        key = os.getpid(), self.count, Path.cwd(), tuple(sys.path)
        pool = self._pools.get(key)
        if pool is None or not pool.is_alive:
            pool = self._pools[key] = ProcessPool(__name__, self.count)
        return pool

    @classmethod
    def kill(cls) -> None:
        """End the processes now; otherwise an interrupted sweep waits for their jobs."""
        while cls._pools:
            cls._pools.popitem()[1].kill()


def _run_in_worker(job: Job) -> Score:
    job.encoder.store.refresh()
    return run_job(job)


@contextmanager
def quiet_mteb() -> Iterator[None]:
    """Hide the log lines, warnings and progress bars of mteb and datasets, and make mteb decode texts at once."""
    bars_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    logger = logging.getLogger("mteb")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with listed_columns(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
        if not bars_disabled:
            datasets.enable_progress_bars()
