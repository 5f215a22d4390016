"""Every option of the commands reaches its function: the files equal those of the Python call."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from midlayer_encoders import EncoderOptions, LayerEncoder
from midlayer_encoders.cli import _arguments, app
from midlayer_encoders.encoder.whole_model import measure
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.selection import select
from tests.cli.calls import check_every_option, option_flags, run, tables
from tests.support.families import tiny
from tests.support.tiny_folders import TEXTS, Folder

LINES = [
    *TEXTS[:5],
    *(f"{text}, they say" for text in TEXTS[:5]),
    "a last one, of some length",
    "and one more than that",
]
ENCODER = ("dtype", "max_length", "norm", "pooling")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a file of JSON lines whose two fields are different texts."""
    path = tmp_path / "some.lines.jsonl"
    rows = [{"body": line, "title": line[::-1].upper()} for line in LINES]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def read_field(path: Path, field: str, limit: int | None = None) -> list[str]:
    return [json.loads(line)[field] for line in path.read_text().splitlines()][:limit]


def parse_layers(argument: str) -> list[int | float] | str:
    return (
        argument if argument == "all" else [float(part) if "." in part else int(part) for part in argument.split(",")]
    )


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the encoder, and the others."""
    own_options = {name: value for name, value in options.items() if name in ENCODER}
    return own_options, {name: value for name, value in options.items() if name not in ENCODER}


@pytest.mark.slow
def test_every_option_of_metrics_reaches_the_measurement(tiny_folder: Folder, texts: Path, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")

    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        out = tmp_path / "out"
        output = run("metrics", folder, "--texts", str(texts), "--out", str(out), "--device", "cpu", *flags)
        frame = pl.read_parquet(out / "metrics.parquet")
        assert frame.equals(pl.read_csv(out / "metrics.csv").cast(frame.schema))  # type: ignore[arg-type]
        check_printed(output, frame)
        return {"frame": frame}

    def call(
        text_column: str = "body", limit: int | None = None, metrics: str = "paper", layers: str = "all", **options: Any
    ) -> dict[str, pl.DataFrame]:
        own_options, other_options = split_options({"norm": "none", "pooling": "mean", "seed": 0} | options)
        names = metrics if metrics in ("all", "paper") else metrics.split(",")
        encoder = LayerEncoder(folder, -1, device="cpu", **own_options)
        lines = read_field(texts, text_column, limit)
        return {
            "frame": measure(
                encoder,
                lines,
                metrics=names,
                layers=parse_layers(layers),
                views=16,
                dataset="some.lines",
                **other_options,
            )
        }

    options = {"text_column": "title", "metrics": "anisotropy,infonce,prompt_entropy", "layers": "0,0.5,-1", "limit": 9}
    options |= {"norm": "final", "pooling": "last", "dtype": "float64", "max_length": 7, "seed": 3}
    check_every_option(command, call, options, plain={"text_column": "body", "limit": 3, "layers": "1,2"})


@pytest.mark.parametrize(("pooling", "expected"), [(None, "last"), ("mean", "mean")])
def test_template_beside_recipes_keeps_the_pooling(pooling: Any, expected: str) -> None:
    options = EncoderOptions(template="{text}, in a word:", pooling=pooling)
    recipes, remaining = _arguments.parse_recipes("plain", options)
    assert recipes is not None
    assert [(recipe.template, recipe.pooling) for recipe in recipes] == [(None, None), (options.template, expected)]
    assert (remaining.template, remaining.pooling) == (None, None)


def check_printed(output: str, frame: pl.DataFrame) -> None:
    """Assert that the printed tables match the frame, as many metrics at a time as the terminal has room for."""
    values = {(layer, name): value for layer, name, value in frame.select("layer", "name", "value").iter_rows()}
    names, layers = list(dict.fromkeys(frame["name"])), sorted(set(frame["layer"]))
    printed = tables(output)
    assert [name for head, *_ in printed for name in head[1:]] == [name.replace("_", " ") for name in names]
    for head, *rows in printed:
        subset, names = names[: len(head) - 1], names[len(head) - 1 :]
        assert [int(row[0]) for row in rows] == layers
        for row in rows:
            expected = [f"{values[int(row[0]), name]:.4g}" if (int(row[0]), name) in values else "–" for name in subset]
            assert row[1:] == expected


@pytest.mark.long
def test_wikitext_drops_headings_and_short_paragraphs_for_any_max_length(tiny_folder: Folder, tmp_path: Path) -> None:
    long = [f"paragraph {number} of more than thirty characters, each a token" for number in range(4)]
    path = tmp_path / "wiki.txt"
    path.write_text("\n".join([" = A title of more than thirty characters in all = ", "short", *long, " = = B = = "]))
    command = ["metrics", tiny_folder("Llama"), "--texts", str(path), "--metrics", "prompt_entropy", "--device", "cpu"]
    for extra, saved in ([], long), (["--limit", "2"], long[:2]), (["--max-length", "16"], long):
        run(*command, "--wikitext", "--out", str(tmp_path / "out"), *extra)
        longest = 16 if "--max-length" in extra else None
        encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=longest)
        expected = measure(encoder, saved, metrics=["prompt_entropy"], dataset="wiki")
        assert pl.read_parquet(tmp_path / "out" / "metrics.parquet").equals(expected)


def read_files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_every_option_of_export_is_in_the_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    """The command and Python write the same folder, byte for byte; its card names its path, so that is the same."""
    arguments = {"norm": "none", "pooling": "last", "dtype": "float64", "max_length": 7, "bidirectional": True}
    folder, layer, out = tiny_folder("Llama"), "0.5", tmp_path / "same"
    written: list[dict[str, bytes]] = []
    for left_out in (None, *arguments, "all"):
        options = {name: value for name, value in arguments.items() if left_out not in (name, "all")}
        LayerEncoder(folder, 0.5, device="cpu", **options).save_pretrained(str(out))
        written.append(read_files(out))
        if left_out in (None, "all"):
            shutil.rmtree(out)
            output = run("export", folder, "--layer", layer, "--out", str(out), *option_flags(options))
            assert read_files(out) == written[-1]
            assert "Layer 2 of 4, " in output
    assert all(contents != written[0] for contents in written[1:])


def test_export_overwrites_a_folder_with_overwrite(tiny_folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "kept.txt").write_text("mine")
    command = ["export", tiny_folder("Llama"), "--layer", "-2", "--out", str(tmp_path)]
    with pytest.raises(MidlayerError, match="new or empty folder"):
        run(*command)
    assert "Layer 3 of 4" in run(*command, "--overwrite")
    assert (tmp_path / "kept.txt").read_text() == "mine"
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 3


def test_adapters_are_merged_in_order(tiny_folder: Folder, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    merged, flags, weights = tiny("Llama"), [], []
    for number in range(3):
        with torch.random.fork_rng():
            torch.manual_seed(number)
            lora = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            adapted = get_peft_model(merged, lora)  # type: ignore[arg-type]
        adapted.save_pretrained(str(tmp_path / f"{number}"))
        flags += ["--adapter", str(tmp_path / f"{number}")]
        merged = adapted.merge_and_unload()
        weights.append(merged.layers[0].self_attn.q_proj.weight.detach().clone())
    run("export", tiny_folder("Llama"), "--layer", "1", "--out", str(tmp_path / "out"), *flags)
    result = load_file(tmp_path / "out" / "model.safetensors")["layers.0.self_attn.q_proj.weight"]
    torch.testing.assert_close(result, weights[2])
    assert all((result - earlier).abs().max() > 1e-2 for earlier in weights[:2])


REFUSED = {
    "--revision step7": "`revision` must be None for a folder, but got 'step7'",
    "--gguf-file no.gguf": "GGUF files there: none",
    "--dtype float77": "float77",
    "--device warp": "on this machine, but got 'warp'",
    "--tower image": "`tower` must be None for",
}
ABSENT = {("export", "--device"), ("select", "--tower"), ("probe", "--tower")}


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (command, option)
        for command in ("metrics", "export", "select", "sweep", "probe")
        for option in REFUSED
        if (command, option.split()[0]) not in ABSENT
    ],
)
def test_model_options_reach_the_model(
    command: str, option: str, tiny_folder: Folder, texts: Path, tmp_path: Path
) -> None:
    """An invalid value is refused by the code that reads it, so a dropped option would not raise."""
    out = ["--out", str(tmp_path / "out")]
    (tmp_path / "data.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    task_file = tmp_path / "near.jsonl"
    task_file.write_text("".join(f'{{"sentence1": "a", "sentence2": "b", "score": {score}}}\n' for score in (1, 2)))
    arguments = {
        "metrics": ["--texts", str(texts), "--text-column", "body", *out],
        "export": ["--layer", "1", *out],
        "select": ["--texts", str(texts), "--text-column", "body", *out],
        "sweep": ["--tasks", str(task_file), *out],
        "probe": ["--data", str(tmp_path / "data.jsonl"), *out],
    }[command]
    result = CliRunner().invoke(app, [command, tiny_folder("Llama"), *arguments, *option.split()])
    assert REFUSED[option] in str(result.exception)


# --- select ----------------------------------------------------------------------------------------------------------

KINDS = ["animal", "money", "help"]


@pytest.mark.slow
@pytest.mark.parametrize("check_each", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_option_of_select_reaches_the_selection(check_each: bool, tiny_folder: Folder, tmp_path: Path) -> None:
    lines = [f"{text} {number}, said {number % 3} times over" for number in range(4) for text in TEXTS[:5]]
    rows = [{"body": line, "title": line[::-1]} for line in lines]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, rows)))
    labels_or_none = [KINDS[number * number % 7 % 3] if number % 4 else None for number in range(len(lines))]
    (tmp_path / "labels.txt").write_text("\n".join(label or "" for label in labels_or_none) + "\n")
    folder = tiny_folder("Llama")

    def command(flags: list[str]) -> dict[str, pl.DataFrame]:
        common = ["select", folder, "--texts", str(tmp_path / "lines.jsonl"), "--device", "cpu"]
        output = run(*common, "--out", str(tmp_path / "out"), *flags)
        result, shell = pl.read_csv(tmp_path / "out" / "selection.csv"), " ".join(flags)
        selected = result.filter(pl.col("chosen")).row(0, named=True)
        ((_, *printed),) = tables(output)
        assert [row[:2] for row in printed] == [
            [rule, "" if layer is None else str(layer)] for rule, layer in result.select("rule", "layer").iter_rows()
        ]
        assert f"Layer {selected['layer']} of 4 of {Path(folder).name}, " in output
        assert f", by {selected['rule']}: " in " ".join(output.split())
        saved = [
            flag for flag in ("--norm none", "--pooling max", "--dtype float64", "--max-length 21") if flag in shell
        ]
        line = [
            "midlayer export",
            folder,
            "--layer",
            str(selected["layer"]),
            *saved,
            f"--out layer-{selected['layer']}",
        ]
        assert f"Export it: {' '.join(line)}\n" in output
        assert f"import LayerEncoder\nLayerEncoder({folder!r}, layer={selected['layer']}" in output
        return {"choices": result, "frame": pl.read_parquet(tmp_path / "out" / "frame.parquet")}

    def call(text_column: str = "body", labels: str | None = None, **options: Any) -> dict[str, pl.DataFrame]:
        own_options, other_options = split_options(options)
        encoder = LayerEncoder(folder, -1, device="cpu", **own_options)
        values = labels_or_none if labels is not None else None
        result = select(encoder, [row[text_column] for row in rows], values, **other_options)
        result.to_frame().write_csv(tmp_path / "expected.csv")
        return {"choices": pl.read_csv(tmp_path / "expected.csv"), "frame": result.frame}

    options = {
        "text_column": "title",
        "labels": str(tmp_path / "labels.txt"),
        "rule": "min-dataset-entropy",
        "max_texts": 17,
        "norm": "none",
    }
    options |= {"pooling": "max", "dtype": "float64", "max_length": 21, "seed": 3}
    check_every_option(command, call, options, plain={"text_column": "body", "all_rules": True}, check_each=check_each)
