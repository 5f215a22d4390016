"""Batches that are prepared ahead of ``encode``: the same vectors, and no thread afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import encoding
from midlayer_encoders.encoder.encoding import preparing_ahead
from midlayer_encoders.reading.batches import TextInputs

Folder = Callable[[str], str]
TEXTS = ["a text" + " longer" * (number % 5) + f" {number}" for number in range(23)]


def ours() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("midlayer-")]


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), 2, device="cpu", prompts={"query": "which? "})


@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}, {"batch_size": 64}, {"output_value": None}])
def test_every_batch_is_made_ahead_and_vectors_stay_the_same(
    options: dict[str, Any], encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"batch_size": 4, **options}
    expected = SentenceTransformer.encode(encoder, TEXTS, **given)
    threads: list[str] = []
    plain = TextInputs.__call__

    def noted(self: TextInputs, inputs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return plain(self, inputs)

    monkeypatch.setattr(TextInputs, "__call__", noted)
    with preparing_ahead(encoder, TEXTS, beside=True):
        found = SentenceTransformer.encode(encoder, TEXTS, **given)
    if options.get("output_value", "") is None:
        found, expected = ([one["sentence_embedding"] for one in rows] for rows in (found, expected))
    assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
    assert len(threads) == -(-len(TEXTS) // given["batch_size"]), "each once"
    assert all(name.startswith("midlayer-ahead") for name in threads) is (given["batch_size"] == 4)
    assert not ours()


@pytest.mark.parametrize("order", [None, list(range(22, -1, -1)), [0] * 23])
def test_an_order_that_is_not_known_or_another_changes_nothing(
    order: list[int] | None, encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encoder.encode(TEXTS, batch_size=4)
    monkeypatch.setattr(encoding, "encoding_order", lambda *_: order)
    with preparing_ahead(encoder, TEXTS, beside=True):
        assert np.array_equal(SentenceTransformer.encode(encoder, TEXTS, batch_size=4), expected)
    assert not ours()


def test_an_error_is_raised_and_leaves_no_thread(encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise LookupError("an odd text")

    monkeypatch.setattr(LayerEncoder, "_preprocess_texts", failing)
    with pytest.raises(LookupError, match="an odd text"), preparing_ahead(encoder, TEXTS, beside=True):
        SentenceTransformer.encode(encoder, TEXTS, batch_size=4)
    assert not ours()


def test_another_encoder_inside_the_call_is_not_mixed_up_with_it(encoder: LayerEncoder, tiny_folder: Folder) -> None:
    other = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    expected = other.encode(TEXTS[:5], batch_size=1)
    with preparing_ahead(encoder, TEXTS, beside=True):
        assert np.array_equal(other.encode(TEXTS[:5], batch_size=1), expected)
        features = encoder.preprocess(TEXTS[:2], prompt="another ")
    assert features["input_ids"].shape[0] == 2
