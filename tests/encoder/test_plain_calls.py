"""Every form of a call returns the same as a plain SentenceTransformer over the same modules."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from tests.support.families import tiny
from tests.support.tiny_folders import TEXTS, Folder, save_joint, tokenizer

_PROMPTS = {"query": "find: ", "document": "text: "}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"convert_to_tensor": True},
    {"convert_to_numpy": False},
    {"convert_to_tensor": True, "normalize_embeddings": True},
    {"output_value": "token_embeddings"},
    {"output_value": None},
    {"precision": "int8"},
    {"precision": "ubinary", "convert_to_tensor": True},
    {"precision": "binary", "convert_to_numpy": False},
    {"prompt": "say: "},
    {"prompt_name": "query", "output_value": "token_embeddings"},
    {"truncate_dim": 8, "convert_to_tensor": True},
    {"batch_size": 2, "show_progress_bar": False, "device": "cpu"},
]


def make_plain(encoder: LayerEncoder) -> SentenceTransformer:
    """Return sentence-transformers' own class over the modules of an encoder."""
    return SentenceTransformer(modules=list(encoder), device="cpu", prompts=encoder.prompts)


def assert_same(actual: Any, expected: Any) -> None:
    """Raise unless both are equal in type, dtype, shape and every value, including nested lists and dictionaries."""
    assert type(actual) is type(expected)
    if isinstance(expected, list):
        assert len(actual) == len(expected)
        for actual_item, expected_item in zip(actual, expected, strict=True):
            assert_same(actual_item, expected_item)
    elif isinstance(expected, dict):
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(actual[key], value)
    elif isinstance(expected, np.ndarray | torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert bool((actual == expected).all())
        if isinstance(expected, torch.Tensor):
            assert actual.device == expected.device
    else:
        assert actual == expected


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("GPTNeoX"), 2, device="cpu", prompts=_PROMPTS)


@pytest.mark.filterwarnings("ignore:Computing .* quantization buckets")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    "inputs", [[], TEXTS, TEXTS[0], tuple(TEXTS), (), np.array(TEXTS)], ids=lambda inputs: type(inputs)
)
def test_encode(inputs: Any, options: dict[str, Any], encoder: LayerEncoder) -> None:
    expected = _outcome(make_plain(encoder).encode, inputs, options)
    assert_same(_outcome(encoder.encode, inputs, options), expected)


@pytest.mark.parametrize("series", [pd.Series(TEXTS, index=range(7, 7 + len(TEXTS))), pl.Series(TEXTS)], ids=type)
def test_column_of_a_data_frame_is_a_batch(series: Any, encoder: LayerEncoder) -> None:
    assert_same(encoder.encode(series), encoder.encode(TEXTS))
    assert_same(encoder.encode_layers(series, layers=[1]), encoder.encode_layers(TEXTS, layers=[1]))


def _outcome(encode: Callable[..., Any], inputs: Any, options: dict[str, Any]) -> Any:
    """Return the vectors or the error message.

    Some precisions refuse a single vector, and sentence-transformers 6.0.0 refuses more than four texts without `output_value`.
    """
    try:
        return encode(inputs, **options)
    except (ValueError, IndexError) as error:
        return str(error)


@pytest.mark.parametrize("method", ["encode_query", "encode_document"])
@pytest.mark.parametrize("inputs", [[], TEXTS, TEXTS[0]], ids=["none", "many", "one"])
def test_encode_by_role(inputs: Any, method: str, encoder: LayerEncoder) -> None:
    assert_same(getattr(encoder, method)(inputs), getattr(make_plain(encoder), method)(inputs))


def test_text_pairs(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 2, device="cpu")
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[2], TEXTS[3])]
    vectors = encoder.encode(pairs)
    assert_same(vectors, make_plain(encoder).encode(pairs))
    assert abs(vectors[0] - encoder.encode(TEXTS[0])).max() > 1e-3  # the second text counts


def test_dataset_column(encoder: LayerEncoder) -> None:
    from datasets import Dataset

    column = Dataset.from_dict({"text": TEXTS})["text"]
    assert_same(encoder.encode(column), make_plain(encoder).encode(column))


def test_empty_list_is_validated_like_any_other(encoder: LayerEncoder) -> None:
    for options in ({"prompt_name": "unknown"}, {"precision": "int7"}, {"unknown": 1}):
        with pytest.raises(ValueError) as expected:
            make_plain(encoder).encode([], **options)
        with pytest.raises(ValueError) as actual:
            encoder.encode([], **options)
        assert str(actual.value).replace("LayerEncoder", "SentenceTransformer") == str(expected.value)


def make_other_encoders(folder: Folder, root: Any) -> Iterator[LayerEncoder]:
    yield LayerEncoder(folder("ViT"), 1, device="cpu")
    yield LayerEncoder(folder("Wav2Vec2"), 1, device="cpu")
    yield LayerEncoder(save_joint("CLIP", root), 1, device="cpu")
    yield LayerEncoder.from_module(tiny("Llama"), 1, processor=tokenizer(), medium="text", device="cpu")


def test_empty_list_gives_the_same_in_every_medium(tiny_folder: Folder, tmp_path: Any) -> None:
    for encoder in make_other_encoders(tiny_folder, tmp_path):
        for options in OPTIONS:
            if "prompt_name" not in options:
                assert_same(encoder.encode([], **options), make_plain(encoder).encode([], **options))
