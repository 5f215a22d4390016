"""Embedding with Ray Data on a cluster of two CPUs: equal to one process, with lost workers, and in bounded memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import FolderError, LayerIndexError, OptionError
from midlayer_encoders.extras.vectors.ray import LayerEmbedder, embed_parquet
from midlayer_encoders.files import folder_lock
from midlayer_encoders.processes.group import ProcessLostError
from tests.tiny_folders import TEXTS

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]  # those of Ray
ROOT = Path(__file__).parents[2]
SIZE = 64


@pytest.fixture(scope="module")
def model(tiny_folder: Callable[[str], str]) -> str:
    return tiny_folder("Llama")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def context(cluster: Any) -> Iterator[Any]:
    """Yield the context of datasets that are made after it."""
    saved = cluster.data.DataContext.get_current().copy()
    context = cluster.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    yield context
    cluster.data.DataContext._set_current(saved)


def texts_of(count: int) -> list[str]:
    return [f"{TEXTS[number % len(TEXTS)]} {number}" for number in range(count)]


def write(path: Path, count: int) -> Path:
    pl.DataFrame({"id": range(count), "text": texts_of(count)}).write_parquet(path, row_group_size=1000)
    return path


def in_one_process(model: str, count: int) -> np.ndarray:
    """Return the vectors ``(L, N, D)`` of the same batches."""
    encoder = LayerEncoder(model, -1, device="cpu")
    texts = texts_of(count)
    return np.concatenate([encoder.encode_layers(texts[start : start + SIZE]) for start in range(0, count, SIZE)], 1)


def check_folder(out: Path, model: str, count: int) -> None:
    """Compare the files of a job with one process, to the bit; none is lost, twice or out of place."""
    frame = pl.read_parquet(out)  # in the order of the names
    assert frame["id"].to_list() == list(range(count))
    assert frame["text"].to_list() == texts_of(count)
    for layer, vectors in enumerate(in_one_process(model, count)):
        np.testing.assert_array_equal(frame[f"layer_{layer}"].to_numpy(), vectors)
    names = [f"part-{number:06d}.parquet" for number in range(-(-count // SIZE))]
    assert sorted(path.name for path in out.iterdir()) == names
    assert not out.with_name(f"{out.name}.part").exists()


def workers(parent: int | None = None) -> list[int]:
    """Return the processes of actors, among those that this process has started or another did."""
    lines = subprocess.run(
        ["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    processes = [line.split(maxsplit=2) for line in lines[1:]]
    family = {str(parent or os.getpid())}
    for _ in range(4):
        family |= {pid for pid, ppid, _ in processes if ppid in family}
    return [int(pid) for pid, _, words in processes if pid in family and words.startswith("ray::MapWorker")]


class Named(LayerEmbedder):
    """Also says which process embedded a row, and how often it was called; waits for the other actor."""

    def __init__(self, folder: str, payload: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.folder = Path(folder)
        self.payload = payload
        self.actors = self.folder.with_name(f"{self.folder.name} actors")
        self.actors.mkdir(exist_ok=True)
        (self.actors / str(os.getpid())).touch()

    def __call__(self, batch: Any) -> Any:
        start = time.monotonic()
        while len(list(self.actors.iterdir())) < 2 and time.monotonic() - start < 60:
            time.sleep(0.1)  # on a busy machine, one actor could embed everything before the other is there
        rows = len(batch["id"])
        (self.folder / f"{batch['id'][0]}-{os.getpid()}-{time.monotonic_ns()}").touch()
        extra = {"payload": np.zeros((rows, self.payload), np.uint8)} if self.payload else {}
        return {**super().__call__(batch), "process": np.full(rows, os.getpid()), **extra}


def dataset(cluster: Any, model: str, folder: Path, count: int, **options: Any) -> Any:
    rows = [{"id": number, "text": text} for number, text in enumerate(texts_of(count))]
    return cluster.data.from_items(rows, override_num_blocks=count // SIZE).map_batches(
        Named,
        fn_constructor_kwargs={"folder": str(folder), "model": model, "device": "cpu", **options},
        batch_size=SIZE,
        compute=cluster.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )


@pytest.mark.parametrize("killed", [False, True])
def test_two_actors_equal_one_process_to_the_bit_and_in_order(
    killed: bool, cluster: Any, context: Any, model: str, tmp_path: Path
) -> None:
    count = 16 * SIZE
    rows: list[dict[str, Any]] = []
    for row in dataset(cluster, model, tmp_path, count).iter_rows():
        rows.append(row)
        if killed and len(rows) == 1:
            os.kill(workers()[0], signal.SIGKILL)
    assert [row["id"] for row in rows] == list(range(count))
    for layer, vectors in enumerate(in_one_process(model, count)):
        np.testing.assert_array_equal(np.stack([row[f"layer_{layer}"] for row in rows]), vectors)
    if not killed:
        assert len({row["process"] for row in rows}) == 2


def test_a_pipeline_writes_lists(cluster: Any, model: str, tmp_path: Path) -> None:
    count = 4 * SIZE
    cluster.data.read_parquet(str(write(tmp_path / "in.parquet", count))).map_batches(
        LayerEmbedder,
        fn_constructor_kwargs={"model": model, "layers": [1, -1], "device": "cpu"},
        batch_size=SIZE,
        batch_format="pyarrow",
        compute=cluster.data.ActorPoolStrategy(size=1),
    ).write_parquet(str(tmp_path / "out"))
    frame = pl.read_parquet(tmp_path / "out").sort("id")  # the names of Ray's files do not follow the rows
    assert frame["id"].to_list() == list(range(count))
    assert frame.schema["layer_4"] == pl.Array(pl.Float32, 32)
    np.testing.assert_allclose(frame["layer_4"].to_numpy(), in_one_process(model, count)[4], atol=1e-6)


def test_a_slow_consumer_holds_the_actors_back(cluster: Any, context: Any, model: str, tmp_path: Path) -> None:
    limits = cluster.data.ExecutionResources(object_store_memory=64e6)
    context.execution_options.resource_limits = limits
    count = 40 * SIZE
    batches = dataset(cluster, model, tmp_path, count, payload=2**17).iter_batches(batch_size=SIZE, prefetch_batches=0)
    ahead = []
    for number, batch in enumerate(batches):  # 8 MB each
        assert batch["id"][0] == number * SIZE
        if number in (0, 4, 8):
            time.sleep(4)
            ahead.append(len(list(tmp_path.iterdir())) - number)
    assert max(ahead) <= 16, ahead
    assert number == 39


@pytest.mark.parametrize("killed", [False, True])
def test_a_job_equals_one_process_also_if_an_actor_is_killed(
    killed: bool, cluster: Any, model: str, tmp_path: Path
) -> None:
    count = 16 * SIZE - 20
    reports = []

    def progress(*report: Any) -> None:
        reports.append(report)
        if killed and len(reports) == 1:
            os.kill(workers()[0], signal.SIGKILL)

    source = write(tmp_path / "in.parquet", count)
    out = embed_parquet(model, source, tmp_path / "out", batch_size=SIZE, device="cpu", progress=progress)
    assert reports[-1] == ("embedding", count, count)
    check_folder(out, model, count)
    metadata = json.loads(pl.read_parquet_metadata(out / "part-000002.parquet")["midlayer"])
    assert {"layers": [0, 1, 2, 3, 4], "inputs": SIZE, "first": 2 * SIZE}.items() <= metadata.items()
    with pytest.raises(OptionError, match="`out` must be a new or empty folder"):
        embed_parquet(model, source, out)


def test_errors_of_workers_are_those_of_the_package(
    cluster: Any, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write(tmp_path / "in.parquet", SIZE)
    with pytest.raises(LayerIndexError, match="`layer` must be"):
        embed_parquet(model, source, tmp_path / "out", layers=[99], device="cpu")
    pl.DataFrame({"text": ["a", None]}).write_parquet(tmp_path / "null.parquet")
    with pytest.raises(OptionError, match=r"a text in each row, but .*null.parquet has none in row 1"):
        embed_parquet(model, tmp_path / "null.parquet", tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()
    pl.DataFrame({"text": ["a" * 500]}).write_parquet(tmp_path / "long.parquet")
    embed_parquet(model, tmp_path / "long.parquet", tmp_path / "out", device="cpu")
    assert "truncated" in caplog.text  # warnings arrive, too
    with folder_lock(tmp_path / "other.part"), pytest.raises(FolderError, match="is in use"):
        embed_parquet(model, source, tmp_path / "other")


def test_texts_that_end_their_process_end_the_job(
    cluster: Any, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midlayer_encoders.extras.vectors.ray.LayerEmbedder", Deadly)
    source = write(tmp_path / "in.parquet", 4 * SIZE)
    with pytest.raises(ProcessLostError, match=r"Rows 128 to 191 of .*ended their process 3 times"):
        embed_parquet(model, source, tmp_path / "out", batch_size=SIZE, device="cpu")
    assert not (tmp_path / "out").exists()


class Deadly(LayerEmbedder):
    """Ends its process at a text."""

    def __call__(self, batch: Any) -> Any:
        if f"{TEXTS[130 % len(TEXTS)]} 130" in batch["text"].to_pylist():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(batch)


def command(*words: object, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    return subprocess.Popen(
        [sys.executable, "-m", "midlayer_encoders.cli", "embed", *map(str, words)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, **options,
    )  # fmt: skip


def test_command_resumes_after_a_kill_and_prints_only_its_own_lines(model: str, tmp_path: Path) -> None:
    count = 60 * SIZE
    write(tmp_path / "in.parquet", count)
    words = [model, "--texts", "in.parquet", "--out", "out", "--ray", "--json"]
    words += ["--concurrency", 2, "--batch-size", SIZE, "--device", "cpu"]
    stopped = command(*words, cwd=tmp_path)
    work = tmp_path / "out.part"
    while len(complete := list(work.rglob("part-*.parquet"))) < 3:
        assert stopped.poll() is None, stopped.communicate()
        time.sleep(0.05)
    stopped.kill()
    stopped.communicate()
    assert not (tmp_path / "out").exists()
    inodes = {path.name: path.stat().st_ino for path in complete}
    resumed = command(*words, cwd=tmp_path)
    output, errors = resumed.communicate()
    assert resumed.returncode == 0, errors
    assert json.loads(output) == {"path": "out", "inputs": count, "kind": "texts"}
    progress = [json.loads(line) for line in errors.splitlines()]  # and nothing else
    assert (progress[-1]["stage"], progress[-1]["done"], progress[-1]["total"]) == ("embedding", count, count)
    check_folder(tmp_path / "out", model, count)
    assert {name: (tmp_path / "out" / name).stat().st_ino for name in inodes} == inodes  # not embedded again


def test_command_shows_an_error_of_a_worker_in_one_line(model: str, tmp_path: Path) -> None:
    source = write(tmp_path / "in.parquet", SIZE)
    failed = command(model, "--texts", source, "--out", tmp_path / "out", "--ray", "--layers", 99, "--device", "cpu")
    output, errors = failed.communicate()
    assert (failed.returncode, output) == (2, "")
    (error,) = errors.strip().splitlines()
    assert error.startswith("Error: `layer` must be in [0, 4]")


def peak_memory(count: int, model: str, folder: Path) -> float:
    """Return the peak memory in MB of a command and its actors that embed so many rows of 1 kB."""
    folder.mkdir()
    frame = pl.DataFrame({"text": [str(number) for number in range(count)], "body": ["x" * 1000] * count})
    frame.with_columns(pl.col("body") + pl.col("text")).write_parquet(folder / "in.parquet", row_group_size=1000)
    running = command(
        model,
        "--texts",
        "in.parquet",
        "--out",
        "out",
        "--ray",
        "--concurrency",
        2,
        "--device",
        "cpu",
        "--quiet",
        cwd=folder,
    )
    peaks: dict[int, int] = {}
    while running.poll() is None:
        for process in (running.pid, *workers(running.pid)):
            try:
                status = Path(f"/proc/{process}/status").read_text()
            except OSError:  # it has ended
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM"):
                    peaks[process] = int(line.split()[1])
        time.sleep(0.5)
    assert running.returncode == 0, running.communicate()
    assert len(pl.read_parquet(folder / "out", columns=["text"])) == count
    assert len(peaks) == 3
    return sum(peaks.values()) / 1024


def test_memory_does_not_grow_with_the_number_of_texts(model: str, tmp_path: Path) -> None:
    # 80,000 more rows of 1 kB, and of 640 bytes of vectors, are 130 MB.
    small, large = (peak_memory(count, model, tmp_path / str(count)) for count in (20_000, 100_000))
    assert large - small < 50, (small, large)
