"""Units of work: the steps of jobs, such as the sweep of a model, and the loop that hands them to an executor.

A job is an object in a file. Each process loads it once, and keeps its model for the next step. Its methods are named
after the steps; they take the folder of the job, which all machines share, and write what they make into files.
"""

import json
import pickle
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import cloudpickle

from midlayer_encoders._types import Progress, Stage, content_digest
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary, pluralize
from midlayer_encoders.extras.scaling.executors import check_executor, submit_all
from midlayer_encoders.files import read_artifact, read_json, write_file
from midlayer_encoders.sweeping.embedder import Embedder

_ATTEMPTS = 3  # of a step whose process ends
_MAX_INPUTS = 2048  # of a block: several blocks for each of 64 workers in a collection of a million
_MAX_TOKENS = 1 << 20

#: The prompt of a batch, its items by key, and the keys that are neither stored nor in an earlier batch.
_Batch: TypeAlias = tuple[str, dict[str, Any], set[str]]


@dataclass(frozen=True)
class Unit:
    """One step of a job: work that any process of any machine can do, as often as it likes.

    Attributes:
        job: file of the job; its folder holds what the units write.
        step: method of the job: ``"plan"`` blocks, ``"embed"`` a block, or another one.
        label: what an error is about.
        outcome: file that is written last, with what the method returns, such as the blocks of a plan; or the block,
            which is removed when it is embedded.
        items: arguments of the method after the folder of the job.
    """

    job: Path
    step: str
    label: str
    outcome: Path
    items: tuple[Any, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether the unit has written its outcome, or removed its block."""
        return self.outcome.is_file() != (self.step == "embed")

    def run(self) -> None:
        """Do the step, unless another process has done it."""
        if not self.is_done:
            result = getattr(_load_job(self.job), self.step)(self.job.parent, *self.items)
            if result is not None:
                write_file(self.outcome, json.dumps(result).encode())


def write_job(folder: Path, model: Any, job: Any) -> Path:
    """Write a job of a model to a file that is named after its content, and return the path."""
    if not isinstance(model, str):
        raise OptionError("`model` must be a folder or hub name with an executor: each of its processes loads it.")
    content = cloudpickle.dumps(job)
    path = folder / f"{content_digest(content, 8)}.job"
    write_file(path, content)
    return path


@lru_cache(maxsize=1)  # the next step of this process is often of the same model
def _load_job(path: Path) -> Any:
    return cloudpickle.loads(path.read_bytes())


class ProcessLostError(MidlayerError):
    """The process of a unit ended without a result, each time."""


def call_unit(unit: Any) -> str | None:
    """Do the work of a unit in a process of an executor, and return its error, which the driver shows."""
    try:
        unit.run()
    except Exception as error:
        return str(error) if isinstance(error, MidlayerError) else error_summary(error)
    return None


def run_units(units: Sequence[Any], executor: Any, *, stage: Stage) -> dict[Any, MidlayerError]:
    """Run the units that are not done, and return the errors of those that failed.

    A unit whose process ends is submitted again, three times at most; the others continue. At an interruption, those
    that have not begun are canceled.

    Args:
        units: objects with ``is_done`` and ``run()``, such as :class:`Unit`.
        executor: with ``submit(function, *arguments)``, which returns something with ``result()``.
        stage: counts units.
    """
    executor = check_executor(executor)
    stage.expect(len(units))
    left = [unit for unit in units if not unit.is_done]
    stage.step(len(units) - len(left))
    attempts: Counter[Any] = Counter()
    errors: dict[Any, MidlayerError] = {}
    running: dict[Any, Any] = {}
    try:
        while left or running:
            running |= zip(left, submit_all(executor, call_unit, left), strict=True)
            left = []
            ended = [unit for unit, future in running.items() if not hasattr(future, "done") or future.done()]
            for unit in ended:
                try:
                    if (error := running.pop(unit).result()) is not None:
                        errors[unit] = MidlayerError(error)
                except Exception as reason:  # of the engine: the process was lost
                    attempts[unit] += 1
                    if not unit.is_done and attempts[unit] < _ATTEMPTS:
                        left.append(unit)
                        continue
                    if not unit.is_done:
                        lost = f"its process ended {_ATTEMPTS} times without a result: {error_summary(reason)}"
                        errors[unit] = ProcessLostError(lost)
                stage.step()
            if not ended:
                time.sleep(0.05)
    finally:  # of an interruption
        for future in running.values():
            future.cancel()
    return errors


def run_jobs(units: Sequence[Unit], executor: Any, progress: Progress | None, repeated: Collection[str] = ()) -> None:
    """Run the units of jobs: all plans, then the blocks that they made, then the others.

    Args:
        units: of several jobs.
        executor: as in :func:`run_units`.
        progress: called with the stage ``"units"``.
        repeated: steps whose errors the last step reports, since it does again what failed.

    Raises:
        MidlayerError: a job failed; the message has the first error. The other jobs are done.
    """
    stage = Stage(progress, "units")
    units = list(units)
    errors: dict[Unit, MidlayerError] = {}
    for step in ("plan", "embed", "score", "finish"):
        broken = {unit.job for unit in errors}
        chosen = [unit for unit in units if unit.step == step and unit.job not in broken]
        for unit, error in run_units(chosen, executor, stage=stage).items():
            if step not in repeated or isinstance(error, ProcessLostError):
                errors[unit] = error
        for plan in chosen if step == "plan" else ():
            for *items, block in read_artifact(plan.outcome, read_json) or ():
                label = f"{plan.label}, {block}"
                units.append(Unit(plan.job, "embed", label, plan.job.with_name(block), (*items, block)))
    if errors:
        first, error = next(iter(errors.items()))
        raise MidlayerError(
            f"{pluralize(len(errors), 'unit')} failed, such as {first.label}: {error} Run the same call again to "
            "repeat them; the others are done."
        )


@dataclass
class Planner:
    """Writes what an embedder would embed to files in a folder, instead of embedding it.

    Batches are those of one process, so blocks have the vectors of one process, whoever embeds them.

    Attributes:
        embedder: plans the batches.
        folder: of the files.
        seen: keys that are planned, by this or another planner of the same store.
        names: of the files.
    """

    embedder: Embedder
    folder: Path
    seen: set[str] = field(default_factory=set)
    names: list[str] = field(default_factory=list)
    _block: list[_Batch] = field(default_factory=list)

    def __call__(self, items: Sequence[Any], keys: Sequence[str], prompt: str) -> None:
        """Plan the batches of the items that are neither stored nor planned."""
        distinct: dict[str, Any] = dict(zip(keys, items, strict=True))
        names = list(distinct)
        missing = {n for n in self.embedder.store.missing(names) if names[n] not in self.seen}
        self.seen.update(names)
        for batch in self.embedder.plan(distinct, missing, prompt) if missing else ():
            if new := missing.intersection(batch):
                batch_items = {names[n]: distinct[names[n]] for n in batch}
                self._block.append((prompt, batch_items, {names[n] for n in new}))
                num_inputs = sum(len(each) for _, each, _ in self._block)
                if num_inputs >= _MAX_INPUTS or len(self._block) * self.embedder.tokens >= _MAX_TOKENS:
                    self.flush()

    def flush(self) -> list[str]:
        """Write the last block, and return the names of all."""
        if self._block:
            store = self.embedder.store
            keys = sorted(key for _, _, new in self._block for key in new)
            self.names.append(f"{content_digest(repr((store.key, store.layers, keys)), 8)}.block")
            write_file(self.folder / self.names[-1], pickle.dumps(self._block))
            self._block = []
        return self.names


def embed_block(path: Path, embedder: Embedder) -> None:
    """Embed the inputs of a block that are not stored, and remove its file."""
    block: list[_Batch] = read_artifact(path, lambda file: pickle.loads(file.read_bytes())) or []
    for prompt, group in groupby(block, key=itemgetter(0)):
        batches = list(group)
        items = {key: item for _, batch_items, _ in batches for key, item in batch_items.items()}
        places = {key: place for place, key in enumerate(items)}
        new = {places[key] for _, _, keys in batches for key in keys}
        if missing := new.intersection(embedder.store.missing(list(items))):
            embedder.embed(items, missing, [[places[key] for key in each] for _, each, _ in batches], prompt)
    path.unlink(missing_ok=True)
