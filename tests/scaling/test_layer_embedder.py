"""Columns of vectors that are added to batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, OptionError
from midlayer_encoders.extras.scaling import LayerEmbedder
from midlayer_encoders.reading.media_inputs import InputError
from tests.support.tiny_folders import TEXTS

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
        ({"body": ["a"]}, "`text_column` must be one of body, but got 'text'"),
        ({"texts": ["a"]}, "Did you mean 'texts'"),
        ({"text": ["a", None]}, r"`text\[1\]` must be"),
        ({"text": ["a", 3]}, r"`text\[1\]` must be"),
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
