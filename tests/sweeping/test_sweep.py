import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.store import text_key
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import sweep

pytestmark = MTEB

WORDS = ["apple", "bread", "chair", "door", "engine", "forest", "glass", "house", "island", "jungle", "kettle", "lamp"]


def sentence(number: int) -> str:
    """Return a distinct sentence for each number."""
    return " ".join(random.Random(number).choices(WORDS, k=5)) + f" {number}"


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "test") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def task_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return data folders, one for each task type."""
    root = tmp_path_factory.mktemp("five")
    labelled = [{"text": sentence(n), "label": n % 3} for n in range(72)]
    write_rows(root / "kinds", labelled[:36], "train")
    write_rows(root / "kinds", labelled[36:])
    write_rows(root / "groups", [{"sentences": sentence(n), "labels": n % 4} for n in range(40)])
    write_rows(
        root / "pairs", [{"sentence1": sentence(n), "sentence2": sentence(100 + n), "labels": n % 2} for n in range(30)]
    )
    write_rows(
        root / "near", [{"sentence1": sentence(n), "sentence2": sentence(200 + n), "score": n % 5} for n in range(30)]
    )
    ranked = [
        {
            "query": sentence(n),
            "positive": [sentence(300 + n)],
            "negative": [sentence(400 + 10 * n + k) for k in range(3)],
        }
        for n in range(10)
    ]
    write_rows(root / "ranks", ranked)
    return {name: root / name for name in ("kinds", "groups", "pairs", "near", "ranks")}


def mteb_score(encoder: LayerEncoder, path: Path) -> float:
    import mteb

    with isolated_random():
        result = mteb.evaluate(encoder, task_sources(path)[0].make(), cache=None, show_progress_bar=False)
    return float(result[0].get_score())


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_every_type_scores_like_mteb_at_each_layer(
    workers: int, task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    model = tiny_folder("Llama")
    folders = task_folders if workers == 1 else {name: task_folders[name] for name in ("pairs", "near")}
    result = sweep(model, list(folders.values()), out=tmp_path, workers=workers, baselines=False, device="cpu")
    assert not result.failures
    scored = result.frame.filter(kind="score")
    assert len(scored) == len(folders) * (DEPTH + 1)
    for name, path in folders.items():
        for layer in range(DEPTH + 1):
            row = scored.filter((pl.col("layer") == layer) & pl.col("dataset").str.starts_with(name))
            expected = mteb_score(LayerEncoder(model, layer, device="cpu"), path)
            assert row["value"].item() == pytest.approx(expected, abs=1e-3 if name != "kinds" else 3 / 360), (
                name,
                layer,
            )


@pytest.mark.long
def test_prompts_are_chosen_like_mteb(task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path) -> None:
    model, prompts = tiny_folder("Llama"), {"query": "q: ", "document": "d: ", "STS": "same? "}
    result = sweep(
        model, [task_folders["ranks"], task_folders["near"]], layers=[2], out=tmp_path, baselines=False, prompts=prompts, workers=1,
        device="cpu",
    )  # fmt: skip
    for name in ("ranks", "near"):
        expected = mteb_score(LayerEncoder(model, 2, prompts=prompts, device="cpu"), task_folders[name])
        score = result.frame.filter(pl.col("dataset").str.starts_with(name), kind="score")["value"].item()
        assert score == pytest.approx(expected, abs=1e-3)
        assert score != pytest.approx(mteb_score(LayerEncoder(model, 2, device="cpu"), task_folders[name]), abs=1e-6)


@pytest.mark.long
def test_each_text_passes_once_and_a_repeated_sweep_embeds_nothing(
    task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    reports: dict[str, tuple[int, int]] = {}
    repeated_reports: dict[str, tuple[int, int]] = {}
    options: dict[str, Any] = {"out": tmp_path, "workers": 1, "baselines": False, "device": "cpu"}
    first = sweep(
        tiny_folder("BERT"),
        [task_folders["near"]],
        progress=lambda stage, *counts: reports.update({stage: counts}),
        **options,
    )
    distinct = {
        row[key]
        for row in map(json.loads, (task_folders["near"] / "test.jsonl").read_text().splitlines())
        for key in ("sentence1", "sentence2")
    }
    assert len(distinct) == 60
    assert reports.pop("confirming") in ((2, 2), (3, 3))  # the best, the second best and the last
    assert reports == {"planning": (1, 1), "embedding": (60, 60), "scoring": (DEPTH + 1, DEPTH + 1)}
    repeated = sweep(
        tiny_folder("BERT"),
        [task_folders["near"]],
        progress=lambda stage, *counts: repeated_reports.update({stage: counts}),
        **options,
    )
    repeated_reports.pop("confirming")
    assert repeated_reports == {"planning": (1, 1), "scoring": (DEPTH + 1, DEPTH + 1)}
    assert repeated.frame.equals(first.frame)
    assert list((tmp_path / "mteb").rglob("near-*.json"))


def test_metrics_and_scores_are_saved_and_loaded(
    task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    result = sweep(
        tiny_folder("Llama"), [task_folders["near"]], metrics=["prompt_entropy", "lidar"], views=3, metric_texts=12, out=tmp_path,
        workers=1, device="cpu",
    )  # fmt: skip
    assert set(result.frame["kind"]) == {"score", "metric", "confirmed"}
    texts = sorted(task_texts(task_sources(task_folders["near"])[0].make()), key=text_key)[:12]
    whole = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    expected = measure_layers(whole, texts, metrics="lidar", views=3)["value"].to_list()
    assert result.frame.filter(name="lidar")["value"].to_list() == pytest.approx(expected, rel=1e-5)
    assert set(result.notes.baselines["TF-IDF"]) == set(result.frame.filter(pl.col("kind") == "score")["dataset"])
    loaded = SweepResult.load(tmp_path)
    assert loaded.frame.equals(result.frame)
    assert loaded.notes == result.notes
    assert loaded.best() == result.best()
    page = loaded.to_html().read_text()
    assert f"--layer {result.best()}" in page
    assert result.notes.parameters[4] > result.notes.parameters[0]
    with pytest.raises(OptionError, match="must be the --out of a sweep"):
        SweepResult.load(tmp_path / "elsewhere")


def test_failed_task_is_reported_and_the_others_continue(
    task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    broken = task_sources(task_folders["pairs"])[0].make()
    broken.load_data = lambda **_: (_ for _ in ()).throw(RuntimeError("no such rows"))  # type: ignore[method-assign]
    result = sweep(
        tiny_folder("Llama"),
        [broken, task_folders["near"]],
        layers=[1, 2],
        out=tmp_path,
        workers=1,
        baselines=False,
        device="cpu",
    )
    assert list(result.failures.values()) == ["layer 1: RuntimeError: no such rows"]
    assert len(result.frame.filter(kind="score")) == 2


def delete_store(store: Path) -> None:
    shutil.rmtree(store)


def corrupt_store(store: Path) -> None:
    for path in [path for path in store.rglob("*") if path.is_file() and path.suffix != ".json"]:
        content = path.read_bytes()
        path.write_bytes(content[:-4] + bytes(255 - byte for byte in content[-4:]))


@pytest.mark.long
@pytest.mark.parametrize("damage", [delete_store, corrupt_store])
def test_damaged_store_is_filled_again(
    damage: Callable[[Path], None], task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"workers": 1, "baselines": False, "device": "cpu", "out": tmp_path}
    first = sweep(tiny_folder("Llama"), [task_folders["near"]], **options)
    damage(tmp_path / "embeddings")
    for path in sorted((tmp_path / "mteb").rglob("near-*.json"))[2:]:
        path.unlink()
    assert sweep(tiny_folder("Llama"), [task_folders["near"]], **options).frame.equals(first.frame)


_SWEEP = """
import sys, warnings
warnings.simplefilter("ignore")
from tests.sweeping.scoring import sweep
sweep(sys.argv[1], sys.argv[4:], out=sys.argv[2], store=sys.argv[3], workers=1, baselines=False, token_budget=60, device="cpu")
"""


def start_sweep(model: str, out: Path, store: Path, *tasks: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _SWEEP, model, str(out), str(store), *map(str, tasks)]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE)


@pytest.mark.slow  # three processes import mteb; test_kills.py kills processes that write to the store
def test_killed_and_resumed_sweep_gives_the_same_frame_bitwise(
    task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path
) -> None:
    model, tasks = tiny_folder("Llama"), [task_folders["near"], task_folders["pairs"]]
    uninterrupted = start_sweep(model, tmp_path / "whole", tmp_path / "whole/embeddings", *tasks)
    stderr = uninterrupted.communicate()[1]
    assert uninterrupted.returncode == 0, stderr
    killed = start_sweep(model, tmp_path / "killed", tmp_path / "killed/embeddings", *tasks)
    shards = lambda: [p for p in (tmp_path / "killed/embeddings").rglob("*") if p.is_file() and p.suffix != ".json"]  # noqa: E731
    while killed.poll() is None and len(shards()) < 3:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed/frame.parquet").exists(), "it finished before it was killed"
    resumed = start_sweep(model, tmp_path / "killed", tmp_path / "killed/embeddings", *tasks)
    stderr = resumed.communicate()[1]
    assert resumed.returncode == 0, stderr
    frames = [pl.read_parquet(tmp_path / name / "frame.parquet") for name in ("whole", "killed")]
    assert frames[0].equals(frames[1])


@pytest.mark.slow
def test_two_sweeps_share_a_store(task_folders: dict[str, Path], tiny_folder: Folder, tmp_path: Path) -> None:
    tasks = [task_folders["near"], task_folders["pairs"]]
    processes = [start_sweep(tiny_folder("Llama"), tmp_path / name, tmp_path / "store", *tasks) for name in ("a", "b")]
    for process in processes:
        stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    frames = [pl.read_parquet(tmp_path / name / "frame.parquet").sort("dataset", "layer") for name in ("a", "b")]
    assert frames[0].equals(frames[1])
