"""Prompts reach the texts: what a sweep stores is what sentence-transformers itself encodes under that prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.store import EmbeddingStore, list_stores, text_key
from tests.others_warnings import MTEB
from tests.sweeping.scoring import QUICK, near, ranks, scores, sweep
from tests.tasks.rows import ROWS, SENTENCES

Folder = Callable[[str], str]
pytestmark = MTEB

PROMPTS = {"query": "find: ", "document": "a text: ", "plain": "say "}


def layer_2(tiny_folder: Folder, folder: Path, prompts: dict[str, str] = PROMPTS) -> SentenceTransformer:
    """Return layer 2 with prompts, saved and loaded by sentence-transformers alone."""
    options: dict[str, Any] = {"prompts": prompts, "default_prompt_name": "plain", "device": "cpu"}
    LayerEncoder(tiny_folder("Llama"), 2, **options).save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def swept(tiny_folder: Folder, task: Path, out: Path, **options: Any) -> dict[int, float]:
    given = {"prompts": PROMPTS, "default_prompt_name": "plain"} | options
    return scores(sweep(tiny_folder("Llama"), task, layers=[2], out=out, **given, **QUICK), task)


def stored(out: Path) -> EmbeddingStore:
    """Open the one store in a sweep's folder."""
    (info,) = list_stores(out / "embeddings")
    return EmbeddingStore(out / "embeddings", key=info.key, layers=info.layers, dim=info.dim)


def cosine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("document", "a text: "),
        ("passage", ""),  # sentence-transformers gives every model an empty prompt for documents, which goes before it
    ],
)
def test_queries_and_documents_are_encoded_under_their_own_prompts(
    name: str, used: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"query": "find: ", name: "a text: ", "plain": "say "}
    model = layer_2(tiny_folder, tmp_path / "layer-2", prompts)
    found = swept(tiny_folder, ranks(tmp_path), tmp_path / "out", prompts=prompts)[2]
    query = dict(zip(SENTENCES, model.encode_query(SENTENCES), strict=True))
    document = dict(zip(SENTENCES, model.encode_document(SENTENCES), strict=True))
    precisions = []
    for row in ROWS["Reranking"]:
        right, *wrong = (cosine(query[row["query"]], document[text]) for text in (*row["positive"], *row["negative"]))
        precisions.append(1 / (1 + sum(other > right for other in wrong)))
    assert found == pytest.approx(np.mean(precisions), abs=1e-3)
    store = stored(tmp_path / "out")
    queries = [row["query"] for row in ROWS["Reranking"]]
    passages = sorted({text for row in ROWS["Reranking"] for text in row["positive"] + row["negative"]})
    for prompt, texts, encoded in (("find: ", queries, query), (used, passages, document)):
        vectors = store.read(2, [text_key(text, prompt) for text in texts])
        np.testing.assert_allclose(vectors, [encoded[text] for text in texts], atol=1e-5)
    assert len(store) == len(set(queries)) + len(passages)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "say "),  # the default, which is neither for queries nor for documents
        ({"default_prompt_name": None}, ""),
        ({"prompts": {**PROMPTS, "STS": "alike? "}}, "alike? "),  # the type of the task goes before the default
    ],
)
def test_plain_texts_are_encoded_under_the_default_or_the_task_s_own(
    options: dict[str, Any], prompt: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    swept(tiny_folder, near(tmp_path), tmp_path / "out", **options)
    texts = sorted({row[side] for row in ROWS["STS"] for side in ("sentence1", "sentence2")})
    store = stored(tmp_path / "out")
    assert len(store) == len(texts)
    vectors = store.read(2, [text_key(text, prompt) for text in texts])
    np.testing.assert_allclose(
        vectors, layer_2(tiny_folder, tmp_path / "layer-2").encode(texts, prompt=prompt), atol=1e-5
    )


def test_a_sweep_takes_the_prompts_that_a_folder_keeps(tiny_folder: Folder, tmp_path: Path) -> None:
    model = layer_2(tiny_folder, tmp_path / "layer-2")
    sweep(str(tmp_path / "layer-2"), ranks(tmp_path), layers=[2], out=tmp_path / "out", **QUICK)
    queries = sorted({row["query"] for row in ROWS["Reranking"]})
    passages = sorted({text for row in ROWS["Reranking"] for text in row["positive"] + row["negative"]})
    store = stored(tmp_path / "out")
    for name, texts, encode in (("query", queries, model.encode_query), ("document", passages, model.encode_document)):
        vectors = store.read(2, [text_key(text, PROMPTS[name]) for text in texts])
        np.testing.assert_allclose(vectors, encode(texts), atol=1e-5)
