"""Prompts reach the texts: a sweep stores the vectors that sentence-transformers encodes with that prompt."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.sweeping.mteb_jobs import Prompts, quiet_mteb
from midlayer_encoders.sweeping.store import EmbeddingStore, text_key
from midlayer_encoders.tasks import resolve_tasks
from tests.store.listing import list_stores
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, layer_scores_of, sweep, write_reranking_task, write_sts_task
from tests.tasks.rows import ROWS, SENTENCES

pytestmark = MTEB

PROMPTS = {"query": "find: ", "document": "a text: ", "plain": "say "}


def save_layer_2(tiny_folder: Folder, folder: Path, prompts: dict[str, str] = PROMPTS) -> SentenceTransformer:
    """Return layer 2 with prompts, saved and loaded by sentence-transformers only."""
    options: dict[str, Any] = {"prompts": prompts, "default_prompt_name": "plain", "device": "cpu"}
    LayerEncoder(tiny_folder("Llama"), 2, **options).save_pretrained(str(folder))
    return SentenceTransformer(str(folder), device="cpu")


def sweep_layer_2(tiny_folder: Folder, task: Path, out: Path, **options: Any) -> dict[int, float]:
    prompt_options = {"prompts": PROMPTS, "default_prompt_name": "plain"} | options
    return layer_scores_of(sweep(tiny_folder("Llama"), task, layers=[2], out=out, **prompt_options, **QUICK), task)


def open_store(out: Path) -> EmbeddingStore:
    """Open the only store in a sweep's folder."""
    (info,) = list_stores(out / "embeddings")
    return EmbeddingStore(out / "embeddings", key=info.key, layers=info.layers, dim=info.dim)


def cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left * right).sum(-1) / np.linalg.norm(left, axis=-1) / np.linalg.norm(right, axis=-1)


@pytest.mark.parametrize(
    ("name", "expected_prompt"),
    [
        ("document", "a text: "),
        ("passage", ""),  # sentence-transformers adds an empty document prompt, which takes precedence
    ],
)
def test_queries_and_documents_are_encoded_with_their_own_prompts(
    name: str, expected_prompt: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    prompts = {"query": "find: ", name: "a text: ", "plain": "say "}
    model = save_layer_2(tiny_folder, tmp_path / "layer-2", prompts)
    score = sweep_layer_2(tiny_folder, write_reranking_task(tmp_path), tmp_path / "out", prompts=prompts)[2]
    query = dict(zip(SENTENCES, model.encode_query(SENTENCES), strict=True))
    document = dict(zip(SENTENCES, model.encode_document(SENTENCES), strict=True))
    precisions = []
    for row in ROWS["Reranking"]:
        positive, *negatives = (
            cosine(query[row["query"]], document[text]) for text in (*row["positive"], *row["negative"])
        )
        precisions.append(1 / (1 + sum(negative > positive for negative in negatives)))
    assert score == pytest.approx(np.mean(precisions), abs=1e-3)
    store = open_store(tmp_path / "out")
    queries = [row["query"] for row in ROWS["Reranking"]]
    passages = sorted({text for row in ROWS["Reranking"] for text in row["positive"] + row["negative"]})
    for prompt, texts, encoded in (("find: ", queries, query), (expected_prompt, passages, document)):
        vectors = store.read(2, [text_key(text, prompt) for text in texts])
        np.testing.assert_allclose(vectors, [encoded[text] for text in texts], atol=1e-5)
    assert len(store) == len(set(queries)) + len(passages)


@pytest.mark.parametrize(
    ("options", "prompt"),
    [
        ({}, "say "),  # the default, neither a query nor a document prompt
        ({"default_prompt_name": None}, ""),
        ({"prompts": {**PROMPTS, "STS": "alike? "}}, "alike? "),  # the task type takes precedence over the default
    ],
)
def test_plain_texts_are_encoded_with_the_default_or_task_prompt(
    options: dict[str, Any], prompt: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    sweep_layer_2(tiny_folder, write_sts_task(tmp_path), tmp_path / "out", **options)
    texts = sorted({row[side] for row in ROWS["STS"] for side in ("sentence1", "sentence2")})
    store = open_store(tmp_path / "out")
    assert len(store) == len(texts)
    vectors = store.read(2, [text_key(text, prompt) for text in texts])
    np.testing.assert_allclose(
        vectors, save_layer_2(tiny_folder, tmp_path / "layer-2").encode(texts, prompt=prompt), atol=1e-5
    )


def test_sweep_uses_the_saved_prompts_of_a_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    model = save_layer_2(tiny_folder, tmp_path / "layer-2")
    sweep(str(tmp_path / "layer-2"), write_reranking_task(tmp_path), layers=[2], out=tmp_path / "out", **QUICK)
    queries = sorted({row["query"] for row in ROWS["Reranking"]})
    passages = sorted({text for row in ROWS["Reranking"] for text in row["positive"] + row["negative"]})
    store = open_store(tmp_path / "out")
    for name, texts, encode in (("query", queries, model.encode_query), ("document", passages, model.encode_document)):
        vectors = store.read(2, [text_key(text, PROMPTS[name]) for text in texts])
        np.testing.assert_allclose(vectors, encode(texts), atol=1e-5)


@pytest.mark.parametrize("name", ["document", "passage", "corpus"])
def test_prompt_of_documents_is_chosen_as_encode_document_chooses_it(
    name: str, tiny_folder: Folder, tmp_path: Path
) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu")
    encoder.prompts = {"query": "find: ", name: "a text: "}
    (task,) = resolve_tasks(write_reranking_task(tmp_path))
    with quiet_mteb():  # which warns of names that it does not know
        prompt = Prompts(encoder).choose(task.metadata, PromptType.document)
    assert prompt == "a text: "
    np.testing.assert_array_equal(encoder.encode(SENTENCES[:2], prompt=prompt), encoder.encode_document(SENTENCES[:2]))
