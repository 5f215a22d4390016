"""Several processes share a sweep: what they find is what one finds, and none waits for one that failed or ended."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import torch.distributed as dist

from midlayer_encoders.errors import DiskFullError, OptionError
from midlayer_encoders.sweeping.processes import Group, OtherProcessError, ProcessLostError, launch
from tests.others_warnings import MTEB
from tests.sweeping.scoring import sweep
from tests.sweeping.test_sweep import sentence, write_rows

Folder = Callable[[str], str]
pytestmark = MTEB


def failing(error: Exception) -> Any:
    raise error


def in_step(group: Group) -> Any:
    return group.share(lambda: group.rank), group.part(range(5))


def error_in_one(group: Group) -> Any:
    with pytest.raises(OtherProcessError if group.rank == 0 else KeyError, match="no such text"):
        group.share(lambda: failing(KeyError("no such text")) if group.rank else 1)
    return group.share(lambda: "and on")


def full_disk(group: Group) -> Any:
    with pytest.raises(DiskFullError, match="full"):
        group.share(lambda: failing(DiskFullError("full")) if group.rank else 1)
    return group.share(lambda: "and on")


def failed_before_it_asked(group: Group) -> Any:
    """The second fails where the first already waits for it to embed."""

    def evaluate() -> str:
        if group.rank:
            return "no data"
        with pytest.raises(OtherProcessError, match="could not evaluate"):
            group.share(lambda: "embedding", inside=True)
        return "told"

    return group.share(evaluate), group.share(lambda: "and on")


def ended(group: Group) -> Any:
    if group.rank:
        os._exit(3)
    with pytest.raises(ProcessLostError, match="run the same command again"):
        group.share(lambda: 1)
    return "noticed"


CASES: dict[Any, Any] = {
    in_step: [([0, 1], [0, 2, 4]), ([0, 1], [1, 3])],
    error_in_one: [["and on"] * 2] * 2,
    full_disk: [["and on"] * 2] * 2,
    failed_before_it_asked: [(["told", "no data"], ["and on"] * 2)] * 2,
    ended: ["noticed", None],
}


def process(case: Any, rank: int, folder: str, answer: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    answer.send(case(Group(rank, 2)))


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # a fresh interpreter would import mteb for seconds
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_one_process_finds_or_meets_is_known_to_all(case: Any, tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    pipes = [fork.Pipe(duplex=False) for _ in range(2)]
    both = [fork.Process(target=process, args=(case, rank, str(tmp_path), pipes[rank][1])) for rank in range(2)]
    for one in both:
        one.start()
    for one in both:
        one.join(timeout=60)
        one.kill()
    found = [receive.recv() if receive.poll() else None for receive, _ in pipes]
    assert found == CASES[case]


def test_processes_of_torchrun_that_would_each_do_everything_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OptionError, match="`devices` must be 4 and `num_nodes` 2"):
        launch(1, 1, cpu=True)
    monkeypatch.setenv("RANK", "0")  # one that measures while others train may be the first of several
    assert launch(1, 1, cpu=True) == Group()


_SCRIPT = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from midlayer_encoders.store import EmbeddingStore
from tests.sweeping.scoring import sweep

if __name__ == "__main__":
    how, model, out, *tasks = sys.argv[1:]
    if how == "killed" and os.environ["RANK"] == "1":
        plain, count = EmbeddingStore.write, iter(range(100))
        def write(self, *args, **kwargs):
            if next(count) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args, **kwargs)
        EmbeddingStore.write = write
    said = lambda stage, done, total: print(stage, done, total, flush=True)
    found = sweep(model, tasks, out=out, workers=1, baselines=False, token_budget=60, devices=2, device="cpu",
                  metrics=["infonce", "curvature"], metric_texts=20, progress=said)
    found.frame.write_parquet(f"{out}/{os.environ.get('RANK', os.environ['LOCAL_RANK'])}.parquet")
"""


def run(folder: Path, starter: list[str], how: str, model: str, *tasks: Path) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(_SCRIPT)
    out = folder / "two"
    command = [sys.executable, *starter, str(folder / "run.py"), how, model, str(out), *map(str, tasks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=300)


TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29533"]


@pytest.mark.slow  # processes that each import mteb
@pytest.mark.parametrize("starter", [TORCHRUN, []], ids=["torchrun", "fabric"])
def test_two_processes_make_the_frame_of_one(tiny_folder: Folder, tmp_path: Path, starter: list[str]) -> None:
    model, tasks = tiny_folder("Llama"), [tmp_path / "near", tmp_path / "labelled"]
    write_rows(tasks[0], [{"sentence1": sentence(n), "sentence2": sentence(n + 40), "score": n % 6} for n in range(40)])
    for name, start in {"train": 100, "test": 200}.items():
        write_rows(tasks[1], [{"text": sentence(start + n), "label": n % 3} for n in range(36)], name)
    if starter:  # one is killed first, and the others with it
        killed = run(tmp_path, starter, "killed", model, *tasks)
        assert killed.returncode != 0
        assert not (tmp_path / "two/frame.parquet").exists()
        assert [path for path in (tmp_path / "two/embeddings").rglob("*") if path.is_file() and path.suffix != ".json"]
    done = run(tmp_path, starter, "whole", model, *tasks)
    assert done.returncode == 0, done.stderr[-3000:]
    one = sweep(
        model, tasks, out=tmp_path / "one", workers=1, baselines=False, token_budget=60, device="cpu",
        metrics=["infonce", "curvature"], metric_texts=20,
    )  # fmt: skip
    for name in ("frame", "0", "1"):
        assert pl.read_parquet(tmp_path / f"two/{name}.parquet").equals(one.frame)
    said = done.stdout.splitlines()
    assert said.count("planning 2 2") == 1, said  # by the first process alone
