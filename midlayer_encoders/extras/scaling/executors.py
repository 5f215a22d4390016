"""Executors: processes of this machine, and adapters of submitit, Dask and Ray."""

import os
import queue
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from midlayer_encoders._isolation import usable_cores
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.settings import require_packages
from midlayer_encoders.sweeping.process_pool import ProcessPool
from midlayer_encoders.validation import check_choice, check_count

#: Executors by name, and the packages that they need.
_PACKAGES = {"processes": (), "slurm": ("submitit",), "dask": ("distributed",), "ray": ("ray",)}
_GRACE_SECONDS = 20.0  # until the file of a job that has left SLURM's queue appears on a network's file system
_MODULE = "midlayer_encoders.sweeping.layer_sweep"  # imported before the first unit


class Processes(ThreadPoolExecutor):
    """An executor of processes that are started again when they end: one for each GPU, or ``count`` of them.

    Its processes do not run the caller's script again, as ``multiprocessing`` does.

    Args:
        count: number of processes; by default one for each GPU, or two without GPUs.
        initializer: called first in each process.
    """

    def __init__(self, count: int | None = None, initializer: Callable[[], object] | None = None) -> None:
        from torch import cuda

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._gpus = [visible.split(",")[n] if visible else str(n) for n in range(cuda.device_count())]
        self.count = check_count("count", count, "processes") if count is not None else len(self._gpus) or 2
        super().__init__(self.count, "midlayer executor")  # each thread waits for one process
        self._prepare = initializer
        self._workers: dict[int, ProcessPool] = {}
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.count):
            self._idle.put(number)

    def __repr__(self) -> str:
        return f"Processes({self.count})"

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Future[Any]:  # type: ignore[override]
        """Call the function in a process; the future raises ``BrokenExecutor`` if the process is killed."""
        return super().submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        number = self._idle.get()
        try:
            worker = self._workers.get(number)
            if worker is None or not worker.is_alive:
                threads = max(usable_cores() // self.count, 1)
                device = {"CUDA_VISIBLE_DEVICES": self._gpus[number % len(self._gpus)]} if self._gpus else {}
                worker = ProcessPool(_MODULE, 1, threads, {"LOKY_MAX_CPU_COUNT": str(threads), **device})
                if self._prepare is not None:
                    worker.submit(self._prepare).result()
                self._workers[number] = worker
            return worker.submit(function, *arguments).result()
        finally:
            self._idle.put(number)

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:  # noqa: ARG002  (ends all at once)
        """End the processes."""
        super().shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.values():
            worker.kill()


class RayExecutor(Executor):
    """Ray as an executor: a task for each unit, with a GPU if the cluster has any.

    Args:
        address: of a cluster, as in ``ray.init``; defaults to ``RAY_ADDRESS``, or a new one on this machine.
        resources: of a task, as in ``ray.remote``: ``num_gpus``, ``num_cpus``, ``memory``.
    """

    def __init__(self, address: str | None = None, **resources: Any) -> None:
        import ray

        self._ray, self._is_owner = ray, not ray.is_initialized()
        if self._is_owner:
            ray.init(address, include_dashboard=False, log_to_driver=False)
        if "num_gpus" not in resources and ray.cluster_resources().get("GPU", 0) >= 1:
            resources["num_gpus"] = 1
        self._call = ray.remote(max_retries=0, **resources)(_call)

    def submit(self, function: Callable[..., Any], /, *arguments: Any) -> Any:  # type: ignore[override]
        """Call the function in a task; the future raises an error of Ray if its process ends."""
        reference = self._call.remote(function, *arguments)
        future = reference.future()
        future.add_done_callback(lambda done: self._ray.cancel(reference) if done.cancelled() else None)
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:  # noqa: ARG002  (ends all at once)
        """Leave the cluster, and end it if it was started for this executor."""
        if self._is_owner:
            self._ray.shutdown()


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def check_executor(executor: Any) -> Any:
    """Return an executor that can lose a process, or raise if it has no ``submit``."""
    if isinstance(executor, ProcessPoolExecutor):
        return _replace_pool(executor)
    if hasattr(executor, "get_executor"):  # a client of Dask, which would return the result of an equal earlier call
        return executor.get_executor(pure=False)
    if not callable(getattr(executor, "submit", None)):
        raise OptionError(f"`executor` must have a method `submit`, as in `open_executor`, but got {executor!r}.")
    return executor


@lru_cache(maxsize=1)
def _replace_pool(pool: Any) -> Processes:
    """Return processes like those of a pool, which would break as a whole when one of them is killed."""
    # Its settings are private; tests/scaling/test_units.py reads them.
    return Processes(pool._max_workers, partial(pool._initializer, *pool._initargs) if pool._initializer else None)


def submit_all(executor: Any, function: Callable[[Any], Any], units: Sequence[Any]) -> list[Any]:
    """Submit units, and return their futures. Jobs of submitit are submitted as one array."""
    if not units or not type(executor).__module__.startswith("submitit"):
        return [executor.submit(function, unit) for unit in units]
    try:
        jobs = executor.map_array(function, units)
    except RuntimeError as error:
        raise MidlayerError(f"The cluster did not take the jobs: {error}") from error
    return [_SlurmJob(job) if "slurm" in type(job).__module__ else job for job in jobs]


class _SlurmJob:
    """A job of submitit that ends when its result is written, or a while after it has left SLURM's queue.

    submitit asks ``sacct``, and waits forever where a cluster keeps no accounts.
    """

    def __init__(self, job: Any) -> None:
        self.job = job
        self.cancel = job.cancel
        self._file: Path = job.paths.result_pickle
        self._last_seen = time.monotonic()

    def done(self) -> bool:
        queued = _queued_jobs(int(time.monotonic() / 2))
        if queued is None or self.job.job_id in queued:
            self._last_seen = time.monotonic()
        return self._file.exists() or time.monotonic() - self._last_seen > _GRACE_SECONDS

    def result(self) -> Any:
        if not self._file.exists():
            raise MidlayerError(f"its log is {self.job.paths.stderr}")
        return self.job.result()


@lru_cache(maxsize=1)
def _queued_jobs(now: int) -> set[str] | None:  # noqa: ARG001  (asked once for each value)
    """Return the user's jobs in SLURM's queue, or ``None`` if its controller does not answer."""
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    squeue = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if squeue.returncode else set(squeue.stdout.split())


def open_executor(
    name: str, folder: Path | str, options: Mapping[str, Any] | None = None
) -> AbstractContextManager[Any]:
    """Return a context with an executor, which ends what was started for it.

    Args:
        name: ``"processes"``, ``"slurm"``, ``"dask"`` or ``"ray"``.
        folder: for the logs of submitit.
        options: ``count`` of processes; of submitit's ``update_parameters`` (``gpus_per_node``, ``timeout_min``, …); of
            ``dask.distributed.Client`` (``address``, or ``n_workers`` for processes of this machine); ``address`` and
            ``num_gpus``, ``num_cpus`` of a task with Ray.
    """
    check_choice("executor", name, _PACKAGES)
    require_packages(name, *_PACKAGES[name])
    options = dict(options or {})
    try:
        if name == "processes":
            return Processes(**options)
        if name == "ray":
            return RayExecutor(**options)
        if name == "dask":
            from distributed import Client

            if not {"address", "scheduler_file"} & options.keys():
                options = {"n_workers": 2, "threads_per_worker": 1} | options
            client: AbstractContextManager[Any] = Client(**options)
            return client
        from submitit import AutoExecutor

        executor = AutoExecutor(folder=folder, cluster="slurm")  # whose jobs would end after five minutes
        executor.update_parameters(**{"timeout_min": 24 * 60, "name": "midlayer"} | options)
        return nullcontext(executor)
    except (TypeError, ValueError, NameError, AssertionError, RuntimeError) as error:
        raise OptionError(f"`executor` cannot be {name!r} with the options {options}: {error}") from error
