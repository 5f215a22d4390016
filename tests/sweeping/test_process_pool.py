"""Processes that score layers with mteb: their results and errors, and how they end."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import select as selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any

import joblib
import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders._isolation import usable_cores
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.sweeping import mteb_jobs
from midlayer_encoders.sweeping.mteb_jobs import Workers
from midlayer_encoders.sweeping.process_pool import ProcessPool, end_with_parent
from tests.support.others_warnings import MTEB
from tests.sweeping.scoring import sweep
from tests.sweeping.test_sweep import sentence

Folder = Callable[[str], str]
pytestmark = MTEB


def run_in_fork(function: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child of this process, or None if the child crashes or hangs."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=lambda: send.send(function()))
    process.start()
    process.join(timeout=30)
    process.kill()
    return receive.recv() if receive.poll() else None


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_child_encodes_and_refuses_to_make_frames_after_its_parent_made_some(
    tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    texts = [sentence(number) for number in range(64)]
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        expected = encoder.encode(texts)
        measure(encoder, texts[:4], metrics=["curvature"])

        def in_child() -> Any:
            errors = []
            for function in (lambda: sweep(encoder, out=tmp_path / "out"), lambda: measure(encoder, texts[:4])):
                try:
                    function()
                except MidlayerError as error:
                    errors.append(str(error))
            return LayerEncoder(encoder.source, -1, device="cpu").encode(texts), encoder.encode_layers(texts), errors

        new_vectors, vectors, errors = run_in_fork(in_child)
    finally:
        torch.set_num_threads(num_threads)
    np.testing.assert_allclose(new_vectors, expected, atol=1e-5)
    np.testing.assert_allclose(vectors[-1], expected, atol=1e-5)
    assert len(errors) == 2
    assert set(errors) == {error for error in errors if "multiprocessing.get_context('spawn')" in error}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_process_ends_with_its_killed_parent() -> None:
    ended, open_end = os.pipe()
    parent = os.fork()
    if parent == 0:
        if os.fork() == 0:
            end_with_parent(os.getppid())
            os.write(open_end, b"started")
        time.sleep(60)
        os._exit(0)
    os.close(open_end)
    assert os.read(ended, 7) == b"started"
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    readable, _, _ = selectors.select([ended], [], [], 5)
    assert readable
    assert os.read(ended, 1) == b""  # the child has closed its end
    os.close(ended)


_WORKERS_SCRIPT = """
import os, time
from midlayer_encoders.sweeping.mteb_jobs import Workers

