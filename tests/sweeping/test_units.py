"""Many models as jobs: the same result as one process, and only what is missing is done."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from polars.testing import assert_frame_equal

from midlayer_encoders import sweep, sweep_many
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.processes import cluster
from midlayer_encoders.sweeping import SweepSettings
from midlayer_encoders.sweeping.units import Unit

RECIPES = ["plain", "one-word"]


class Jobs:
    """An executor that runs jobs in this process, but for those in ``lost``, which end without a result."""

    def __init__(self, lost: Sequence[int] = ()) -> None:
        self.calls: list[Any] = []
        self.lost = set(lost)

    def map_array(self, call: Callable[[Unit], None], given: Sequence[Unit]) -> list[Any]:
        for unit in given:
            if len(self.calls) not in self.lost:
                call(unit)
            self.calls.append(unit)
        return [_Ended() for _ in given]


class _Ended:
    class paths:  # noqa: N801
        stderr = "log.err"

    def done(self) -> bool:
        return True

    def cancel(self) -> None:
        raise AssertionError("it has ended")


@pytest.fixture
def tasks(tmp_path: Path) -> list[str]:
    words = ["red apple", "green pear", "fast car", "slow train", "blue plum", "old bus"]
    labeled = [{"text": f"{word} {n}", "label": int(n % 6 in (2, 3, 5))} for n in range(24) for word in [words[n % 6]]]
    pairs = [{"sentence1": f"{words[n % 6]} {n}", "sentence2": words[n * n % 6], "score": n % 5} for n in range(12)]
    paths = []
    for name, rows in {"labeled": labeled, "pairs": pairs}.items():
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join(map(json.dumps, rows)))
    return [str(path) for path in paths]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "_POLL_SECONDS", 0.01)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # from mteb and datasets
def test_units_give_the_result_of_one_process(tiny_folder: Any, tasks: list[str], tmp_path: Path) -> None:
    model = tiny_folder("Llama")
    arguments: dict[str, Any] = {"recipes": RECIPES, "device": "cpu", "layers": [2, -1], "metrics": ["curvature"]}
    expected = sweep(model, tasks, out=tmp_path / "one", **arguments)
    jobs = Jobs(lost=[1])
    reports: list[tuple[str, int, int]] = []
    arguments |= {"out": tmp_path / "many", "progress": lambda *report: reports.append(report)}
    (result,) = sweep_many([model], tasks, executor=jobs, **arguments).values()
    assert_frame_equal(result.frame, expected.frame)
    assert result.notes.baselines == expected.notes.baselines
    done = [(unit.recipe, unit.source and unit.source.name) for unit in jobs.calls]
    assert len(done) == 6, "four units, the lost one again, and the whole sweep"
    assert done[4] == done[1]
    assert done[-1] == (None, None)
    assert reports[-1] == ("units", 5, 5)
    again = Jobs()
    sweep_many([model], tasks, executor=again, **arguments)
    assert not again.calls, "everything is done"
    sweep_many([model], tasks, executor=again, **arguments | {"recipes": [*RECIPES, "echo"]})
    assert [unit.recipe for unit in again.calls] == ["echo", "echo", None], "the others are done"
    again.calls.clear()
    Path(tasks[0]).write_text(Path(tasks[0]).read_text() + '\n{"text": "new", "label": 1}')
    sweep_many([model], tasks, executor=again, **arguments)
    assert [unit.source and unit.source.name.partition("-")[0] for unit in again.calls] == ["labeled", "labeled", None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_unit_scores_and_the_whole_sweep_only_merges(
    tiny_folder: Any, tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was not stored by a unit would be embedded by the whole sweep."""
    model = tiny_folder("Llama")
    embedded: list[int] = []
    from midlayer_encoders.sweeping.embedder import Embedder

    original = Embedder._embed
    monkeypatch.setattr(Embedder, "_embed", lambda self, *args: (embedded.append(1), original(self, *args))[1])
    stages: list[int] = []

    class Counting(Jobs):
        def map_array(self, call: Callable[[Unit], None], given: Sequence[Unit]) -> list[Any]:
            stages.append(len(embedded))
            return super().map_array(call, given)

    arguments: dict[str, Any] = {"layers": [1, -1], "baselines": False, "device": "cpu"}
    recipes = [*RECIPES, "plain+center"]
    sweep_many([model], tasks, executor=Counting(), recipes=recipes, out=tmp_path / "many", **arguments)
    assert len(stages) == 2
    assert len(embedded) == stages[1] > 0


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_failed_units_are_named_and_the_others_are_not_repeated(
    tiny_folder: Any, tasks: list[str], tmp_path: Path
) -> None:
    good, bad = tiny_folder("Llama"), str(tmp_path / "absent")
    arguments: dict[str, Any] = {"out": tmp_path / "many", "device": "cpu", "layers": [1], "baselines": False}
    with pytest.raises(MidlayerError, match=r"3 jobs failed, such as .*absent.*Run the same call again"):
        sweep_many([good, bad], tasks, executor=Jobs(), **arguments)
    again = Jobs()
    with pytest.raises(MidlayerError, match="3 jobs failed"):
        sweep_many([good, bad], tasks, executor=again, **arguments)
    assert {unit.request.model for unit in again.calls} == {bad}
    lost = Jobs(lost=range(9))
    with pytest.raises(MidlayerError, match=r"it ended 2 times without a result; its log is log\.err"):
        sweep_many([good], tasks, executor=lost, attempts=2, **arguments | {"out": tmp_path / "lost"})
    assert len(lost.calls) == 6


