"""``encode`` prepares batches ahead of time: the vectors are the same, and no thread is left afterwards."""

import threading
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder import encoding
from midlayer_encoders.encoder.encoding import BatchPrefetch
from midlayer_encoders.reading.batches import TextInputs
from tests.support.tiny_folders import Folder

TEXTS = ["a text" + " longer" * (number % 5) + f" {number}" for number in range(23)]


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("midlayer-")]


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), 2, device="cpu", prompts={"query": "which? "})


@pytest.mark.parametrize("options", [{}, {"prompt_name": "query"}, {"batch_size": 64}, {"output_value": None}])
def test_batches_are_prepared_ahead_and_vectors_stay_the_same(
    options: dict[str, Any], encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    kwargs = {"batch_size": 4, **options}
    expected = SentenceTransformer.encode(encoder, TEXTS, **kwargs)
    threads: list[str] = []
    original_call = TextInputs.__call__

    def recording_call(self: TextInputs, inputs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original_call(self, inputs)

    monkeypatch.setattr(TextInputs, "__call__", recording_call)
    with BatchPrefetch(encoder, TEXTS, in_background=True).running():
        vectors = SentenceTransformer.encode(encoder, TEXTS, **kwargs)
    if options.get("output_value", "") is None:
        vectors, expected = ([row["sentence_embedding"] for row in rows] for rows in (vectors, expected))
    assert all(np.array_equal(vector, reference) for vector, reference in zip(vectors, expected, strict=True))
    assert len(threads) == -(-len(TEXTS) // kwargs["batch_size"]), "each batch is prepared once"
    assert all(name.startswith("midlayer-ahead") for name in threads) is (kwargs["batch_size"] == 4)
    assert not our_threads()


@pytest.mark.parametrize("order", [None, list(range(22, -1, -1)), [0] * 23])
def test_unknown_or_different_order_does_not_change_the_vectors(
    order: list[int] | None, encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = encoder.encode(TEXTS, batch_size=4)
    monkeypatch.setattr(encoding, "encoding_order", lambda *_: order)
    with BatchPrefetch(encoder, TEXTS, in_background=True).running():
        assert np.array_equal(SentenceTransformer.encode(encoder, TEXTS, batch_size=4), expected)
    assert not our_threads()


def test_error_while_preparing_is_raised_and_leaves_no_thread(
    encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise LookupError("an odd text")

    monkeypatch.setattr(encoding, "_preprocess_texts", failing)
    with pytest.raises(LookupError, match="an odd text"), BatchPrefetch(encoder, TEXTS, in_background=True).running():
        SentenceTransformer.encode(encoder, TEXTS, batch_size=4)
    assert not our_threads()


def test_another_encoder_inside_the_call_is_independent(encoder: LayerEncoder, tiny_folder: Folder) -> None:
    other_encoder = LayerEncoder(tiny_folder("BERT"), 1, device="cpu")
    expected = other_encoder.encode(TEXTS[:5], batch_size=1)
    with BatchPrefetch(encoder, TEXTS, in_background=True).running():
        assert np.array_equal(other_encoder.encode(TEXTS[:5], batch_size=1), expected)
        features = encoder.preprocess(TEXTS[:2], prompt="another ")
    assert features["input_ids"].shape[0] == 2
