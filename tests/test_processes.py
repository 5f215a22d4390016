"""Several processes share work: they give the result of one process, and none waits for a failed one."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import pty
import select as selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future
from contextlib import nullcontext
from pathlib import Path
from threading import Timer
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import joblib
import numpy as np
import polars as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric

from midlayer_encoders import LayerEncoder, embed, measure, probe, progression
from midlayer_encoders.errors import DiskFullError, FolderError, MidlayerError, OptionError
from midlayer_encoders.extras.probing import ProbeSettings
from midlayer_encoders.files import folder_lock
from midlayer_encoders.processes import pool as pool_module
from midlayer_encoders.processes.group import Group, OtherProcessError, ProcessLostError
from midlayer_encoders.processes.pool import ProcessPool
from midlayer_encoders.processes.sharing import cpus_per_process, end_with_parent, launch
from midlayer_encoders.selection import select
from midlayer_encoders.sweeping import mteb_jobs
from midlayer_encoders.sweeping.mteb_jobs import Workers
from tests.others_warnings import MTEB
from tests.sweeping.scoring import sweep
from tests.sweeping.test_sweep import sentence, write_rows
from tests.tiny_folders import save_tiny

Folder = Callable[[str], str]
SetSlurm = Callable[..., None]
pytestmark = MTEB


def raise_error(error: Exception) -> Any:
    raise error


def share_in_step(group: Group) -> Any:
    return group.share(lambda: group.rank), group.part(range(5))


def error_in_one_process(group: Group) -> Any:
    with pytest.raises(OtherProcessError if group.rank == 0 else KeyError, match="no such text"):
        group.share(lambda: raise_error(KeyError("no such text")) if group.rank else 1)
    return group.share(lambda: "and on")


def full_disk_in_one_process(group: Group) -> Any:
    with pytest.raises(DiskFullError, match="full"):
        group.share(lambda: raise_error(DiskFullError("full")) if group.rank else 1)
    return group.share(lambda: "and on")


def failure_before_a_shared_call(group: Group) -> Any:
    """The second process fails while the first waits for it to embed."""

    def evaluate() -> str:
        if group.rank:
            return "no data"
        with pytest.raises(OtherProcessError, match="could not evaluate"):
            group.share(lambda: "embedding", inside=True)
        return "notified"

    return group.share(evaluate), group.share(lambda: "and on")


def results_in_order(group: Group) -> Any:
    return group.share(lambda: list(group.in_order(iter(group.part(range(5))))))


def error_in_the_loop_of_the_first_process(group: Group) -> Any:
    def run() -> None:
        for _ in group.in_order(iter(group.part(range(5)))):
            raise KeyError("no such text")

    with pytest.raises(OtherProcessError if group.rank else KeyError, match="no such text"):
        group.share(run)
    return group.share(lambda: "and on")


def process_killed_in_order(group: Group) -> Any:
    def results() -> Iterator[int]:
        yield 1
        if group.rank:
            os._exit(3)
        yield 2

    with pytest.raises(ProcessLostError):
        group.share(lambda: list(group.in_order(results())))
    return "noticed"


def killed_process(group: Group) -> Any:
    if group.rank:
        os._exit(3)
    with pytest.raises(ProcessLostError, match="run the same command again"):
        group.share(lambda: 1)
    return "noticed"


def folder_locked_by_the_first_process(group: Group) -> Any:
    """A second process that is faster must not write before the first has checked that the folder is new."""
    if group.rank == 0:
        time.sleep(0.2)
    with group.lock(Path("out")):
        Path("out/embeddings").mkdir(parents=True, exist_ok=True)
    return "done"


def folder_in_use(group: Group) -> Any:
    other_run = folder_lock(Path("out")) if group.rank == 0 else nullcontext()
    with pytest.raises(FolderError, match="in use"), other_run, group.lock(Path("out")):
        pass
    return "refused"


CASES: dict[Any, Any] = {
    folder_locked_by_the_first_process: ["done"] * 2,
    folder_in_use: ["refused"] * 2,
    share_in_step: [([0, 1], [0, 2, 4]), ([0, 1], [1, 3])],
    error_in_one_process: [["and on"] * 2] * 2,
    full_disk_in_one_process: [["and on"] * 2] * 2,
    failure_before_a_shared_call: [(["notified", "no data"], ["and on"] * 2)] * 2,
    killed_process: ["noticed", None],
    results_in_order: [[[0, 1, 2, 3, 4], []]] * 2,
    error_in_the_loop_of_the_first_process: [["and on"] * 2] * 2,
    process_killed_in_order: ["noticed", None],
}


def run_process(case: Any, rank: int, folder: str, answer: Any) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    answer.send(case(Group(rank, 2)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # a fresh interpreter would import mteb for seconds
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_results_and_errors_are_shared_by_all_processes(case: Any, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(2)]
    processes = [
        fork.Process(target=run_process, args=(case, rank, str(tmp_path), pipes[rank][1])) for rank in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        process.kill()
    answers = [receive.recv() if receive.poll() else None for receive, _ in pipes]
    assert answers == CASES[case]


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
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen([sys.executable, str(tmp_path / "run.py")], stdout=subprocess.PIPE, env=env) as parent:
        assert parent.stdout is not None
        workers = parent.stdout.readline().split()
        assert workers
        assert parent.stdout.readline() == b"busy\n"
        parent.kill()
        killed = time.monotonic()
        assert parent.stdout.read() == b""  # ends when the last worker, which inherits it, has ended
        assert time.monotonic() - killed < 5


def test_torchrun_without_matching_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="`devices` must be 4 and `num_nodes` 2"):
        launch(1, 1, cpu=True)
    monkeypatch.setenv("RANK", "0")  # a process that measures while others train may be the first of several
    assert launch(1, 1, cpu=True) == Group()


@pytest.fixture
def set_slurm() -> Iterator[SetSlurm]:
    """Return a function that sets the variables of a SLURM job, and no others of SLURM or torchrun."""

    def setter(**values: str) -> None:
        os.environ.update({f"SLURM_{name}": value for name, value in values.items()})

    with patch.dict(os.environ):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_")) or name in ("RANK", "LOCAL_RANK", "NODE_RANK"):
                del os.environ[name]
        yield setter


BATCH = {"JOB_ID": "7", "JOB_NAME": "sweep", "NTASKS": "2", "PROCID": "0", "NNODES": "1", "CPUS_ON_NODE": "2"}
STEP = {
    **BATCH,
    "STEP_NUM_TASKS": "2",
    "STEP_NUM_NODES": "1",
    "STEP_TASKS_PER_NODE": "2",
    "NODEID": "0",
    "LOCALID": "0",
}
TWO_NODES = {**STEP, "NNODES": "2", "STEP_NUM_NODES": "2", "STEP_TASKS_PER_NODE": "1(x2)", "CPUS_ON_NODE": "1"}
"""Variables that SLURM 22.05 sets in a batch script and in a step of srun."""


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("slurm", "given", "flags"),
    [
        (STEP, (1, 1), "--devices 2 --num-nodes 1"),
        ({**STEP, "JOB_NAME": "interactive"}, (1, 1), "--devices 2 --num-nodes 1"),  # srun in a shell of salloc
        (
            {**STEP, "PTY_PORT": "4"},
            (1, 1),
            "--devices 2 --num-nodes 1",
        ),  # in a shell of srun --pty, without a terminal
        (STEP, (4, 1), "--devices 2 --num-nodes 1"),
        (TWO_NODES, (1, 1), "--devices 1 --num-nodes 2"),
        (TWO_NODES, (2, 1), "--devices 1 --num-nodes 2"),
        ({**TWO_NODES, "STEP_NUM_TASKS": "3", "STEP_TASKS_PER_NODE": "2,1"}, (1, 1), "srun --ntasks-per-node"),
        (BATCH, (1, 2), "srun"),  # no other process would join
    ],
)
def test_srun_without_matching_devices_is_refused_in_every_task(
    slurm: dict[str, str],
    given: tuple[int, int],
    flags: str,
    rank: str,
    set_slurm: SetSlurm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_slurm(**{**slurm, "PROCID": rank})
    monkeypatch.setattr(os, "ctermid", lambda: "/nowhere/tty")  # the tests may run in a terminal
    with pytest.raises(OptionError, match=flags):
        launch(*given, cpu=True)


@pytest.mark.parametrize(
    "slurm",
    [
        BATCH,
        {"JOB_ID": "7", "JOB_NAME": "interactive", "NTASKS": "2"},  # a shell of salloc
        {**STEP, "STEP_NUM_TASKS": "1", "STEP_TASKS_PER_NODE": "1", "ARRAY_TASK_ID": "3"},  # a job array
    ],
)
def test_only_process_of_a_slurm_job_sweeps_alone(slurm: dict[str, str], set_slurm: SetSlurm) -> None:
    set_slurm(**slurm)
    assert launch(1, 1, cpu=True) == Group()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_shell_of_srun_in_a_terminal_sweeps_alone(set_slurm: SetSlurm) -> None:
    set_slurm(**STEP, PTY_PORT="4")
    process, terminal = pty.fork()
    if process == 0:
        os._exit(0 if launch(1, 1, cpu=True) == Group() else 1)
    _, status = os.waitpid(process, 0)
    os.close(terminal)
    assert status == 0


def test_training_process_sweeps_alone(set_slurm: SetSlurm, tmp_path: Path) -> None:
    """The first of several tasks may sweep while the others wait."""
    set_slurm(**STEP)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        assert launch(1, 1, cpu=True) == Group()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("slurm", "devices", "environment"),
    [
        (STEP, 2, "SLURMEnvironment"),
        ({**STEP, "JOB_NAME": "interactive"}, 2, "SLURMEnvironment"),
        ({**STEP, "NTASKS_PER_NODE": "4"}, 2, "SLURMEnvironment"),  # of sbatch, which srun -n 2 overrides
        (BATCH, 2, "LightningEnvironment"),  # without srun, Fabric starts the other processes
        ({**STEP, "STEP_NUM_TASKS": "1", "NTASKS": "1"}, 2, "LightningEnvironment"),
    ],
)
def test_unresolvable_address_of_the_first_process_is_refused(
    slurm: dict[str, str], devices: int, environment: str, set_slurm: SetSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[str] = []
    set_slurm(**slurm)
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    monkeypatch.setattr(Fabric, "launch", lambda self: pytest.fail("would wait for the address"))
    init = Fabric.__init__

    def record(self: Fabric, **arguments: Any) -> None:
        init(self, **arguments)
        environments.append(type(self.strategy.cluster_environment).__name__)

    monkeypatch.setattr(Fabric, "__init__", record)
    with pytest.raises(MidlayerError, match=r"'no-such-host\.invalid'.*Set MASTER_ADDR"):
        launch(devices, 1, cpu=True)
    assert environments == [environment]


def test_name_of_a_node_that_does_not_resolve_is_refused(set_slurm: SetSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    set_slurm(**STEP, NODELIST="no-such-host[3-4].invalid")
    monkeypatch.setattr(Fabric, "launch", lambda self: pytest.fail("would wait for the address"))
    with pytest.raises(MidlayerError, match=r"'no-such-host3\.invalid'.*Set MASTER_ADDR"):
        launch(2, 1, cpu=True)


@pytest.mark.parametrize(
    ("slurm", "cores", "devices", "expected"),
    [
        ({}, 8, 1, 8),
        ({}, 8, 2, 4),
        ({}, 1, 2, 1),
        (TWO_NODES, 2, 1, 1),  # two nodes on one machine
        ({**STEP, "CPUS_ON_NODE": "16"}, 64, 2, 8),  # tasks not bound to cores
        ({**STEP, "CPUS_ON_NODE": "16"}, 8, 2, 8),  # bound
        ({**STEP, "CPUS_ON_NODE": "16", "CPUS_PER_TASK": "4"}, 64, 2, 4),
        ({**STEP, "STEP_NUM_TASKS": "1", "CPUS_PER_TASK": "8", "CPUS_ON_NODE": "8"}, 64, 2, 4),  # Fabric starts two
        ({**BATCH, "CPUS_PER_TASK": "1"}, 2, 1, 2),  # the script may use the CPUs of both tasks
    ],
)
def test_workers_use_the_cpus_of_their_process(
    slurm: dict[str, str], cores: int, devices: int, expected: int, set_slurm: SetSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_slurm(**slurm)
    monkeypatch.setattr(joblib, "cpu_count", lambda: cores)
    assert cpus_per_process(devices) == expected


_SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from midlayer_encoders.sweeping.store import EmbeddingStore
from tests.sweeping.scoring import sweep

if __name__ == "__main__":
    mode, model, out, *tasks = sys.argv[1:]
    if mode == "killed" and os.environ["RANK"] == "1":
        plain, count = EmbeddingStore.write, iter(range(100))
        def write(self, *args, **kwargs):
            if next(count) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args, **kwargs)
        EmbeddingStore.write = write
    report = lambda stage, done, total: print(stage, done, total, flush=True)
    result = sweep(model, tasks, out=out, workers=1, baselines=False, token_budget=60, devices=2, device="cpu",
                  metrics=["infonce", "curvature"], metric_texts=20, progress=report)
    result.frame.write_parquet(f"{out}/{os.environ.get('RANK', os.environ['LOCAL_RANK'])}.parquet")
"""


