"""TF-IDF vectors, scored by mteb as every layer is; and what other baselines share with them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from midlayer_encoders._random import isolated_random
from midlayer_encoders.tasks.sources import ObjectSource, TaskSource, TextsSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    from mteb.abstasks import AbsTask
    from mteb.types import Array
    from torch.utils.data import DataLoader


class TextEncoder(ABC):
    """An mteb encoder of texts by whatever makes vectors of them, compared by their cosine.

    Args:
        name: under which mteb files results.
        revision: likewise.
    """

    def __init__(self, name: str, revision: str) -> None:
        from mteb.models.model_meta import ModelMeta, ScoringFunction

        self.mteb_model_meta = ModelMeta.create_empty(
            overwrites={
                "name": name,
                "revision": revision,
                "similarity_fn_name": ScoringFunction.COSINE,
                "modalities": ["text"],
            }
        )

    @abstractmethod
    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row for each text, shape ``(N, D)``."""

    def encode(self, inputs: DataLoader[Any], **kwargs: Any) -> Array:  # noqa: ARG002
        """Return one row for each text, shape ``(N, D)``."""
        return self.vectors([text for batch in inputs for text in batch["text"]])

    def similarity(self, one: Array, other: Array) -> torch.Tensor:
        """Return the cosine of every row with every row."""
        from mteb.similarity_functions import cos_sim

        return cos_sim(one, other)

    def similarity_pairwise(self, one: Array, other: Array) -> Array:
        """Return the cosine of each row with the same row of the other."""
        from mteb.similarity_functions import pairwise_cos_sim

        return pairwise_cos_sim(one, other)


class TfidfEncoder(TextEncoder):
    """An mteb encoder of TF-IDF vectors: L2-normed, float32, over the commonest 4096 words of ``texts``.

    Where no text has a word of two letters, as in some scripts and in formulas, the characters are counted instead.

    Args:
        texts: what the vocabulary and the document frequencies are counted on.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        from sklearn.feature_extraction.text import TfidfVectorizer

        words = TfidfVectorizer(max_features=4096, sublinear_tf=True)
        analyze = words.build_analyzer()
        if not any(map(analyze, texts)):
            words.set_params(analyzer="char")
        self._vectorizer = words.fit(texts)
        super().__init__("midlayer-encoders/tfidf", "1")

    def vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Return one row for each text, shape ``(N, D)``."""
        return self._vectorizer.transform(texts).toarray().astype("float32")  # type: ignore[no-any-return]


def tfidf_scores(task: AbsTask) -> float:
    """Return the main score of TF-IDF on ``task``, from 0 to 1, by mteb's own evaluation; ``task`` is left as it was.

    The vocabulary is counted on the texts of the task itself, its training texts included.
    """
    return encoder_score(task, TfidfEncoder)


def encoder_score(task: AbsTask, made_for: Callable[[Sequence[str]], Any]) -> float:
    """Return the main score of an encoder on ``task``, as :func:`tfidf_scores`.

    Args:
        task: left as it was.
        made_for: returns the encoder, or whatever else mteb evaluates, given the task's texts.
    """
    import mteb

    task = ObjectSource(task).make()

    with isolated_random():
        result = mteb.evaluate(
            made_for(task_texts(task)), task, cache=None, show_progress_bar=False, overwrite_strategy="always"
        )
    return float(result[0].get_score())


def task_texts(task: AbsTask) -> list[str]:
    """Return the distinct texts of a task, in the order in which they stand in its data."""
    from mteb.abstasks import AbsTaskRetrieval

    from midlayer_encoders.tasks.mteb_internals import content_columns

    if not task.data_loaded:
        task.load_data()
    columns = content_columns(task)
    if isinstance(task, AbsTaskRetrieval):
        columns |= {"title"}
    return list(dict.fromkeys(_strings(task.dataset, columns)))


def source_texts(source: TaskSource) -> list[str]:
    """Return the distinct texts of a task that is not made yet, or those without labels."""
    return list(dict.fromkeys(source.texts())) if isinstance(source, TextsSource) else task_texts(source.make())


def _strings(data: Any, columns: set[str]) -> Iterator[str]:
    """Every string under the wanted columns of datasets nested in subsets and splits."""
    if isinstance(data, str):
        yield from filter(None, [data])
    elif hasattr(data, "column_names") and isinstance(data.column_names, list):
        if {"title", "text"} <= columns.intersection(data.column_names):  # a passage is both, as mteb joins them
            both = zip(data["title"][:], data["text"][:], strict=True)
            yield from filter(None, (f"{title or ''} {text or ''}".strip() for title, text in both))
            columns = columns - {"title", "text"}
        for column in data.column_names:
            if column in columns:
                yield from _strings(data[column][:], columns)
    elif isinstance(data, list):
        for item in data:
            yield from _strings(item, columns)
    elif isinstance(data, dict):
        for name, item in data.items():
            if name not in ("relevant_docs", "top_ranked"):
                yield from _strings(item, columns)
