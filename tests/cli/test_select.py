"""``midlayer select`` from a shell."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from midlayer_encoders.cli import app
from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks.text_lists import read_texts
from tests.recipes.test_word_echo import save_causal
from tests.selection.test_select import KINDS, TEXTS
from tests.tasks.rows import write


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    texts, labels = tmp_path / "texts.txt", tmp_path / "labels.txt"
    texts.write_text("\n".join(TEXTS), encoding="utf8")
    labels.write_text("\n".join([*KINDS[:15], *[""] * 5]) + "\n", encoding="utf8")
    return texts, labels


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["select", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.long
def test_table_frame_and_figure(tiny_folder: Callable[[str], str], files: tuple[Path, Path], tmp_path: Path) -> None:
    texts, labels = files
    out = tmp_path / "out"
    output = run(
        tiny_folder("Llama"), "--texts", str(texts), "--labels", str(labels), "--device", "cpu", "--out", str(out)
    )
    table = pl.read_csv(out / "selection.csv")
    chosen = table.filter(pl.col("chosen")).row(0, named=True)
    assert chosen["rule"] == "auto"
    assert f"--layer {chosen['layer']} --out layer-{chosen['layer']}" in output
    assert "On 15 labeled texts" in output
    assert (
        "The model counts as a causal language model that was not tuned for embeddings: its files do not show" in output
    )
    assert set(pl.read_parquet(out / "frame.parquet")["kind"]) == {"score"}
    assert (out / "selection.png").stat().st_size > 10_000
    page = (out / "report.html").read_text()
    assert f"--layer {chosen['layer']} --out layer-{chosen['layer']}" in page
    assert "On 15 labeled texts" in page


def test_label_column_gives_the_labels_of_a_file_in_the_order_of_its_rows(
    tiny_folder: Callable[[str], str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    texts, labels = (path.read_text(encoding="utf8").splitlines() for path in files)
    rows = [{"review": text, "kind": label or None} for text, label in zip(texts, labels, strict=True)]
    table = write(tmp_path / "rows.jsonl", rows)
    common = ("--rule", "few-labels", "--device", "cpu", "--limit", "18", "--out")
    run(tiny_folder("Llama"), "--texts", str(files[0]), "--labels", str(files[1]), *common, str(tmp_path / "lines"))
    columns = ("--text-column", "review", "--label-column", "kind")
    run(tiny_folder("Llama"), "--texts", str(table), *columns, *common, str(tmp_path / "columns"))
    expected = pl.read_parquet(tmp_path / "lines/frame.parquet")
    assert pl.read_parquet(tmp_path / "columns/frame.parquet").equals(expected)
    with pytest.raises(OptionError, match="`--label-column` cannot be combined with `--labels`"):
        run("no/model", "--texts", str(table), *columns, "--labels", str(files[1]))


@pytest.mark.parametrize(("column", "expected"), [("label", True), ("topic", False)])
def test_select_names_the_label_column_that_it_does_not_read(
    column: str, expected: bool, tiny_folder: Callable[[str], str], tmp_path: Path
) -> None:
    table = write(tmp_path / "rows.csv", [{"text": text, column: "x"} for text in TEXTS])
    output = "".join(run(tiny_folder("Llama"), "--texts", str(table), "--device", "cpu").split())
    assert ("hasacolumnlabel,whichisnotread.Pass--label-columnlabel" in output) == expected


def test_invalid_rule_and_labels_are_refused_before_the_model_is_loaded(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    texts, labels = files
    with pytest.raises(OptionError, match="Did you mean 'auto'"):
        run("no/model", "--texts", str(texts), "--rule", "atuo")
    labels.write_text("a\nb\n", encoding="utf8")
    with pytest.raises(OptionError, match=r"a line for each of the 20 nonblank texts, but .* has 2"):
        run("no/model", "--texts", str(texts), "--labels", str(labels))
    with pytest.raises(OptionError, match="There is no file"):
        run("no/model", "--texts", str(texts), "--labels", str(tmp_path / "none"))


@pytest.mark.long
def test_recipes_print_the_code_of_the_encoder(
    tiny_folder: Callable[[str], str], files: tuple[Path, Path], tmp_path: Path
) -> None:
    texts, labels = files
    folder, out = tiny_folder("Llama"), tmp_path / "out"
    common = (folder, "--texts", str(texts), "--device", "cpu")
    output = run(*common, "--recipes", "plain,one-word+center", "--out", str(out))
    table = pl.read_csv(out / "selection.csv")
    assert table.filter("chosen")["recipe"].to_list() == ["one-word+center"], (
        "the default for a causal model without labels"
    )
    layer = table.filter("chosen")["layer"].item()
    center = out / "center.txt"
    assert center.read_text(encoding="utf8").splitlines() == TEXTS
    _, imports, line = output[output.index("In Python:") :].splitlines()[:3]
    expected = f"LayerEncoder({folder!r}, layer={layer}, recipe='one-word+center', center=read_texts({str(center)!r}))"
    assert line == f'{expected}.save_pretrained("layer-{layer}")'
    assert f"--recipe one-word+center --center {shlex.quote(str(center))} --out layer-{layer}" in output
    namespace: dict[str, Any] = {}
    exec(imports, namespace)
    assert eval(expected, namespace).layer == layer
    scored = run(*common, "--labels", str(labels), "--recipes", "plain", "--template", 'a "{text}" is:"')
    assert "15 labeled texts" in scored
    assert "yours" in scored
    with pytest.raises(OptionError, match="`--out` must be given with a table"):
        run("no/model", "--texts", str(tmp_path / "rows.csv"), "--recipes", "plain+center")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": f"{text}\n{text}"}) for text in TEXTS), encoding="utf8")
    two_lines = ("--texts", str(rows), "--text-column", "text", "--out", str(out))
    run(folder, *two_lines, "--recipes", "plain+center", "--device", "cpu")
    assert read_texts(center) == [f"{text} {text}" for text in TEXTS], "a text is a line"


@pytest.mark.parametrize(("suffix", "options"), [("jsonl", ()), ("txt", ("--max-texts", "18")), ("txt", ())])
def test_default_says_where_the_texts_that_it_centers_on_are(
    suffix: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    folder = save_causal("byte level", tmp_path / "model")
    texts = tmp_path / f"texts.{suffix}"
    lines = TEXTS if suffix == "txt" else [json.dumps({"text": text}) for text in TEXTS]
    texts.write_text("\n".join(lines) + "\n", encoding="utf8")
    output = run(folder, "--texts", str(texts), "--device", "cpu", *options)
    is_whole_file = suffix == "txt" and not options
    center = shlex.quote(str(texts)) if is_whole_file else "center.txt"
    assert f"--recipe word-echo+center --center {center} --out layer-5" in output
    assert ("Pass --out FOLDER to store center.txt" in output) != is_whole_file
