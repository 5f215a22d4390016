"""Run work as jobs of submitit: on a cluster with SLURM, or as processes of this machine."""

import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import MidlayerError, OptionError, error_summary
from midlayer_encoders.files import make_folder, read_artifact, read_json, write_json
from midlayer_encoders.validation import check_choice, check_count

#: Where jobs run: on a cluster with SLURM, or as processes of this machine.
Cluster: TypeAlias = Literal["slurm", "local"]

_MINUTES = 24 * 60  # of a job, unless the caller says otherwise; submitit would end it after five
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 20.0  # until the file of a job that has left the queue appears on a network's file system


class ClusterJob(ABC):
    """Work that a process of its own does; a file tells how it ended."""

    @property
    @abstractmethod
    def outcome(self) -> Path:
        """The file that the job writes at its end: its error, or none."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What an error is about."""

    @abstractmethod
    def run(self) -> str | None:
        """Do the work and return the error, if any."""

    @property
    def is_done(self) -> bool:
        """Whether the job has ended without an error."""
        outcome = read_artifact(self.outcome, read_json)
        return outcome is not None and outcome["error"] is None

    def __call__(self) -> None:
        """Do the work and write the outcome."""
        try:
            error = self.run()
        except MidlayerError as raised:
            error = str(raised)
        except Exception as raised:  # the caller shows it beside other jobs' errors
            error = error_summary(raised)
        make_folder(self.outcome.parent)
        write_json(self.outcome, {"error": error})


@dataclass
class _Running:
    unit: ClusterJob
    job: Any
    attempt: int = 1
    ended: float | None = None  # when it was first seen to have ended


class Queue:
    """Submits jobs, waits for their files, and submits those again that ended without one.

    Args:
        executor: ``"slurm"``, ``"local"``, or an executor of submitit.
        folder: for the logs.
        parameters: of submitit's ``update_parameters``; on this machine ``parallel`` is the number of jobs at once.
        attempts: number of times that a job which ends without a result is started.
    """

    def __init__(
        self, executor: Cluster | Any, folder: Path, parameters: Mapping[str, Any] | None, attempts: int
    ) -> None:
        self.attempts = check_count("attempts", attempts)
        parameters = dict(parameters or {})
        try:
            import submitit
        except ImportError as error:
            raise OptionError("`executor` needs submitit: pip install 'midlayer-encoders[submit]'.") from error
        self.parallel: int | None = None
        if isinstance(executor, str):
            check_choice("executor", executor, get_args(Cluster))
            if executor == "local":
                self.parallel = check_count("parallel", parameters.pop("parallel", 1), "jobs")
            folder.mkdir(parents=True, exist_ok=True)
            try:
                executor = submitit.AutoExecutor(folder=folder, cluster=executor)
            except RuntimeError as error:
                raise OptionError(f"`executor` must be 'local' on a machine without SLURM: {error}") from error
            try:
                executor.update_parameters(**{"timeout_min": _MINUTES, "name": "midlayer", **parameters})
            except (NameError, TypeError, AssertionError) as error:
                raise OptionError(f"`parameters` must fit submitit's update_parameters: {error}") from error
        elif parameters:
            raise OptionError("`parameters` cannot be combined with an executor: call its `update_parameters`.")
        self.executor = executor
        self.running: list[_Running] = []
        self.errors: dict[str, str] = {}

    def run(self, *groups: Sequence[ClusterJob], stage: Stage) -> dict[str, str]:
        """Run the jobs of each group that are not done, one group after another, and return the errors by label."""
        stage.expect(sum(map(len, groups)))
        try:
            for jobs in groups:
                self._drain([job for job in jobs if not job.is_done], len(jobs), stage)
        except BaseException:
            for running in self.running:
                running.job.cancel()
            raise
        return self.errors

    def _drain(self, units: Sequence[ClusterJob], total: int, stage: Stage) -> None:
        """Submit the units of ``total`` that are not done, as many as may run at a time, and wait for them."""
        stage.step(total - len(units))
        left = list(units)
        for unit in left:
            unit.outcome.unlink(missing_ok=True)  # an error of an earlier call
        while left or self.running:
            room = len(left) if self.parallel is None else self.parallel - len(self.running)
            if left and room > 0:
                now, left = left[:room], left[room:]
                self.running += map(_Running, now, self._submit(now))
            time.sleep(_POLL_SECONDS)
            self._look(stage)

    def _submit(self, units: Sequence[ClusterJob]) -> Sequence[Any]:
        try:
            return list(self.executor.map_array(_call, units))
        except RuntimeError as error:  # of submitit
            raise MidlayerError(f"The cluster did not take the jobs: {error}") from error

    def _look(self, stage: Stage) -> None:
        """Remove units that have ended, and submit those again that ended without a result."""
        has_ended = self._ended([running.job for running in self.running])
        again: list[_Running] = []
        for running in list(self.running):
            outcome = read_artifact(running.unit.outcome, read_json)
            if outcome is not None:
                self._end(running, outcome["error"], stage)
            elif has_ended(running.job):
                running.ended = running.ended or time.monotonic()
                if time.monotonic() - running.ended < (_GRACE_SECONDS if self._on_cluster(running.job) else 0):
                    continue
                if running.attempt < self.attempts:
                    self.running.remove(running)
                    again.append(running)
                else:
                    log = running.job.paths.stderr
                    self._end(running, f"it ended {self.attempts} times without a result; its log is {log}.", stage)
        if again:
            jobs = self._submit([running.unit for running in again])
            self.running += [
                _Running(running.unit, job, running.attempt + 1) for running, job in zip(again, jobs, strict=True)
            ]

    def _end(self, running: _Running, error: str | None, stage: Stage) -> None:
        self.running.remove(running)
        stage.step()
        if error is not None:
            self.errors[running.unit.label] = error

    @staticmethod
    def _on_cluster(job: Any) -> bool:
        return type(job).__module__.startswith("submitit.slurm")

    def _ended(self, jobs: Sequence[Any]) -> Callable[[Any], bool]:
        """Return a function that tells whether a job has ended; one call of ``squeue`` for all of them.

        submitit asks ``sacct``, and waits forever where a cluster keeps no accounts.
        """
        if not any(map(self._on_cluster, jobs)):
            return lambda job: bool(job.done())
        arrays = ",".join(sorted({job.job_id.partition("_")[0] for job in jobs}))
        squeue = subprocess.run(
            ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={arrays}"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        if squeue.returncode and "Invalid job id" not in squeue.stderr:  # the controller does not answer
            return lambda _: False
        queued = set(squeue.stdout.split())
        return lambda job: job.job_id not in queued


def _call(unit: ClusterJob) -> None:
    unit()
