"""``midlayer sweep``, ``report`` and ``cache``: options reach the sweep, tables print the frame."""

import itertools
import json
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from midlayer_encoders import sweep
from midlayer_encoders.cli import app
from midlayer_encoders.errors import OptionError
from midlayer_encoders.report.labels import interval_words, number
from midlayer_encoders.sweeping import SweepResult, SweepSettings, layer_sweep, sweeps
from midlayer_encoders.sweeping.best_layer import Notes
from midlayer_encoders.sweeping.sweeps import Sweep
from tests.cli.calls import check_every_option, run, tables
from tests.report.made_frames import rows_frame
from tests.store.listing import list_stores
from tests.support.tiny_folders import TEXTS, Folder


@pytest.fixture(autouse=True)
def _quiet_mteb() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, str]:
    """Return two files of pairs by name."""
    result = {}
    for name, texts in (("near", TEXTS), ("far", [text[::-1] for text in reversed(TEXTS)])):
        rows = [
            {"sentence1": a, "sentence2": b, "score": n * n % 5} for n, (a, b) in enumerate(itertools.pairwise(texts))
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        result[name] = str(tmp_path / f"{name}.jsonl")
    return result


def check_table(output: str, result: SweepResult) -> None:
    """Assert that the printed table matches the frame: scores, means, the best layer and its gain."""
    scores = result.frame.filter(pl.col("kind") == "score")
    names = list(dict.fromkeys(scores["dataset"]))
    points = {(layer, name): 100 * v for layer, name, v in scores.select("layer", "dataset", "value").iter_rows()}
    layers = sorted(set(scores["layer"]))
    ((head, *rows),) = tables(output)
    labels = [name.split("-")[0] for name in names]
    several = len(names) > 1  # the average of one task has no column
    assert [re.sub("-[0-9a-f]+$", "", word) for word in head] == ["Layer", *(["Average"] if several else []), *labels]
    means = {layer: sum(points[layer, name] for name in names) / len(names) for layer in layers}
    saved = [100 * result.notes.baselines["TF-IDF"][name] for name in names]
    expected = {str(layer): [means[layer], *(points[layer, name] for name in names)] for layer in layers}
    expected["TF-IDF"] = [sum(saved) / len(saved), *saved]
    assert rows == [
        [label, *(number(value) for value in values[0 if several else 1 :])] for label, values in expected.items()
    ]
    best = max(layers, key=lambda layer: (means[layer], -layer))
    last = "the last layer" if layers[-1] == 4 else f"layer {layers[-1]}"
    subject = labels[0] if len(names) == 1 else f"average over {len(names)} tasks"
    gain = f"{means[best] - means[layers[-1]]:.1f} points more than {last} ({means[layers[-1]]:.1f})"
    sentence = f"Layer {best} of 4 scores {means[best]:.1f} on {subject}, {gain}, {interval_words(result.gain())}."
    if means[best] - means[layers[-1]] < 0.05:
        sentence = f"No layer scores more than {last}: {means[best]:.1f} on {subject}."
    assert sentence in output


@pytest.mark.long
def test_every_option_of_sweep_reaches_it(tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path) -> None:
    folder, numbers = tiny_folder("Llama"), itertools.count()

    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        out = tmp_path / f"out {next(numbers)}"
        output = run("sweep", folder, "--out", str(out), "--device", "cpu", "--workers", "1", *flags)
        result = SweepResult.load(out)
        check_table(output, result)
        assert f"The report: {shlex.quote(str(out / 'report.html'))}" in output
        assert f"Export layer {result.best()}: midlayer export {shlex.quote(folder)} --layer {result.best()} " in output
        assert f"import LayerEncoder\nLayerEncoder({folder!r}, layer={result.best()}" in output
        return frames(result, Path(flags[flags.index("--store") + 1]) if "--store" in flags else out / "embeddings")

    def call(tasks: str, metrics: str = "paper", layers: str = "all", half: bool = False, **options: Any) -> Any:
        out = tmp_path / f"out {next(numbers)}"
        names = [] if metrics == "none" else metrics if metrics == "paper" else metrics.split(",")
        expected = layers if layers == "all" else [float(k) if "." in k else int(k) for k in layers.split(",")]
        store = tmp_path / f"store {next(numbers)}" if "store" in options else out / "embeddings"
        settings = SweepSettings(workers=1, store_dtype="float16" if half else "float32")
        options |= {"store": store, "settings": settings}
        result = sweep(folder, tasks.split(","), metrics=names, layers=expected, out=out, device="cpu", **options)
        return frames(result, store)

    def frames(result: SweepResult, store: Path) -> dict[str, pl.DataFrame]:
        (saved,) = list_stores(store)
        store_row = {"dtype": [saved.dtype], "layers": [str(saved.layers)], "texts": [saved.texts]}
        return {"frame": result.frame, "store": pl.DataFrame(store_row)}

    options = {"tasks": f"{tasks['near']},{tasks['far']}", "layers": "0,0.5,3", "metrics": "curvature,anisotropy"}
    options |= {"norm": "none", "pooling": "max", "dtype": "float64", "max_length": 9, "half": True}
    options |= {"store": str(tmp_path / "shared")}
    check_every_option(command, call, options, plain={"tasks": tasks["near"], "metrics": "none"}, check_each=False)


def test_workers_reach_the_sweep(
    tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls are recorded, not run: a real model takes minutes."""
    reports: list[Sweep] = []
    result = SweepResult(rows_frame([]), tmp_path, Notes("", "m", {}))
    monkeypatch.setattr(layer_sweep, "run_sweep", lambda request: reports.append(request) or result)
    run("sweep", tiny_folder("Llama"), "--tasks", tasks["near"], "--workers", "3")
    run("sweep", tiny_folder("Llama"), "--tasks", tasks["near"])
    assert reports[0].settings.workers == 3
    one_pass = ["prompt_entropy", "dataset_entropy", "effective_rank", "curvature"]
    assert reports[1].settings == SweepSettings()
    assert [getattr(reports[1], name) for name in ("metrics", "layers", "out", "store")] == [
        one_pass,
        "all",
        None,
        None,
    ]
    run("sweep", tiny_folder("Llama"), "--tasks", tasks["near"], "--half")
    assert reports.pop().settings == SweepSettings(store_dtype="float16")


def save_sweep(folder: Path, scores: dict[str, list[float | None]], **notes: Any) -> SweepResult:
    rows = [
        ("m", "main", layer, layer / 4, "score", task, "accuracy", value)
        for task, values in scores.items()
        for layer, value in enumerate(values)
        if value is not None
    ]
    result = SweepResult(rows_frame(rows), folder, Notes("Every layer of m", "m", {}, **notes))
    result.save()
    return result


def sweep_output(result: SweepResult, tmp_path: Path, folder: str, tasks: dict[str, str], monkeypatch: Any) -> str:
    monkeypatch.setattr(layer_sweep, "run_sweep", lambda _: result)
    arguments = ["sweep", folder, "--tasks", tasks["near"]]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"}, catch_exceptions=False).output


def test_table_with_gaps_ties_and_failures(
    tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer without a task has an empty cell and no mean; of equal means, the lowest layer is best."""
    scores: dict[str, list[float | None]] = {"A": [0.1, 0.5, 0.4, 0.9, 0.2], "B": [0.3, 0.3, 0.4, None, 0.5]}
    result = save_sweep(tmp_path, scores, failures={"C": "layer 1: no data"})
    output = sweep_output(result, tmp_path, tiny_folder("Llama"), tasks, monkeypatch)
    ((_, *rows),) = tables(output)
    assert rows == [
        ["0", "20.0", "10.0", "30.0"],
        ["1", "40.0", "50.0", "30.0"],
        ["2", "40.0", "40.0", "40.0"],
        ["3", "–", "90.0", "–"],
        ["4", "35.0", "20.0", "50.0"],
    ]
    assert "C failed, layer 1: no data" in output
    page = (tmp_path / "report.html").read_text()
    assert "C failed: layer 1: no data" in page
    gain = "5.0 points more than the last layer (35.0), no interval: A, B were not resampled."
    assert f"Layer 1 of 4 scores 40.0 on average over 2 tasks, {gain}" in output
    assert f"Layer 1 of 4 scores 40.0 on average over 2 tasks, {gain}" in page


def test_two_tasks_with_the_same_name_keep_their_digests(
    tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = save_sweep(tmp_path, {"mine-0123abcd": [0.1] * 5, "mine-4567cdef": [0.2] * 5}, failures={})
    ((head, *_),) = tables(sweep_output(result, tmp_path, tiny_folder("Llama"), tasks, monkeypatch))
    assert head == ["Layer", "Average", "mine-0123abcd", "mine-4567cdef"]


@pytest.mark.long
def test_recipes_and_baselines_are_listed_and_the_code_of_the_winner_is_last(
    tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: dict[str, dict[str, list[float | None]]] = {
        "plain": {"A": [0.1, 0.5, 0.4, 0.3, 0.2]},
        "one-word": {"A": [None, 0.3, 0.4, 0.6, 0.5]},
    }
    parts = {
        name: save_sweep(
            tmp_path / name, recipe_scores, options={"recipe": name}, baselines={"MiniLM": {"A": 0.7}} if n == 0 else {}
        )
        for n, (name, recipe_scores) in enumerate(scores.items())
    }
    output = sweep_output(SweepResult.of(parts, tmp_path), tmp_path, tiny_folder("Llama"), tasks, monkeypatch)
    (_, *recipes), (_, *layers) = tables(output)
    assert recipes == [
        ["plain", "1", "50.0", "0.0", "50.0"],
        ["one-word", "3", "60.0", "+10.0 (no interval)", "60.0"],
        ["MiniLM", "", "70.0", "+20.0", "70.0"],
    ]
    assert layers == [["1", "30.0"], ["2", "40.0"], ["3", "60.0"], ["4", "50.0"], ["MiniLM", "70.0"]]
    assert "Every layer of m under one-word" in " ".join(output.split())
    assert output.rstrip().splitlines()[-4:] == [
        "Export layer 3: midlayer export m --layer 3 --recipe one-word --out layer-3",
        "In Python:",
        "from midlayer_encoders import LayerEncoder",
        "LayerEncoder('m', layer=3, recipe='one-word').save_pretrained(\"layer-3\")",
    ]


def test_loaded_sweep_writes_the_page_with_all_notes(tmp_path: Path) -> None:
    notes = {
        "parameters": {0: 10_000_000, 4: 50_000_000},
        "seconds": {0: 1.5, 4: 3.0},
        "baselines": {"TF-IDF": {"A": 0.7}, "MiniLM": {"A": 0.65}},
    }
    save_sweep(tmp_path, {"A": [0.6, 0.2, 0.2, 0.2, 0.5]}, **notes, remarks=["A remark."], options={"norm": "none"})
    page = SweepResult.load(tmp_path).to_html().read_text()
    for expected_text in (
        ">0</th><td>10.0</td><td>93.8</td>",
        "A remark.",
        "TF-IDF scores 70.0 on A",
        ">TF-IDF</th><td>–</td><td>–</td><td>70.0</td>",
        ">MiniLM</th><td>–</td><td>–</td><td>65.0</td>",
    ):
        assert expected_text in page
    assert "midlayer export m --layer 0 --norm none --out layer-0" in page


@pytest.mark.parametrize("flags", [[], ["--metrics", "paper"]])
def test_metrics_of_one_pass_are_the_default(
    flags: list[str], tiny_folder: Folder, tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: dict[str, Any] = {}

    def stop(request: Sweep) -> None:
        calls.update(vars(request))
        raise OptionError("enough")

    monkeypatch.setattr(layer_sweep, "run_sweep", stop)
    command = [
        "sweep",
        tiny_folder("Llama"),
        "--tasks",
        tasks["near"],
        "--out",
        str(tmp_path / "out"),
        "--device",
        "cpu",
        *flags,
    ]
    CliRunner().invoke(app, command)
    assert calls["metrics"] == (
        "paper" if flags else ["prompt_entropy", "dataset_entropy", "effective_rank", "curvature"]
    )


def test_several_models_continue_in_a_folder_that_holds_theirs(
    tasks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise OptionError("enough")

    monkeypatch.setattr(sweeps, "sweep_models", stop)
    (tmp_path / "runs" / "a").mkdir(parents=True)
    command = ["sweep", "a", "b", "--tasks", tasks["near"], "--out", str(tmp_path / "runs")]
    assert str(CliRunner().invoke(app, command).exception) == "enough"
