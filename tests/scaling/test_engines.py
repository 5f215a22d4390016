"""The same sweep on processes, Dask, Ray and SLURM, one worker of each killed: the frame of one process, to the byte.

``make test-extras FOR=scale``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import embed, sweep
from midlayer_encoders.extras.scaling import open_executor
from midlayer_encoders.files import read_json
from tests.scaling.slurm_cluster import INSTALL, PROGRAMS, slurm_cluster
from tests.sweeping.test_sweep import sentence

Folder = Callable[[str], str]
pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]
WORKERS = {
    "processes": b"multiprocessing.spawn",
    "dask": b"multiprocessing.spawn",
    "ray": b"ray::_call",
    "slurm": b"submitit.core._submit",
}
"""What the command line of a worker holds."""
PACKAGES = {"dask": "distributed", "ray": "ray", "slurm": "submitit"}


@pytest.fixture(scope="module")
def model(tiny_folder: Folder) -> str:
    return tiny_folder("Llama")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the tasks, of 200 texts, and the settings of a sweep."""
    folder = tmp_path_factory.mktemp("tasks")
    pairs = [{"sentence1": sentence(n), "sentence2": sentence(n + 50), "score": n % 6} for n in range(50)]
    labeled = [{"text": sentence(100 + n), "label": n % 3} for n in range(100)]
    for name, rows in {"pairs": pairs, "labeled": labeled}.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = [str(folder / "pairs.jsonl"), str(folder / "labeled.jsonl")]
    return {"tasks": tasks, "recipes": ["plain", "one-word", "plain+center"], "device": "cpu", "baselines": False}


@pytest.fixture(scope="module")
def expected(model: str, arguments: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("one")
    sweep(model, out=out, **arguments)
    return (out / "frame.csv").read_bytes()


@contextmanager
def engine(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield an executor with two workers."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TEST_FOLDER", str(folder))  # by which its processes are known
    options: dict[str, Any] = {"processes": {"count": 2}, "slurm": {"cpus_per_task": 1}}.get(name, {})
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason=f"needs pip install 'midlayer-encoders[{name}]'")
    if name != "slurm":
        with open_executor(name, folder, options) as executor:
            yield executor
        return
    if missing := [program for program in PROGRAMS if not shutil.which(program)]:
        pytest.skip(f"needs {', '.join(missing)}: {INSTALL}")
    with slurm_cluster([1, 1]) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])
        with open_executor("slurm", folder, options) as executor:
            yield executor


def kill_one(killed: list[int], words: bytes, folder: Path, units: Path, ended: threading.Event) -> None:
    """Kill one worker of a folder with these words in its command line, once units have begun to be done."""
    while not ended.wait(0.05):
        if not list(units.glob("*.json")):
            continue
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                line = path.read_bytes()
                if f"TEST_FOLDER={folder}\0".encode() not in path.with_name("environ").read_bytes():
                    continue
                if words in line and b"srun" not in line and b"IDLE" not in line and b"resource_tracker" not in line:
                    killed.append(int(path.parent.name))
                    os.kill(killed[0], signal.SIGKILL)
                    return


@pytest.mark.parametrize("name", list(WORKERS))
def test_sweep_with_a_killed_worker_is_that_of_one_process(
    name: str, model: str, arguments: dict[str, Any], expected: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, killed, ended = tmp_path / "out", list[int](), threading.Event()
    kill = killed, WORKERS[name], tmp_path / "jobs", out / "units", ended
    killer = threading.Thread(target=kill_one, args=kill, daemon=True)
    reports: list[tuple[str, int, int]] = []
    with engine(name, tmp_path / "jobs", monkeypatch) as executor:
        killer.start()
        arguments = {**arguments, "progress": lambda *report: reports.append(report)}
        result = sweep(model, out=out, executor=executor, **arguments)
        ended.set()
        killer.join()
    assert killed
    assert not result.failures
    assert (out / "frame.csv").read_bytes() == expected
    assert reports[-1] == ("units", reports[-1][2], reports[-1][2])
    assert reports[-1][2] >= 1 + 2 + 6 + 1


def test_two_calls_on_one_folder_do_not_disturb_each_other(
    model: str, arguments: dict[str, Any], expected: bytes, tmp_path: Path
) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import json, sys\nfrom midlayer_encoders import sweep\nfrom midlayer_encoders.extras.scaling import Processes\n"
        "processes = Processes(1)\nsweep(sys.argv[1], out=sys.argv[2], executor=processes, **json.loads(sys.argv[3]))\n"
        "processes.shutdown()\n"
    )
    command = [sys.executable, str(script), model, str(tmp_path / "out"), json.dumps(arguments)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    calls = [subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    for call in calls:
        _, errors = call.communicate(timeout=400)
        assert call.returncode == 0, errors[-3000:]
    assert (tmp_path / "out/frame.csv").read_bytes() == expected


def test_killed_driver_continues_where_it_ended(
    model: str, arguments: dict[str, Any], expected: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    flags = ["--tasks", ",".join(arguments["tasks"]), "--recipes", ",".join(arguments["recipes"]), "--no-baselines"]
    command = [sys.executable, "-m", "midlayer_encoders.cli", "sweep", model, *flags, "--device", "cpu", "--metrics"]
    command += ["none", "--out", str(out), "--executor", "processes", "--executor-option", "count=1"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        deadline = time.monotonic() + 200
        while len(done := list(out.glob("*/units/*.json"))) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        driver.kill()
    times = {path: path.stat().st_mtime_ns for path in done}
    again = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {path: path.stat().st_mtime_ns for path in done} == times, "nothing is done twice"
    (frame,) = out.glob("*/frame.csv")
    assert frame.read_bytes() == expected


def test_vectors_of_two_processes_are_those_of_one(model: str, tmp_path: Path) -> None:
    texts = [sentence(n) for n in range(300)]
    with open_executor("processes", tmp_path, {"count": 2}) as executor:
        embed(model, texts, tmp_path / "two.npy", executor=executor, device="cpu")
    embed(model, texts, tmp_path / "one.npy", device="cpu")
    assert (tmp_path / "two.npy").read_bytes() == (tmp_path / "one.npy").read_bytes()
    assert read_json(tmp_path / "two.npy.json") == read_json(tmp_path / "one.npy.json")