def test_models_with_one_folder_and_other_mistakes_are_refused(tasks: list[str], tmp_path: Path) -> None:
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "`models` must have different names": (["org/model", "org_model"], {}),
        "`models` must be a list": ("org/model", {}),
        "`executor` must be one of 'slurm', 'local'": (["org/model"], {"executor": "pbs"}),
        "`parameters` must fit submitit's": (["m"], {"executor": "local", "parameters": {"partitoin": "gpu"}}),
        "`devices` and `num_nodes` must be 1": (["m"], {"executor": Jobs(), "settings": SweepSettings(devices=2)}),
        "`parallel` must be": (["m"], {"executor": "local", "parameters": {"parallel": 0}}),
    }
    for message, (models, options) in cases.items():
        with pytest.raises(OptionError, match=message):
            sweep_many(models, tasks, out=tmp_path / "many", **options)


def test_machine_without_slurm_and_a_cluster_that_refuses_are_named(
    tasks: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(OptionError, match="`executor` must be 'local' on a machine without SLURM"):
        sweep_many(["m"], tasks, executor="slurm", out=tmp_path / "many")
    for name in ("srun", "sbatch"):
        (programs / name).write_text("#!/bin/sh\necho 'Invalid partition name' >&2\nexit 1\n")
        (programs / name).chmod(0o755)
    with pytest.raises(MidlayerError, match=r"The cluster did not take the jobs: .*Invalid partition name"):
        sweep_many(["m"], tasks, executor="slurm", out=tmp_path / "many")


@pytest.mark.extras
@pytest.mark.filterwarnings("ignore")
def test_killed_process_is_started_again(tiny_folder: Any, tasks: list[str], tmp_path: Path) -> None:
    model, out = tiny_folder("Llama"), tmp_path / "many"
    arguments: dict[str, Any] = {"recipes": RECIPES, "device": "cpu"}
    expected = sweep(model, tasks, out=tmp_path / "one", **arguments)
    killed: list[int] = []

    def kill_one() -> None:
        while not killed:
            time.sleep(0.2)
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    is_job = b"submitit" in path.read_bytes() and str(out).encode() in path.read_bytes()
                except OSError:
                    continue
                if is_job and not killed:
                    killed.append(int(path.parent.name))
                    os.kill(killed[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    (result,) = sweep_many([model], tasks, executor="local", parameters={"parallel": 2}, out=out, **arguments).values()
    thread.join(1)
    assert killed
    assert_frame_equal(result.frame, expected.frame)
    started = list((out / "jobs").glob("*_submitted.pkl"))  # a process that is killed early has no log
    assert len(started) == 6, "four units, the killed one again, and the whole sweep"