def run_script(
    folder: Path, starter: list[str], mode: str, model: str, *tasks: Path, script: str = _SCRIPT
) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(script)
    out = folder / "two"
    command = [sys.executable, *starter, str(folder / "run.py"), mode, model, str(out), *map(str, tasks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]


@pytest.mark.slow  # processes that each import mteb
@pytest.mark.parametrize("starter", [TORCHRUN, []], ids=["torchrun", "fabric"])
def test_two_processes_make_the_frame_of_one(tiny_folder: Folder, tmp_path: Path, starter: list[str]) -> None:
    model, tasks = tiny_folder("Llama"), [tmp_path / "near", tmp_path / "labelled"]
    write_rows(tasks[0], [{"sentence1": sentence(n), "sentence2": sentence(n + 40), "score": n % 6} for n in range(40)])
    for name, start in {"train": 100, "test": 200}.items():
        write_rows(tasks[1], [{"text": sentence(start + n), "label": n % 3} for n in range(36)], name)
    if starter:  # killing one process stops the others
        killed = run_script(tmp_path, starter, "killed", model, *tasks)
        assert killed.returncode != 0
        assert not (tmp_path / "two/frame.parquet").exists()
        assert [path for path in (tmp_path / "two/embeddings").rglob("*") if path.is_file() and path.suffix != ".json"]
    process = run_script(tmp_path, starter, "whole", model, *tasks)
    assert process.returncode == 0, process.stderr[-3000:]
    expected = sweep(
        model, tasks, out=tmp_path / "one", workers=1, baselines=False, token_budget=60, device="cpu",
        metrics=["infonce", "curvature"], metric_texts=20,
    )  # fmt: skip
    for name in ("frame", "0", "1"):
        assert pl.read_parquet(tmp_path / f"two/{name}.parquet").equals(expected.frame)
    lines = process.stdout.splitlines()
    assert lines.count("planning 2 2") == 1, lines  # by the first process only


_COMMANDS_SCRIPT = """
import os, pickle, signal, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from midlayer_encoders.reading.reader import Flow
from tests.test_processes import results_of_commands

if __name__ == "__main__":
    mode, model, out = sys.argv[1:]
    if mode == "killed" and os.environ["RANK"] == "1":
        plain, count = Flow.read, iter(range(1000))
        def read(self, *args):
            if next(count) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args)
        Flow.read = read
    Path(out).mkdir(exist_ok=True)
    results = results_of_commands(model, Path(out), devices=2)
    rank = os.environ.get("RANK", os.environ["LOCAL_RANK"])
    Path(out, rank + ".pickle").write_bytes(pickle.dumps(results))
"""


def results_of_commands(model: str, out: Path, devices: int = 1) -> list[Any]:
    """Return the results of every command that takes ``devices``, one after another in the same processes."""
    texts = [sentence(number) for number in range(40)]
    options: dict[str, Any] = {"device": "cpu", "devices": devices}
    embed(model, texts, out / "v.npy", token_budget=60, **options)
    encoder = LayerEncoder(model, -1, device="cpu")
    settings = ProbeSettings(epochs=2)
    labels = [number % 2 for number in range(40)]
    steps = [str(Path(model).parent / name) for name in ("step1", "step2", "step3")]
    return [
        (out / "v.npy").read_bytes(),
        measure(model, texts, metrics=["curvature", "dataset_entropy", "infonce"], token_budget=60, **options),
        select(encoder, texts, labels, token_budget=60, devices=devices).to_frame(),
        probe(encoder, texts, labels, settings=settings, devices=devices).table,
        progression("steps", steps, texts=texts, metrics=["curvature"], out=out / "progression", **options).frame,
    ]


@pytest.mark.slow  # processes that each import the package
def test_every_command_of_two_processes_gives_the_result_of_one(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save_tiny("Llama", tmp_path / f"models/step{number}", seed=number)
    model = str(tmp_path / "models/step1")
    killed = run_script(tmp_path, TORCHRUN, "killed", model, script=_COMMANDS_SCRIPT)
    assert killed.returncode != 0
    assert not (tmp_path / "two/v.npy").exists()
    process = run_script(tmp_path, [], "whole", model, script=_COMMANDS_SCRIPT)
    assert process.returncode == 0, process.stderr[-3000:]
    (tmp_path / "one").mkdir()
    expected = results_of_commands(model, tmp_path / "one")
    for rank in range(2):
        results = pickle.loads((tmp_path / f"two/{rank}.pickle").read_bytes())
        assert results[:2] == expected[:2]
        for frame, expected_frame in zip(results[2:], expected[2:], strict=True):
            assert frame.equals(expected_frame)


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
    assert pool.wake()


def test_killed_process_breaks_the_pool(pool: ProcessPool) -> None:
    process, other = pool.submit(os.getpid).result(), pool.submit(time.sleep, 60)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(BrokenExecutor):
        other.result(timeout=20)
    with pytest.raises(BrokenExecutor):
        pool.submit(os.getpid).result(timeout=20)
    assert not pool.wake()


@pytest.mark.long
def test_idle_pool_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_IDLE_SECONDS", 0)
    pool = ProcessPool("math", 2)
    future = pool.submit(time.sleep, 1.5)
    assert future.result() is None  # a busy pool does not
    deadline = time.monotonic() + 20
    while pool.wake():
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
    script = "import time; from midlayer_encoders.processes.pool import ProcessPool; ProcessPool('endless', 2)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)])}
    command = [sys.executable, "-c", f"{script}; time.sleep(5)"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=120, text=True)
    assert (done.returncode, done.stdout) == (0, "imported\n")  # its output ends with the last process


@pytest.mark.long
def test_importing_process_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text("import time; print('imported', flush=True); time.sleep(600)")
    script = "from midlayer_encoders.processes.pool import ProcessPool; ProcessPool('endless', 2); input()"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(tmp_path)])}
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
    assert not any(other.wake() for other in others)


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
        list(mteb_jobs.finished_scores([Future()]))


def test_task_that_cannot_be_sent_to_workers_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mteb_jobs, "__name__", "math")
    job = SimpleNamespace(task=SimpleNamespace(name="own"), lock=threading.Lock())
    with pytest.raises(MidlayerError, match=r"own cannot be sent to other processes .*: sweep with one of `workers`"):
        Workers(2, 2).begin([job])  # type: ignore[list-item]
    Workers.kill()
