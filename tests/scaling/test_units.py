"""Units are done once, again when their process ends, and those that have not begun are canceled at an interruption."""

from __future__ import annotations

import os
import signal
import threading
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
from midlayer_encoders.extras.scaling import Processes, open_executor, run_units
from midlayer_encoders.extras.scaling import executors as engines
from midlayer_encoders.extras.scaling.units import ProcessLostError
from tests.scaling.jobs import Jobs


@dataclass(frozen=True)
class WriteUnit:
    """Writes a file; ``fails`` raises, ``kills`` ends the process so many times."""

    folder: Path
    label: str
    fails: bool = False
    kills: int = 0

    @property
    def is_done(self) -> bool:
        return (self.folder / self.label).is_file()

    def run(self) -> None:
        if self.fails:
            raise ValueError("no such text")
        attempts = self.folder / f"{self.label}.attempts"
        with attempts.open("a") as file:
            file.write(".")
        if attempts.stat().st_size <= self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / self.label).write_text(str(os.getpid()))


def test_units_that_are_done_are_not_submitted(tmp_path: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    units = [WriteUnit(tmp_path, name) for name in "abc"]
    (tmp_path / "b").touch()
    jobs = Jobs()
    assert run_units(units, jobs, stage=Stage(lambda *report: reports.append(report), "units")) == {}
    assert [unit.label for unit in jobs.calls] == ["a", "c"]
    assert reports[0] == ("units", 0, 3)
    assert reports[-1] == ("units", 3, 3)


def test_error_of_one_unit_does_not_stop_the_others(tmp_path: Path) -> None:
    units = [WriteUnit(tmp_path, "a", fails=True), WriteUnit(tmp_path, "b")]
    jobs = Jobs()
    (error,) = run_units(units, jobs, stage=Stage(None, "units")).values()
    assert str(error) == "ValueError: no such text"
    assert units[1].is_done
    assert len(jobs.calls) == 2, "an error of the work is not repeated"


@pytest.mark.parametrize(("lost", "calls"), [([0], 2), ([0, 1], 3)])
def test_lost_unit_is_submitted_again(lost: list[int], calls: int, tmp_path: Path) -> None:
    jobs = Jobs(lost=lost)
    assert run_units([WriteUnit(tmp_path, "a")], jobs, stage=Stage(None, "units")) == {}
    assert len(jobs.calls) == calls


def test_unit_that_is_lost_three_times_is_an_error(tmp_path: Path) -> None:
    units = [WriteUnit(tmp_path, "a"), WriteUnit(tmp_path, "b")]
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
    assert run_units([WriteUnit(tmp_path, "a")], jobs, stage=Stage(None, "units")) == {}
    assert len(jobs.calls) == 1


def test_interruption_cancels_what_has_not_begun(tmp_path: Path) -> None:
    begun = threading.Event()

    @dataclass(frozen=True)
    class Slow(WriteUnit):
        def run(self) -> None:
            begun.set()
            time.sleep(0.3)
            super().run()

    def interrupt(_: str, done: int, total: int) -> None:
        if done == 1:
            raise KeyboardInterrupt

    units = [Slow(tmp_path, str(number)) for number in range(9)]
    with ThreadPoolExecutor(1) as executor, pytest.raises(KeyboardInterrupt):
        run_units(units, executor, stage=Stage(interrupt, "units"))
    assert begun.is_set()
    assert sum(unit.is_done for unit in units) <= 2


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
    units = [WriteUnit(tmp_path, str(number)) for number in range(6)]
    units += [WriteUnit(tmp_path, "once", kills=1), WriteUnit(tmp_path, "deadly", kills=99)]
    errors = run_units(units, two_processes, stage=Stage(None, "units"))
    assert [unit.label for unit in errors] == ["deadly"]
    assert all(unit.is_done for unit in units[:-1])
    assert len((tmp_path / "deadly.attempts").read_text()) == 3
    assert len({(tmp_path / unit.label).read_text() for unit in units[:-1]} | {str(os.getpid())}) > 2


def test_wrong_executors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OptionError, match=r"`executor` must be an object with `submit`, such as open_executor\('slurm'"
    ):
        run_units([], "slurm", stage=Stage(None, "units"))
    with pytest.raises(OptionError, match="`executor` must have a method `submit`, but int has none"):
        run_units([], 3, stage=Stage(None, "units"))
    with pytest.raises(OptionError, match="`executor` must be one of"), open_executor("pbs", tmp_path):  # type: ignore[arg-type]
        pass
    with (
        pytest.raises(OptionError, match="`--executor-option` must fit processes"),
        open_executor("processes", tmp_path, {"cores": 3}),
    ):
        pass
    with pytest.raises(TypeError, match="of the body"), open_executor("processes", tmp_path, {"count": 1}):
        raise TypeError("of the body")


def test_machine_without_slurm_and_a_cluster_that_refuses_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(OptionError, match="'processes' on a machine without SLURM"), open_executor("slurm", tmp_path):
        pass
    for name in ("srun", "sbatch"):
        (programs / name).write_text("#!/bin/sh\necho 'Invalid partition name' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    wrong = {"partitoin": "gpu"}
    with pytest.raises(OptionError, match="must fit submitit's"), open_executor("slurm", tmp_path, wrong):
        pass
    with (
        open_executor("slurm", tmp_path) as executor,
        pytest.raises(MidlayerError, match=r"The cluster did not take the jobs: .*Invalid partition name"),
    ):
        run_units([WriteUnit(tmp_path, "a")], executor, stage=Stage(None, "units"))


def test_settings_of_a_pool_that_are_private_exist() -> None:
    with ProcessPoolExecutor(3, initializer=print, initargs=("a",)) as pool:
        described: Any = pool
        assert (described._max_workers, described._initializer, described._initargs) == (3, print, ("a",))
        assert described._mp_context is not None
