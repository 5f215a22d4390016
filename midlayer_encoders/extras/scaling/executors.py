"""Executors: processes of this machine, and adapters of submitit, Dask and Ray."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from midlayer_encoders._isolation import usable_cores
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.sweeping.process_pool import ProcessPool
from midlayer_encoders.validation import check_choice, check_count

#: Executors by name.
Engine: TypeAlias = Literal["processes", "slurm", "dask", "ray"]

_MINUTES = 24 * 60  # of a job of submitit, which would end it after five
_GRACE_SECONDS = 20.0  # until the file of a job that has left SLURM's queue appears on a network's file system
_MODULE = "midlayer_encoders.sweeping.layer_sweep"  # imported before the first unit


class Adapted:
    """An executor with what :func:`run_units` calls: submission of many units, and which of them have ended."""

    def __init__(self, executor: Any) -> None:
        self.executor = executor

    def submit_all(self, function: Callable[[Any], Any], units: Sequence[Any]) -> list[Any]:
        """Submit each unit, and return their futures."""
        return [self.executor.submit(function, unit) for unit in units]

    def finished(self, futures: Sequence[Any]) -> list[bool]:
        """Return which futures have a result or an error; one without ``done`` is waited for."""
        return [future.done() if hasattr(future, "done") else True for future in futures]


def adapted(executor: Any) -> Any:
    """Return an executor of any engine as :func:`run_units` needs it."""
    if isinstance(executor, str):
        raise OptionError(f"`executor` must be an object with `submit`, such as open_executor({executor!r}) yields.")
    if isinstance(executor, ProcessPoolExecutor):
        return Adapted(_apart(executor))
    if type(executor).__module__.startswith("submitit"):
        return _Submitit(executor)
    if hasattr(executor, "get_executor"):  # a client of Dask, which would return the result of an equal earlier call
        executor = executor.get_executor(pure=False)
    if not callable(getattr(executor, "submit", None)):
        raise OptionError(f"`executor` must have a method `submit`, but {type(executor).__name__} has none.")
    return Adapted(executor)


class Processes:
    """An executor of processes that are started again when they end: one for each GPU, or ``count`` of them.

    Unlike those of ``multiprocessing``, its processes do not run the caller's script again.

    Args:
        count: number of processes; by default one for each GPU, or two without GPUs.
        make: makes the executor of one process, from its number.
    """

    def __init__(self, count: int | None = None, make: Callable[[int], Any] | None = None) -> None:
        from torch import cuda

        self.count = check_count("count", count, "processes") if count is not None else cuda.device_count() or 2
        threads = max(usable_cores() // self.count, 1)
        gpus = cuda.device_count()

        def start(number: int) -> ProcessPool:
            device = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus else {}
            return ProcessPool(_MODULE, 1, threads, {"LOKY_MAX_CPU_COUNT": str(threads), **device})

        self._make = make or start
        self._workers: dict[int, Any] = {}
        self._idle: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(self.count):
            self._idle.put(number)
        self._starting = threading.Lock()
        self._threads = ThreadPoolExecutor(self.count, "midlayer executor")  # each waits for one process

    def __repr__(self) -> str:
        return f"Processes({self.count})"

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call the function in a process; the future raises ``BrokenExecutor`` if the process is killed."""
        return self._threads.submit(self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        number = self._idle.get()
        try:
            worker = self._workers.get(number)
            if worker is None or (isinstance(worker, ProcessPool) and not worker.is_alive):
                worker = self._workers[number] = self._make(number)
            # A process that was forked meanwhile would hold open the pipe that tells of the end of this one.
            with self._starting:
                future = worker.submit(function, *arguments)
            return future.result()
        except BrokenExecutor:
            self._workers.pop(number, None)
            raise
        finally:
            self._idle.put(number)

    def shutdown(self) -> None:
        """End the processes."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers.values():
            worker.kill() if isinstance(worker, ProcessPool) else worker.shutdown(wait=False, cancel_futures=True)


def _apart(pool: ProcessPoolExecutor) -> Processes:
    """Return single processes like those of a pool, which would break as a whole when one of them is killed."""
    described: Any = pool  # its settings are private; tests/extras/scaling reads them
    settings = {"mp_context": described._mp_context, "initializer": described._initializer}
    return Processes(described._max_workers, lambda _: type(pool)(1, **settings, initargs=described._initargs))


class _Submitit(Adapted):
    """Jobs of submitit, submitted as one array; SLURM's queue tells which have ended.

    submitit asks ``sacct``, and waits forever where a cluster keeps no accounts.
    """

    def __init__(self, executor: Any) -> None:
        super().__init__(executor)
        self._gone: dict[Any, float] = {}  # when jobs were first seen to have left the queue

    def submit_all(self, function: Callable[[Any], Any], units: Sequence[Any]) -> list[Any]:
        """Submit an array of jobs."""
        try:
            return [_SubmititFuture(job) for job in self.executor.map_array(function, units)]
        except RuntimeError as error:
            raise MidlayerError(f"The cluster did not take the jobs: {error}") from error

    def finished(self, futures: Sequence[Any]) -> list[bool]:
        """Return which jobs have written their result, or have left the queue without one."""
        waiting = [future for future in futures if not future.has_result]
        on_slurm = [future.job.job_id for future in waiting if "slurm" in type(future.job).__module__]
        queued = _queued_jobs(on_slurm) if on_slurm else set()
        for future in waiting:
            if future.job.job_id in on_slurm:
                gone = queued is not None and future.job.job_id not in queued
                since = self._gone.setdefault(future, time.monotonic()) if gone else time.monotonic()
                future.is_lost = time.monotonic() - since > _GRACE_SECONDS
            else:
                future.is_lost = future.job.done()
        return [future.has_result or future.is_lost for future in futures]


class _SubmititFuture:
    """A job of submitit; its result is read from its file alone."""

    def __init__(self, job: Any) -> None:
        self.job = job
        self.is_lost = False

    @property
    def has_result(self) -> bool:
        return bool(self.job.paths.result_pickle.exists())

    def result(self) -> Any:
        if not self.has_result:
            raise MidlayerError(f"its log is {self.job.paths.stderr}")
        return self.job.result()

    def cancel(self) -> None:
        self.job.cancel()


def _queued_jobs(ids: Sequence[str]) -> set[str] | None:
    """Return the jobs in SLURM's queue, or ``None`` if its controller does not answer."""
    arrays = ",".join(sorted({each.partition("_")[0] for each in ids}))
    squeue = subprocess.run(
        ["squeue", "--noheader", "--array", "--format=%i", f"--jobs={arrays}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if squeue.returncode and "Invalid job id" not in squeue.stderr:
        return None
    return set(squeue.stdout.split())


class RayExecutor:
    """Ray as an executor: a task for each unit, with a GPU if the cluster has any.

    Args:
        address: of a cluster, as in ``ray.init``; by default that of ``RAY_ADDRESS``, or a new one on this machine.
        resources: of a task, as in ``ray.remote``: ``num_gpus``, ``num_cpus``, ``memory``.
    """

    def __init__(self, address: str | None = None, **resources: Any) -> None:
        ray = _imported("ray")
        if not ray.is_initialized():
            ray.init(address, include_dashboard=False, log_to_driver=False)
        if "num_gpus" not in resources and ray.cluster_resources().get("GPU", 0) >= 1:
            resources["num_gpus"] = 1
        self._ray = ray
        self._call = ray.remote(max_retries=0, **resources)(_call)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the function in a task; the future raises an error of Ray if its process ends."""
        reference = self._call.remote(function, *arguments)
        future = reference.future()
        future.add_done_callback(lambda done: self._ray.cancel(reference) if done.cancelled() else None)
        return future


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _imported(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        extra = {"submitit": "slurm", "dask.distributed": "dask"}.get(package, package)
        raise OptionError(f"`executor` needs {package}: pip install 'midlayer-encoders[{extra}]'.") from error


@contextmanager
def open_executor(name: Engine, folder: Path | str, options: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Yield an executor by name, and end what was started for it.

    Args:
        name: ``"processes"``, ``"slurm"``, ``"dask"`` or ``"ray"``.
        folder: for the logs of submitit.
        options: ``count`` of processes; of submitit's ``update_parameters`` (``gpus_per_node``, ``timeout_min``, …); of
            ``dask.distributed.Client`` (``address``, or ``n_workers`` for processes of this machine); ``address`` and
            ``num_gpus``, ``num_cpus`` of a task with Ray.
    """
    check_choice("executor", name, get_args(Engine))
    options = dict(options or {})
    with ExitStack() as stack:
        try:
            executor = _OPENED[name](stack, Path(folder), options)
        except TypeError as error:
            raise OptionError(f"`--executor-option` must fit {name}: {error}") from error
        yield executor


def _processes(stack: ExitStack, _: Path, options: Mapping[str, Any]) -> Processes:
    executor = Processes(**options)
    stack.callback(executor.shutdown)
    return executor


def _dask(stack: ExitStack, _: Path, options: Mapping[str, Any]) -> Any:
    local: dict[str, Any] = (
        {} if {"address", "scheduler_file"} & options.keys() else {"threads_per_worker": 1, "n_workers": 2}
    )
    return stack.enter_context(_imported("dask.distributed").Client(**{**local, **options}))


def _ray(stack: ExitStack, _: Path, options: Mapping[str, Any]) -> RayExecutor:
    ray = _imported("ray")
    if not ray.is_initialized():
        stack.callback(ray.shutdown)
    return RayExecutor(**options)


def _slurm(_: ExitStack, folder: Path, options: Mapping[str, Any]) -> Any:
    submitit = _imported("submitit")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster="slurm")
    except RuntimeError as error:
        raise OptionError(f"`executor` must be 'processes' on a machine without SLURM: {error}") from error
    try:
        executor.update_parameters(**{"timeout_min": _MINUTES, "name": "midlayer", **options})
    except (NameError, TypeError, AssertionError) as error:
        raise OptionError(f"`--executor-option` must fit submitit's update_parameters: {error}") from error
    return executor


_OPENED: dict[str, Callable[..., Any]] = {"processes": _processes, "slurm": _slurm, "dask": _dask, "ray": _ray}
