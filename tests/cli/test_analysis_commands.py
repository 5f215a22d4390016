"""Every option of ``compare``, ``progression`` and ``probe`` reaches the analysis behind it."""

import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing import CompareResult, ProgressionResult, progression
from midlayer_encoders.extras import probing
from midlayer_encoders.extras.probing import token_states as tokens
from tests.cli.calls import check_every_option, run, tables
from tests.support.grouped import compare, probe
from tests.support.tiny_folders import TEXTS, Folder, save_tiny

ROWS = [{"body": f"{text} {number}", "title": f"{number} {text.upper()}"} for number in range(3) for text in TEXTS[:5]]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of three checkpoints."""
    folder = tmp_path_factory.mktemp("steps")
    for seed, name in enumerate(("step1", "checkpoint-2", "step16")):
        save_tiny("Llama", folder / name, seed=seed)
    return folder


@pytest.fixture
def without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the figures, which take longer than everything else."""
    for result in (CompareResult, ProgressionResult):
        monkeypatch.setattr(result, "plots", lambda self: {})


def read_frames(out: Path, *names: str) -> dict[str, pl.DataFrame]:
    return {name: pl.read_parquet(out / f"{name}.parquet") for name in names}


def call_arguments(
    text_column: str = "body", limit: int | None = None, layers: str = "all", **options: Any
) -> dict[str, Any]:
    """Return a command's flags as the arguments of the Python call."""
    expected = layers if layers == "all" else [float(k) if "." in k else int(k) for k in layers.split(",")]
    return {
        "texts": [row[text_column] for row in ROWS][:limit],
        "layers": expected,
        "dataset": "rows",
        "device": "cpu",
        **options,
    }


CHANGED = {
    "text_column": "title",
    "limit": 11,
    "layers": "0,0.5,-1",
    "norm": "final",
    "pooling": "last",
    "max_length": 7,
}
CHANGED |= {"dtype": "float64", "views": 3, "seed": 3}


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_every_option_of_compare_reaches_it(steps: Path, texts: Path, tmp_path: Path) -> None:
    pair = [str(steps / name) for name in ("step1", "step16")]

    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        out = tmp_path / "out"
        output = run("compare", *pair, "--texts", str(texts), "--out", str(out), "--device", "cpu", *flags)
        result = read_frames(out, "frame", "differences")
        rows = result["differences"].select("layer", "name", "difference").iter_rows()
        values = {(layer, name.replace("_", " ")): value for layer, name, value in rows}
        ((head, *lines),) = tables(output)
        printed = {
            (int(line[0]), name): cell.strip("()")
            for line in lines
            for name, cell in zip(head[1:], line[1:], strict=True)
        }
        assert printed == {key: f"{value:+.3g}" for key, value in values.items()}
        assert "step16 minus step1; in brackets: " in " ".join(output.split())
        return result

    def call(metrics: str = "paper", **options: Any) -> dict[str, pl.DataFrame]:
        names = metrics if metrics == "paper" else metrics.split(",")
        result = compare(*pair, metrics=names, **call_arguments(**options))
        return {"frame": result.frame, "differences": result.differences}

    options = CHANGED | {"metrics": "anisotropy,lidar", "resamples": 3}
    plain = {"text_column": "body", "metrics": "infonce,anisotropy"}
    check_every_option(command, call, options, plain=plain, check_each=False)


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_every_option_of_progression_reaches_it(steps: Path, texts: Path, tmp_path: Path) -> None:
    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        out = tmp_path / "out"
        output = run("progression", str(steps), "--texts", str(texts), "--out", str(out), "--device", "cpu", *flags)
        result = read_frames(out, "frame")
        ends = {(row[0], row[1].replace("_", " ")): row[2] for row in settled(result["frame"]).iter_rows()}
        ((head, *lines),) = tables(output)
        rows = {(int(line[0]), name): cell for line in lines for name, cell in zip(head[1:], line[1:], strict=True)}
        assert rows == {key: str(step) for key, step in ends.items()}
        return result

    def settled(frame: pl.DataFrame) -> pl.DataFrame:
        return ProgressionResult(frame, None, {}).settled().select("layer", "name", "step")

    def call(metrics: str = "paper", revisions: str | None = None, **options: Any) -> dict[str, pl.DataFrame]:
        names = metrics if metrics == "paper" else metrics.split(",")
        requested = revisions.split(",") if revisions else None
        return {"frame": progression(str(steps), requested, metrics=names, **call_arguments(**options)).frame}

    options = CHANGED | {"metrics": "anisotropy,lidar", "revisions": "step1,step16"}
    check_every_option(
        command, call, options, plain={"text_column": "body", "metrics": "infonce,anisotropy"}, check_each=False
    )


