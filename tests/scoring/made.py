"""Small tasks of mteb's types with unusual data, and a model of a few layers that needs no network."""

import zlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from datasets import Dataset, DatasetDict
from mteb.abstasks import (
    AbsTask,
    AbsTaskClassification,
    AbsTaskClustering,
    AbsTaskPairClassification,
    AbsTaskRetrieval,
    AbsTaskSTS,
)
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.models.model_meta import ModelMeta, ScoringFunction
from mteb.results import TaskResult
from sentence_transformers.util import SimilarityFunction

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.sweeping.scoring import resampled_scores
from midlayer_encoders.sweeping.scoring.recording import record

LAYERS, DIM = (0, 1, 2), 24
_WORDS = ["river", "engine", "poem", "market", "sleep", "turn", "grow", "break", "sing", "wait", "stone", "cloud"]


def sentences(count: int, seed: int = 0) -> list[str]:
    """Return distinct sentences of a few words."""
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(_WORDS, size=rng.integers(3, 8))) + f" {seed}-{number}" for number in range(count)]


def vectors(texts: Sequence[str], layer: int) -> npt.NDArray[np.float32]:
    """Return a vector for each text: sums of word vectors, which differ between layers."""
    actual = np.zeros((len(texts), DIM), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            actual[row] += _word(word, layer)
    return actual * (1 + 3 * layer) + layer


@cache
def _word(word: str, layer: int) -> npt.NDArray[np.float64]:
    weight = 1.0 if word in _WORDS else 0.3
    return weight * np.random.RandomState(zlib.crc32(f"{layer} {word}".encode())).randn(DIM)


class Layer:
    """One layer as an mteb model."""

    def __init__(self, layer: int, similarity: str = "cosine", dtype: Any = np.float32) -> None:
        self.layer, self.dtype = layer, dtype
        self.similarity = SimilarityFunction.to_similarity_fn(similarity)
        self.similarity_pairwise = SimilarityFunction.to_similarity_pairwise_fn(similarity)
        self.mteb_model_meta = ModelMeta.create_empty(
            overwrites={
                "name": f"made/layer{layer}", "revision": "1", "modalities": ["text"], "framework": ["PyTorch"],
                "similarity_fn_name": ScoringFunction(similarity),
            }
        )  # fmt: skip

    def encode(self, inputs: Any, **_: Any) -> npt.NDArray[np.float32]:
        return vectors([text for batch in inputs for text in batch["text"]], self.layer).astype(self.dtype)


def by_mteb(task: AbsTask, similarity: str = "cosine", *, dtype: Any = np.float32) -> list[float]:
    """Return mteb's main score of each layer; the task is created again for each."""
    results = []
    with isolated_random():
        for layer in LAYERS:
            fresh, model = type(task)(), Layer(layer, similarity, dtype)
            options = {"encode_kwargs": {"batch_size": 32, "show_progress_bar": False}}
            scores = {split: fresh.evaluate(model, split, **options) for split in fresh.eval_splits}
            results.append(float(TaskResult.from_task_results(fresh, scores, evaluation_time=0).get_score()))
    return results


def together(task: AbsTask, similarity: str = "cosine", *, dtype: Any = np.float32, **options: Any) -> list[float]:
    """Return the main score of each layer, computed for all layers together."""

    def keys(inputs: Any, **_: Any) -> list[str]:
        return [text for batch in inputs for text in batch["text"]]

    with isolated_random():
        requested = record(type(task)(), keys, similarity=similarity)
    result = lambda layer, texts: vectors(texts, layer).astype(dtype)  # noqa: E731
    options = {"device": torch.device("cpu"), **options}
    actual = [(item, resampled_scores(item.scorer, item.keys, LAYERS, result, **options)) for item in requested]
    results = []
    for layer in LAYERS:
        scores: dict[str, dict[str, Any]] = {}
        for item, values in actual:
            scores.setdefault(item.split, {})[item.subset] = {"main_score": values[layer][0]}
        results.append(float(TaskResult.from_task_results(task, scores, evaluation_time=0).get_score()))
    return results


def metadata(kind: str, main_score: str, langs: Any = None, splits: Sequence[str] = ("test",)) -> TaskMetadata:
    return TaskMetadata(
        name=f"Made{kind}", description="made", type=kind, dataset={"path": "made/made", "revision": "1"},
        category="t2t", eval_splits=list(splits), eval_langs=langs or ["eng-Latn"], main_score=main_score,
    )  # fmt: skip


def made(base: type[AbsTask], data: Any, inputs: TaskMetadata, **settings: Any) -> AbsTask:
    """Return a task over data in memory; ``type(task)()`` creates it again."""

    def load_data(self: Any, num_proc: int | None = None, **_: Any) -> None:
        self.dataset, self.data_loaded = data(), True

    return type(f"Made{base.__name__}", (base,), {"metadata": inputs, "load_data": load_data, **settings})()


def split(**columns: Sequence[Any]) -> Dataset:
    return Dataset.from_dict(dict(columns))


def sts(grades: Sequence[float] = tuple(float(n % 4) for n in range(40)), **settings: Any) -> AbsTask:
    """Pairs with equal grades, repeated pairs, and a pair of identical texts."""
    first, second = sentences(40), sentences(40, seed=1)
    second[3], first[7], second[7] = first[3], first[6], second[6]

    def data() -> DatasetDict:
        return DatasetDict({"test": split(sentence1=first, sentence2=second, score=grades)})

    main = settings.pop("main_score", "cosine_spearman")
    return made(AbsTaskSTS, data, metadata("STS", main), **settings)


def pairs(main_score: str = "max_ap", labels: tuple[int, int] = (0, 1)) -> AbsTask:
    """Pairs of which several are equal, some with other labels, in two languages."""
    langs = {"en": ["eng-Latn"], "de": ["deu-Latn"]}

    def data() -> dict[str, DatasetDict]:
        actual = {}
        for seed, name in enumerate(langs):
            first, second = sentences(30, seed=seed), sentences(30, seed=seed + 5)
            first[20:26], second[20:26] = first[0:6], second[0:6]
            second[9] = first[9]
            inputs = [labels[n % 3 == 0] for n in range(30)]
            actual[name] = DatasetDict({"test": split(sentence1=first, sentence2=second, labels=inputs)})
        return actual

    return made(AbsTaskPairClassification, data, metadata("PairClassification", main_score, langs))


def classification(
    main_score: str = "accuracy", classes: int = 5, names: Sequence[Any] = range(5), **settings: Any
) -> AbsTask:
    """Classes by the first word; one is not in the test split, another has fewer examples than are sampled."""
    texts = sentences(160, seed=2)
    labels = [_WORDS.index(text.split()[0]) % classes for text in texts]
    few = [place for place, label in enumerate(labels[:100]) if label == 1][3:]
    train = [place for place in range(100) if place not in few]
    test = [place for place in range(100, 160) if classes == 2 or labels[place] != 2]

    def data() -> DatasetDict:
        return DatasetDict(
            {
                name: split(text=[texts[n] for n in places], label=[names[labels[n]] for n in places])
                for name, places in (("train", train), ("test", test))
            }
        )

    return made(AbsTaskClassification, data, metadata("Classification", main_score), n_experiments=3, **settings)


def clustering(**settings: Any) -> AbsTask:
    """Two levels of labels, of which some texts lack the second; two splits, so that the generator continues."""
    texts = sentences(90, seed=3)
    words = [_WORDS.index(text.split()[0]) for text in texts]
    labels = [[word % 3] if number % 5 == 0 else [word % 3, word % 6] for number, word in enumerate(words)]

    def data() -> DatasetDict:
        return DatasetDict(
            {name: split(sentences=texts[part], labels=labels[part]) for name, part in
             (("validation", slice(45)), ("test", slice(45, 90)))}
        )  # fmt: skip

    inputs = metadata("Clustering", "v_measure", splits=("validation", "test"))
    options = {"max_fraction_of_documents_to_embed": 0.8, "max_documents_per_cluster": 64, "n_clusters": 3} | settings
    return made(AbsTaskClustering, data, inputs, k_mean_batch_size=16, **options)


def retrieval(
    main_score: str = "ndcg_at_10", *, ranked: bool = False, same_ids: bool = False, **settings: Any
) -> AbsTask:
    """Queries with several relevant documents of different grades, some unknown; repeated documents; optional candidates."""
    documents, queries = sentences(60, seed=4), sentences(12, seed=5)
    documents[:12] = [" ".join(query.split()[:3]) + f" and {number}" for number, query in enumerate(queries)]
    documents[30:40] = documents[0:10]
    ids = [f"q{n}" if same_ids and n < 6 else f"d{(n * 7) % 60:02}" for n in range(60)]
    if same_ids:
        documents[:6] = queries[:6]
    relevant: dict[str, Mapping[str, int]] = {
        f"q{n}": {ids[n]: 2, ids[(n + 10) % 60]: 1, ids[(n + 31) % 60]: 0, **({"gone": 1} if n % 4 == 0 else {})}
        for n in range(12)
    }
    relevant["q11"] = {}
    top = {f"q{n}": [ids[k % 60] for k in range(n, n + 15 + n)] + [ids[n]] for n in range(11)}

    def data() -> dict[str, Any]:
        return {
            "default": {
                "test": {
                    "queries": split(id=[f"q{n}" for n in range(12)], text=queries),
                    "corpus": split(id=ids, title=[""] * 60, text=documents),
                    "relevant_docs": {name: dict(actual) for name, actual in relevant.items()},
                    "top_ranked": {name: list(actual) for name, actual in top.items()} if ranked else None,
                }
            }
        }

    kind = "Reranking" if ranked else "Retrieval"
    settings = {"ignore_identical_ids": same_ids} | settings
    return made(AbsTaskRetrieval, data, metadata(kind, main_score), **settings)
