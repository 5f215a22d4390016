"""``midlayer sweep`` in jobs of a real SLURM, on one machine; ``make test-extras FOR=slurm``."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.sweeping.slurm_cluster import INSTALL, PROGRAMS, Cluster, slurm_cluster
from tests.sweeping.test_sweep import sentence, write_rows

Folder = Callable[[str], str]
pytestmark = [pytest.mark.extras, pytest.mark.skipif(not all(map(shutil.which, PROGRAMS)), reason=INSTALL)]


@pytest.fixture(scope="module")
def one_node() -> Iterator[Cluster]:
    with slurm_cluster([2]) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[Cluster]:
    with slurm_cluster([1, 1]) as cluster:
        yield cluster


@pytest.fixture
def command(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a command that sweeps two tasks into the folder ``out``."""
    tasks = [tmp_path / "similar", tmp_path / "labeled"]
    write_rows(tasks[0], [{"sentence1": sentence(n), "sentence2": sentence(n + 40), "score": n % 6} for n in range(40)])
    for name, start in {"train": 100, "test": 200}.items():
        write_rows(tasks[1], [{"text": sentence(start + n), "label": n % 3} for n in range(36)], name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in list(os.environ):  # the tests may run in a job
        if name.startswith(("SLURM_", "SBATCH_", "MASTER_")):
            monkeypatch.delenv(name)
    options = ["--tasks", ",".join(map(str, tasks)), "--no-baselines", "--device", "cpu", "--out", "out"]
    return [sys.executable, "-m", "midlayer_encoders.cli", "sweep", tiny_folder("Llama"), *options]


def frame_of(cluster: Cluster, *command: str, **env: str) -> bytes:
    """Run a command and return the frame that it wrote."""
    shutil.rmtree("out", ignore_errors=True)
    process = cluster.run(*command, env=env, timeout=240)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:] + cluster.logs()
    return Path("out/frame.csv").read_bytes()


def test_two_tasks_make_the_frame_of_one(one_node: Cluster, command: list[str]) -> None:
    expected = frame_of(one_node, "srun", "--ntasks=1", *command)
    assert expected.count(b"\n") > 10
    assert frame_of(one_node, "srun", "--ntasks=2", *command, "--devices", "2") == expected
    # Without srun, Fabric starts the second process.
    Path("job.sh").write_text(f"#!/bin/bash\nexec {shlex.join(command)} --devices 2\n")
    assert frame_of(one_node, "sbatch", "--wait", "--ntasks=2", "job.sh") == expected


def test_two_nodes_make_the_frame_of_one_process(two_nodes: Cluster, command: list[str]) -> None:
    expected = frame_of(two_nodes, *command)
    two = ["srun", "--nodes=2", "--ntasks-per-node=1", *command, "--num-nodes", "2"]
    assert frame_of(two_nodes, *two, MASTER_ADDR="127.0.0.1") == expected


def test_array_with_a_killed_job_makes_the_frame_of_one_process(one_node: Cluster, command: list[str]) -> None:
    command = [*command, "--recipes", "plain,one-word", "--metrics", "none"]
    expected = frame_of(one_node, *command)
    shutil.rmtree("out")
    killed: list[int] = []
    killer = threading.Thread(target=kill_one_job, args=(killed, Path("out").absolute()), daemon=True)
    killer.start()
    process = one_node.run(*command, "--submit", "slurm", "--submit-option", "cpus_per_task=1", timeout=400)
    assert process.returncode == 0, process.stdout[-3000:] + process.stderr[-3000:] + one_node.logs()
    assert killed
    (frame,) = Path("out").glob("*/frame.csv")
    assert frame.read_bytes() == expected
    started = len(list(Path("out/jobs").glob("*_log.err")))
    assert started == 6, "four units, the killed one again, and the whole sweep"
    assert len(list(Path("out").glob("*/units/*.json"))) == 5, "each of them has a file of its own"
    again = one_node.run(*command, "--submit", "slurm", timeout=100)
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(list(Path("out/jobs").glob("*_log.err"))) == started, "nothing is done twice"


def kill_one_job(killed: list[int], out: Path) -> None:
    """Kill the first process of a job that appears."""
    while not killed:
        time.sleep(0.2)
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                words = path.read_bytes()
                if b"submitit.core._submit" in words and str(out).encode() in words and b"srun" not in words:
                    killed.append(int(path.parent.name))
                    os.kill(killed[0], signal.SIGKILL)
                    return


def test_tasks_without_matching_flags_are_refused(one_node: Cluster, command: list[str]) -> None:
    process = one_node.run("srun", "--ntasks=2", "--label", *command)
    assert process.returncode != 0
    lines = process.stderr.splitlines()
    for task in ("0: ", "1: "):
        message = " ".join(line.removeprefix(task) for line in lines if line.startswith(task))
        assert "--devices 2 --num-nodes 1" in message, process.stderr
    assert not Path("out").exists()


def test_unresolvable_name_of_a_node_is_refused(two_nodes: Cluster, command: list[str]) -> None:
    start = time.monotonic()
    process = two_nodes.run("srun", "--nodes=2", "--ntasks-per-node=1", *command, "--num-nodes", "2")
    assert process.returncode != 0
    assert process.stderr.count("Set MASTER_ADDR") == 2, process.stderr
    assert time.monotonic() - start < 45  # most of it for imports