@pytest.mark.long
def test_every_option_of_probe_reaches_it(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")
    labels = [str(sum(map(ord, row["body"])) % 3) for row in ROWS]
    train = [row["body"] for row in ROWS] + [row["title"] for row in ROWS]
    all_labels = [*labels, *labels]
    for name, count in (("mine", len(train)), ("test", 13)):
        lines = [{"text": text, "label": label} for text, label in zip(train[:count], all_labels, strict=False)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        out = tmp_path / "out"
        output = run(
            "probe", folder, "--data", str(tmp_path / "mine.jsonl"), "--out", str(out), "--device", "cpu", *flags
        )
        table = pl.read_csv(out / "probe.csv")
        ((_, *rows),) = tables(output)
        assert rows == [
            [str(layer), f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * valid:.1f}",
             str(epoch) if epoch else ""]
            for layer, accuracy, low, high, valid, epoch in table.iter_rows()
        ]  # fmt: skip
        best = table.sort("validation", "layer", descending=[True, False]).row(0, named=True)["layer"]
        assert f"By validation, layer {best} of 4" in output
        return read_frames(out, "probe") | {"table": table}

    def call(test: str | None = None, layers: str = "all", **options: Any) -> dict[str, pl.DataFrame]:
        own_options = {name: options.pop(name) for name in ("dtype", "max_length", "norm") if name in options}
        tested = {"test_inputs": train[:13], "test_labels": all_labels[:13]} if test else {}
        expected = call_arguments(layers=layers)["layers"]
        encoder = LayerEncoder(folder, -1, device="cpu", **own_options)
        defaults = {"kind": "attentive", "epochs": 30, "batch_size": 256, "learning_rate": 1e-3, "seed": 0}
        result = probe(encoder, train, all_labels, layers=expected, dataset="mine", **tested, **(defaults | options))
        result.table.write_csv(tmp_path / "expected.csv")
        return {"probe": result.frame, "table": pl.read_csv(tmp_path / "expected.csv")}

    options = {"test": str(tmp_path / "test.jsonl"), "layers": "1,0.5,-1", "epochs": 6, "batch_size": 5, "seed": 2}
    options |= {"learning_rate": 0.02, "norm": "none", "max_length": 9}
    check_every_option(command, call, options, plain={"kind": "linear", "epochs": 2, "layers": "0,2"}, check_each=False)


@pytest.mark.long
def test_probe_memory_limit_is_respected(tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without memory for tokens, every epoch reads the examples again."""
    module = sys.modules[probing.probe.__module__]
    sources: list[object] = []

    def read_tokens(*arguments: Any, **keywords: Any) -> Any:
        sources.append(tokens.read_tokens(*arguments, **keywords))
        return sources[-1]

    monkeypatch.setattr(module, "read_tokens", read_tokens)
    lines = [{"text": f"{text} {number}", "label": str(number)} for number in range(3) for text in TEXTS[:5]]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [
        "probe",
        tiny_folder("Llama"),
        "--data",
        str(tmp_path / "mine.jsonl"),
        "--device",
        "cpu",
        "--epochs",
        "2",
    ]
    frames = []
    for number, extra in enumerate(([], ["--keep-gb", "0"])):
        run(*command, "--layers", "1", "--out", str(tmp_path / f"{number}"), *extra)
        frames.append(pl.read_parquet(tmp_path / f"{number}" / "probe.parquet"))
    assert frames[0].equals(frames[1])
    assert [type(source) for source in sources] == [tokens.CachedTokens, tokens.LiveTokens]
