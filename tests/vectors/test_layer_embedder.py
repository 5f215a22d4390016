"""Columns of vectors that are added to batches, the plan of parquet files, and calls that are refused without Ray."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import midlayer_encoders.extras.vectors as room
from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.extras.vectors.parquet_parts import PartWriter, plan_parts
from midlayer_encoders.extras.vectors.ray import LayerEmbedder, embed_parquet, quiet_cluster
from midlayer_encoders.processes.group import ProcessLostError
from midlayer_encoders.reading.media_inputs import InputError
from tests.cli.calls import run
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


def batch(kind: str) -> Any:
    columns = {"id": np.arange(len(TEXTS)), "body": np.array(TEXTS, dtype=object)}
    return {"dict": dict, "pandas": pd.DataFrame, "pyarrow": pa.table}[kind](columns)


@pytest.mark.parametrize("kind", ["dict", "pandas", "pyarrow"])
def test_a_batch_gets_a_column_for_each_layer(kind: str, encoder: LayerEncoder) -> None:
    embed = LayerEmbedder(encoder, layers=[-1, 0, 0.5], text_column="body", prompt="ask: ")
    source = batch(kind)
    result = embed(source)
    assert type(result) is type(source)
    names = result.column_names if kind == "pyarrow" else list(result)
    assert names == ["id", "body", "layer_0", "layer_2", "layer_4"]
    assert len(source if kind == "dict" else source.columns) == 2  # the batch is not changed
    expected = encoder.encode_layers(TEXTS, [0, 2, 4], prompt="ask: ")
    for name, vectors in zip(names[2:], expected, strict=True):
        rows = result[name].to_pylist() if kind == "pyarrow" else list(result[name])
        np.testing.assert_array_equal(np.array(rows, dtype=np.float32), vectors)
    if kind == "pyarrow":
        assert result.schema.field("layer_2").type == pa.list_(pa.float32(), 32)
    if kind == "dict":
        assert result["layer_2"].dtype == np.float32


def test_prompts_and_options_are_those_of_the_encoder(tiny_folder: Folder) -> None:
    options = {"norm": "none", "pooling": "last", "device": "cpu", "prompts": {"query": "q: "}}
    embed = LayerEmbedder(tiny_folder("Llama"), layers=[2], prompt_name="query", **options)
    expected = LayerEncoder(tiny_folder("Llama"), -1, **options).encode_layers(TEXTS, [2], prompt_name="query")
    np.testing.assert_array_equal(embed({"text": TEXTS})["layer_2"], expected[0])


def test_an_empty_batch_has_empty_columns(encoder: LayerEncoder) -> None:
    assert LayerEmbedder(encoder)({"text": np.array([], dtype=object)})["layer_4"].shape == (0, 32)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"body": ["a"]}, "`text_column` must be a column of the batch, but got 'text'; it has 'body'"),
        ({"texts": ["a"]}, "Did you mean 'texts'"),
        ({"text": ["a", None]}, r"`text\[1\]` must be"),
        ({"text": ["a", 3]}, r"`text\[1\]` must be"),
        ({"text": ["a"], "layer_3": [0]}, "must not add the column 'layer_3'"),
    ],
)
def test_invalid_batches_are_refused(columns: dict[str, Any], message: str, encoder: LayerEncoder) -> None:
    with pytest.raises(OptionError, match=message):
        LayerEmbedder(encoder)(columns)


def test_invalid_embedders_are_refused(tiny_folder: Folder, encoder: LayerEncoder) -> None:
    with pytest.raises(LayerIndexError):
        LayerEmbedder(encoder, layers=[9])
    with pytest.raises(InputError, match="but got a text"):
        LayerEmbedder(tiny_folder("ViT"), device="cpu")


def test_the_module_does_not_import_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(room, "ray", room.ray)  # restored, like the module
    monkeypatch.delitem(sys.modules, "midlayer_encoders.extras.vectors.ray")
    importlib.import_module("midlayer_encoders.extras.vectors.ray")


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


def test_parts_cover_the_rows_of_all_files_once_and_in_order(tmp_path: Path, encoder: LayerEncoder) -> None:
    texts = [f"text {number}" for number in range(25)]
    write(tmp_path / "b.parquet", {"text": texts[10:], "id": range(10, 25)}, row_group_size=4)
    write(tmp_path / "a.parquet", {"text": texts[:10], "id": range(10)}, row_group_size=7)
    parts = plan_parts(tmp_path, "text", 6, None)
    assert [(Path(part.file).stem, part.start, part.count, part.first) for part in parts] == [
        ("a", 0, 6, 0), ("a", 6, 4, 6), ("b", 0, 6, 10), ("b", 6, 6, 16), ("b", 12, 3, 22),
    ]  # fmt: skip
    assert [part.count for part in plan_parts(tmp_path, "text", 6, 13)] == [6, 4, 3]
    writer = PartWriter(lambda: LayerEmbedder(encoder, layers=[1]), tmp_path / "out", Path.cwd(), "run")
    folders = {writer.write(part) for part in parts}
    tables = [parquet.read_table(next(iter(folders)) / part.name) for part in parts]
    assert len(folders) == 1
    assert [row for table in tables for row in table["id"].to_pylist()] == list(range(25))
    expected = np.concatenate(
        [encoder.encode_layers(texts[part.first : part.first + part.count], [1])[0] for part in parts]
    )
    vectors = np.array([row for table in tables for row in table["layer_1"].to_pylist()], dtype=np.float32)
    np.testing.assert_array_equal(vectors, expected)


def test_a_complete_part_is_not_embedded_again_and_a_damaged_one_is(tmp_path: Path, encoder: LayerEncoder) -> None:
    [part] = plan_parts(write(tmp_path / "a.parquet", {"text": TEXTS}), "text", 6, None)
    embedder = LayerEmbedder(encoder, layers=[1])
    path = PartWriter(lambda: embedder, tmp_path / "out", Path.cwd(), "run").write(part) / part.name
    content = path.read_bytes()
    modified = path.stat().st_mtime_ns
    PartWriter(lambda: embedder, tmp_path / "out", Path.cwd(), "run").write(part)
    assert path.stat().st_mtime_ns == modified
    path.write_bytes(content[:-100])
    PartWriter(lambda: embedder, tmp_path / "out", Path.cwd(), "run").write(part)
    assert path.read_bytes() == content
    assert [file.name for file in path.parent.iterdir()] == [part.name]


def test_texts_that_end_their_process_are_not_tried_forever(tmp_path: Path, encoder: LayerEncoder) -> None:
    [part] = plan_parts(write(tmp_path / "a.parquet", {"text": TEXTS}), "text", 6, None)
    writer = PartWriter(lambda: LayerEmbedder(encoder), tmp_path, Path.cwd(), "run")
    attempts = [writer._attempt(part) for _ in range(3)]
    for attempt in attempts:
        attempt.__enter__()  # and the process is killed
    result = writer({name: np.array([value]) for name, value in vars(part).items()})
    assert b"Rows 0 to 5 of" in result["error"][0]
    assert b"ended their process 3 times" in result["error"][0]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"body": ["a"]}, {}, "`text_column` must be a column of"),
        ({"text": [3]}, {}, "`text_column` must be a column of texts, but 'text' of .* has the type int64"),
        ({"text": pa.array([], pa.string())}, {}, "`source` must hold texts"),
        ({"text": ["a"]}, {"out": "vectors.npy"}, "`out` must be a new folder with Ray.*Name it 'vectors'"),
        ({"text": ["a"]}, {"out": "taken"}, "`out` must be a new or empty folder with Ray"),
        ({"text": ["a"]}, {"source": "lines.txt"}, "`source` must be a parquet file or a folder of .parquet files"),
        ({"text": ["a"]}, {"source": "broken"}, "`source` must be readable parquet"),
        ({"text": ["a"]}, {"source": "mixed"}, "must hold files with the same columns"),
        ({"text": ["a"]}, {"batch_size": 0}, "`batch_size` must be"),
        ({"text": ["a"]}, {"concurrency": 0}, "`concurrency` must be"),
        ({"text": ["a"]}, {}, "pip install 'midlayer-encoders\\[ray\\]'"),
    ],
)
def test_invalid_jobs_are_refused_before_ray_starts(
    columns: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for name in ("taken", "broken", "mixed"):
        (tmp_path / name).mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "lines.txt").touch()
    (tmp_path / "broken" / "a.parquet").write_text("text")
    write(tmp_path / "mixed" / "a.parquet", {"text": ["a"]})
    write(tmp_path / "mixed" / "b.parquet", {"text": ["a"], "id": [3]})
    source = write(tmp_path / "texts.parquet", columns)
    out = tmp_path / options.pop("out", "out")
    source = tmp_path / options.pop("source", source.name)
    with pytest.raises(OptionError, match=message):
        embed_parquet("MODEL", source, out, **options)
    assert not (tmp_path / "out.part").exists()


def test_a_cluster_that_does_not_answer_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    stopped = SimpleNamespace(is_initialized=lambda: False)
    with pytest.raises(ProcessLostError, match=r"RAY_ADDRESS=127\.0\.0\.1:1 cannot be reached"), quiet_cluster(stopped):
        pass


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--images", "photos"], "`--images` must be left out with --ray"),
        (["--texts", "t.parquet", "--devices", "2"], "`--devices` must be left out with --ray: use --concurrency"),
        (["--audio", "waves"], "`--audio` must be left out with --ray"),
    ],
)
def test_flags_without_effect_are_refused_with_ray(flags: list[str], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run("embed", "MODEL", "--ray", "--out", "out", *flags)


def test_flags_of_ray_are_refused_without_it() -> None:
    for flag in ("--concurrency", "--batch-size"):
        with pytest.raises(OptionError, match=f"`{flag}` must be left out without --ray"):
            run("embed", "MODEL", "--texts", "t.parquet", "--out", "v.npy", flag, "3")