if __name__ == "__main__":
    workers = Workers(2, 2)
    workers.start()
    pool = workers._pool()
    print(*{pool.submit(os.getpid).result() for _ in range(50)}, flush=True)
    pool.submit(time.sleep, 60)  # one is busy and one idle
    print("busy", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow  # processes that import mteb
def test_workers_end_with_their_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(_WORKERS_SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        workers = parent.stdout.readline().split()
        assert workers
        assert parent.stdout.readline() == b"busy\n"
        parent.kill()
        killed = time.monotonic()
        assert parent.stdout.read() == b""  # ends when the last worker, which inherits it, has ended
        assert time.monotonic() - killed < 5


@pytest.mark.parametrize(
    ("variables", "cores", "expected"),
    [
        ({}, 8, 8),
        ({"SLURM_CPUS_ON_NODE": "16"}, 64, 16),  # a task that is not bound to cores
        ({"SLURM_CPUS_ON_NODE": "16"}, 8, 8),
        ({"SLURM_CPUS_ON_NODE": "16", "SLURM_CPUS_PER_TASK": "4"}, 64, 4),
    ],
)
def test_cores_are_those_that_slurm_and_the_machine_allow(
    variables: dict[str, str], cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_CPUS_ON_NODE", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    assert usable_cores() == expected


@pytest.fixture
def pool() -> Iterator[ProcessPool]:
    """Return a pool that imports nothing else."""
    pool = ProcessPool("math", 2)
    yield pool
    pool.kill()


def test_pool_returns_results_and_raises_errors_of_its_processes(pool: ProcessPool) -> None:
    assert [future.result() for future in [pool.submit(abs, -number) for number in range(5)]] == [0, 1, 2, 3, 4]
    own = eval("lambda number: number + 7", {"__name__": "__main__"})  # as in a notebook: it cannot be imported
    assert pool.submit(own, 1).result() == 8
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result()
    assert pool.submit(os.getenv, "OMP_NUM_THREADS").result() == "1"
    with pytest.raises(SystemExit):
        pool.submit(sys.exit, 3).result()
    with pytest.raises(TypeError, match="cannot pickle"):
        pool.submit(threading.Lock).result()
    if (child := os.fork()) == 0:
        atexit._run_exitfuncs()  # as a fork that exits
        os._exit(0)
    os.waitpid(child, 0)
    busy = [pool.submit(time.sleep, 0.2) for _ in range(2)]
    assert len({pool.submit(os.getpid).result() for _ in range(8)} | {os.getpid()}) >= 2
    assert [future.result() for future in busy] == [None, None]
    assert pool.is_alive


def test_killed_process_breaks_the_pool(pool: ProcessPool) -> None:
    process, other = pool.submit(os.getpid).result(), pool.submit(time.sleep, 60)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(BrokenExecutor):
        other.result(timeout=20)
    with pytest.raises(BrokenExecutor):
        pool.submit(os.getpid).result(timeout=20)
    assert not pool.is_alive


@pytest.mark.long
def test_idle_pool_ends() -> None:
    pool = ProcessPool("tests.sweeping.short_idle", 2)
    assert pool.submit(time.sleep, 1.5).result() is None  # a busy pool does not
    deadline = time.monotonic() + 20
    while pool.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.long
def test_files_of_the_current_folder_are_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("raise RuntimeError")
    monkeypatch.chdir(tmp_path)
    pool = ProcessPool("math", 1)
    assert pool.submit(abs, -1).result() == 1
    pool.kill()


@pytest.mark.long
def test_process_does_not_wait_for_the_imports_of_its_pool(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; print('imported', flush=True); time.sleep(600)")
    script = "import time; from midlayer_encoders.sweeping.process_pool import ProcessPool; ProcessPool('endless', 2)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    command = [sys.executable, "-c", f"{script}; time.sleep(5)"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (0, "imported\n")  # its output ends with the last process


@pytest.mark.long
def test_importing_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; print('imported', flush=True); time.sleep(600)")
    script = "from midlayer_encoders.sweeping.process_pool import ProcessPool; ProcessPool('endless', 2); input()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=env, **pipes) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"imported\n"
        parent.kill()
        killed = time.monotonic()
        assert parent.stdout.read() == b""
        assert time.monotonic() - killed < 5


def test_workers_of_sweeps_are_kept_until_they_have_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mteb_jobs, "__name__", "math")  # processes that import nothing else
    pool = Workers(2, 2)._pool()
    assert Workers(2, 5)._pool() is pool
    others = [Workers(3, 5)._pool()]
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))  # modules that only a new process finds
        others.append(Workers(2, 2)._pool())
        patch.chdir(tmp_path)
        others.append(Workers(2, 2)._pool())
    assert len({pool, *others}) == 4
    assert Workers(2, 2)._pool() is pool
    pool.kill()
    assert Workers(2, 2)._pool() is not pool
    Workers.kill()
    assert not any(other.is_alive for other in others)


def test_interrupt_ends_the_wait_for_workers() -> None:
    """polars is imported, whose handler of signals makes a wait without a limit continue."""
    process = multiprocessing.get_context("fork").Process(target=raises_interrupt)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def raises_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        list(Workers(2, 2).run([], [Future()]))


def test_task_that_cannot_be_sent_to_workers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mteb_jobs, "__name__", "math")
    job = SimpleNamespace(task=SimpleNamespace(name="own"), lock=threading.Lock())
    with pytest.raises(MidlayerError, match=r"own cannot be sent to other processes .*: sweep with one of `workers`"):
        Workers(2, 2).begin([job])  # type: ignore[list-item]
    Workers.kill()
