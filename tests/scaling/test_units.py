"""Units are done once, again when their process ends, and those that have not begun are canceled at an interruption."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders._types import Stage
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.scaling import Processes, open_executor
from midlayer_encoders.extras.scaling import executors as engines
from midlayer_encoders.extras.scaling.units import ProcessLostError, Unit, run_units, write_job
from tests.scaling.jobs import Jobs


@dataclass(frozen=True)
class WriteJob:
    """Returns the number of its process; ``fails`` raises, ``kills`` ends the process so many times."""

    fails: bool = False
    kills: int = 0
    seconds: float = 0.0

    def write(self, folder: Path, name: str) -> int:
        time.sleep(self.seconds)
        if self.fails:
            raise ValueError("no such text")
        attempts = folder / f"{name}.attempts"
        with attempts.open("a") as file:
            file.write(".")
        if attempts.stat().st_size <= self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


def prepare(value: str) -> None:
    os.environ["PREPARED"] = value


def write_unit(folder: Path, name: str, **options: Any) -> Unit:
    return Unit(write_job(folder, "model", WriteJob(**options)), "write", name, folder / f"{name}.json", (name,))


def test_units_that_are_done_are_not_submitted(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    units = [write_unit(tmp_path, name) for name in "abc"]
    units[1].outcome.touch()
    jobs = Jobs()
    assert run_units(units, jobs, stage=Stage(lambda *report: reports.append(report), "units")) == {}
    assert [unit.label for unit in jobs.calls] == ["a", "c"]
    assert reports[0] == ("units", 0, 3)
    assert reports[-1] == ("units", 3, 3)


def test_error_of_one_unit_does_not_stop_the_others(tmp_path: Path) -> None:
    units = [write_unit(tmp_path, "a", fails=True), write_unit(tmp_path, "b")]
    jobs = Jobs()
    (error,) = run_units(units, jobs, stage=Stage(None, "units")).values()
    assert str(error) == "ValueError: no such text"
    assert units[1].is_done
    assert len(jobs.calls) == 2, "an error of the work is not repeated"


@pytest.mark.parametrize(("lost", "calls"), [([0], 2), ([0, 1], 3)])
def test_lost_unit_is_submitted_again(lost: list[int], calls: int, tmp_path: Path) -> None:
    jobs = Jobs(lost=lost)
    assert run_units([write_unit(tmp_path, "a")], jobs, stage=Stage(None, "units")) == {}
    assert len(jobs.calls) == calls


def test_unit_that_is_lost_three_times_is_an_error(tmp_path: Path) -> None:
    units = [write_unit(tmp_path, "a"), write_unit(tmp_path, "b")]
    jobs = Jobs(lost=[0, 2, 3])
    errors = run_units(units, jobs, stage=Stage(None, "units"))
    assert list(errors) == units[:1]
    assert isinstance(errors[units[0]], ProcessLostError)
    assert "ended 3 times without a result: BrokenExecutor: killed" in str(errors[units[0]])
    assert units[1].is_done
    assert len(jobs.calls) == 4


def test_unit_whose_files_are_there_is_done_even_if_its_process_is_lost(tmp_path: Path) -> None:
    class Late(Jobs):
        def submit(self, function: Any, unit: Any) -> Future[Any]:
            function(unit)
            return super().submit(function, unit)

    jobs = Late(lost=[0])
    assert run_units([write_unit(tmp_path, "a")], jobs, stage=Stage(None, "units")) == {}
    assert len(jobs.calls) == 1


def test_interruption_cancels_what_has_not_begun(tmp_path: Path) -> None:
    def interrupt(_: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    units = [write_unit(tmp_path, str(number), seconds=0.3) for number in range(9)]
    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        run_units(units, executor, stage=Stage(interrupt, "units"))
    assert 1 <= sum(unit.is_done for unit in units) <= 2


@pytest.fixture(params=["own", "own pool"])
def two_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield an executor of two processes that are quick to start."""
    monkeypatch.setattr(engines, "_MODULE", "tests.scaling.test_units")
    if request.param == "own":
        executor = Processes(2)
        yield executor
        executor.shutdown()
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
            yield pool


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_process_is_started_again_and_a_deadly_unit_is_named(two_processes: Any, tmp_path: Path) -> None:
    units = [write_unit(tmp_path, str(number)) for number in range(6)]
    units += [write_unit(tmp_path, "once", kills=1), write_unit(tmp_path, "deadly", kills=99)]
    errors = run_units(units, two_processes, stage=Stage(None, "units"))
    assert [unit.label for unit in errors] == ["deadly"]
    assert all(unit.is_done for unit in units[:-1])
    assert len((tmp_path / "deadly.attempts").read_text()) == 3
    assert len({json.loads(unit.outcome.read_text()) for unit in units[:-1]} | {os.getpid()}) > 2


@pytest.mark.long
def test_processes_of_a_pool_are_prepared_as_the_pool_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_MODULE", "tests.scaling.test_units")
    with ProcessPoolExecutor(1, initializer=prepare, initargs=("yes",)) as pool:
        executor = engines.check_executor(pool)
        assert engines.check_executor(pool) is executor, "the processes of one sweep are those of the next"
        assert executor.submit(os.getenv, "PREPARED").result() == "yes"
        executor.shutdown()


def test_processes_share_the_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    started: list[dict[str, str]] = []

    class Pool:
        def __init__(self, _: str, count: int, threads: int, variables: dict[str, str]) -> None:
            started.append(variables)

        def wake(self) -> bool:
            return True

        def submit(self, function: Any, *arguments: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(function(*arguments))
            return future

        def kill(self) -> None:
            pass

    monkeypatch.setattr(engines, "ProcessPool", Pool)
    for visible, expected in (("", ["0", "1"]), ("5,7", ["5", "7"])):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with Processes() as executor:
            assert executor.count == 2
            for _ in range(2):
                executor.submit(int, 1).result()
        assert [variables["CUDA_VISIBLE_DEVICES"] for variables in started] == expected
        started.clear()


def test_wrong_executors_are_refused(tmp_path: Path) -> None:
    for wrong in ("slurm", 3):
        with pytest.raises(OptionError, match=f"must have a method `submit`, as in `open_executor`, but got {wrong!r}"):
            run_units([], wrong, stage=Stage(None, "units"))
    with pytest.raises(OptionError, match="`executor` must be one of"):
        open_executor("pbs", tmp_path)
    with pytest.raises(OptionError, match=r"`executor` cannot be 'processes' with the options {'cores': 3}: .*cores"):
        open_executor("processes", tmp_path, {"cores": 3})


def test_machine_without_slurm_and_a_cluster_that_refuses_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(OptionError, match=r"`executor` cannot be 'slurm' with .*Could not detect .srun."):
        open_executor("slurm", tmp_path)
    for name in ("srun", "sbatch"):
        (programs / name).write_text("#!/bin/sh\necho 'Invalid partition name' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    with pytest.raises(OptionError, match=r"`executor` cannot be 'slurm' with the options .*partitoin"):
        open_executor("slurm", tmp_path, {"partitoin": "gpu"})
    with (
        open_executor("slurm", tmp_path) as executor,
        pytest.raises(MidlayerError, match=r"The cluster did not take the jobs: .*Invalid partition name"),
    ):
        run_units([write_unit(tmp_path, "a")], executor, stage=Stage(None, "units"))


def test_settings_of_a_pool_that_are_private_exist() -> None:
    with ProcessPoolExecutor(3, initializer=print, initargs=("a",)) as pool:
        described: Any = pool
        assert (described._max_workers, described._initializer, described._initargs) == (3, print, ("a",))
        assert described._mp_context is not None
