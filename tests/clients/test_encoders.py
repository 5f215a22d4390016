"""Libraries that take a SentenceTransformer get the layer's vectors, from an encoder and from an exported folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from tests.clients.installed import CLIENTS, client

pytestmark = CLIENTS

TEXTS = [
    f"{who} {what}"
    for who in ("the cat", "a dog", "my card", "stock prices")
    for what in ("sat on the mat", "ran home", "was lost", "fell today")
]
LABELS = [place // 8 for place in range(16)]


@pytest.fixture(params=["encoder", "folder"])
def given(request: pytest.FixtureRequest, encoder: LayerEncoder, tmp_path: Path) -> LayerEncoder | str:
    """Return what a client is given: the encoder, or the path of the folder that it exports."""
    if request.param == "encoder":
        return encoder
    encoder.save_pretrained(str(tmp_path / "exported"))
    return str(tmp_path / "exported")


@pytest.fixture(params=["final", "none"])
def encoder(request: pytest.FixtureRequest, tiny_folder: Callable[[str], str]) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), 2, norm=request.param, device="cpu")


def assert_same(actual: Any, encoder: LayerEncoder, texts: list[str] = TEXTS) -> None:
    np.testing.assert_allclose(np.asarray(actual), encoder.encode(texts), rtol=1e-5, atol=1e-6)


def test_bertopic(given: Any, encoder: LayerEncoder) -> None:
    client("bertopic")
    from bertopic import BERTopic
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA

    def parts() -> dict[str, Any]:
        return {"umap_model": PCA(2, random_state=0), "hdbscan_model": KMeans(3, n_init=1, random_state=0)}

    model = BERTopic(embedding_model=given, **parts())
    topics, _ = model.fit_transform(TEXTS)
    # Of a model that it does not recognize it says nothing, and embeds with another.
    assert_same(model.embedding_model.embed(TEXTS), encoder)
    expected, _ = BERTopic(**parts()).fit_transform(TEXTS, embeddings=encoder.encode(TEXTS))
    assert topics == expected
    assert len(set(topics)) == 3


def test_keybert(given: Any, encoder: LayerEncoder) -> None:
    client("keybert")
    from keybert import KeyBERT
    from sklearn.metrics.pairwise import cosine_similarity

    model = KeyBERT(given)
    assert_same(model.model.embed(TEXTS), encoder)
    actual = dict(model.extract_keywords(TEXTS[0], top_n=5))
    words = sorted(actual)
    assert words == ["cat", "mat", "sat"]
    expected = cosine_similarity(encoder.encode([TEXTS[0]]), encoder.encode(words))[0]
    assert [actual[word] for word in words] == pytest.approx(expected, abs=1e-4)  # it rounds


def test_setfit(given: Any, encoder: LayerEncoder, tmp_path: Path) -> None:
    client("setfit")
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments
    from sklearn.linear_model import LogisticRegression

    if isinstance(given, str):
        model = SetFitModel.from_pretrained(given, device="cpu")
    else:
        model = SetFitModel(model_body=given, model_head=LogisticRegression())
    before = encoder.encode(TEXTS)
    assert_same(model.encode(TEXTS), encoder)
    model.fit(TEXTS, LABELS, num_epochs=1)
    head = LogisticRegression().fit(before, LABELS)
    np.testing.assert_allclose(model.predict_proba(TEXTS), head.predict_proba(before), atol=1e-5)
    assert model.predict(TEXTS).tolist() == head.predict(before).tolist()

    arguments = TrainingArguments(str(tmp_path / "run"), max_steps=2, batch_size=4, report_to="none")
    Trainer(model, arguments, train_dataset=Dataset.from_dict({"text": TEXTS, "label": LABELS})).train()
    assert not np.allclose(model.encode(TEXTS), before, rtol=0, atol=1e-5)  # trained in place
    model.save_pretrained(str(tmp_path / "trained"))
    loaded = SetFitModel.from_pretrained(str(tmp_path / "trained"), device="cpu")
    np.testing.assert_allclose(loaded.encode(TEXTS), model.encode(TEXTS), rtol=1e-5, atol=1e-6)
    assert loaded.predict(TEXTS).tolist() == model.predict(TEXTS).tolist()


def test_langchain(given: Any, encoder: LayerEncoder, tmp_path: Path) -> None:
    client("langchain_huggingface", "langchain-huggingface")
    from langchain_core.vectorstores import InMemoryVectorStore
    from langchain_huggingface import HuggingFaceEmbeddings

    folder = given
    if not isinstance(given, str):  # it takes a name alone, and makes the model itself
        folder = str(tmp_path / "other")
        LayerEncoder(encoder.source, 1, device="cpu").save_pretrained(folder)
    embeddings = HuggingFaceEmbeddings(model_name=folder, model_kwargs={"device": "cpu"})
    if not isinstance(given, str):
        embeddings._client = given
    assert_same(embeddings.embed_documents(TEXTS), encoder)
    assert_same([embeddings.embed_query(TEXTS[3])], encoder, TEXTS[3:4])
    store = InMemoryVectorStore(embeddings)
    store.add_texts(TEXTS)
    assert [actual.page_content for actual in store.similarity_search(TEXTS[5], k=1)] == TEXTS[5:6]


def test_faiss(given: Any, encoder: LayerEncoder) -> None:
    faiss = client("faiss", "faiss-cpu")
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(given, device="cpu") if isinstance(given, str) else given
    vectors = model.encode(TEXTS, normalize_embeddings=True)
    index = faiss.IndexFlatIP(model.get_embedding_dimension())
    index.add(vectors)  # contiguous, in float32, as it wants them
    scores, actual = index.search(model.encode(["a cat sat"], normalize_embeddings=True), 5)
    similarity = encoder.similarity(encoder.encode(["a cat sat"]), encoder.encode(TEXTS))
    best = torch.topk(similarity, 5)
    np.testing.assert_allclose(scores, best.values, atol=1e-5)
    assert actual.tolist() == best.indices.tolist()
