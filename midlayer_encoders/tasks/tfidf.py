"""The TF-IDF baseline, and the base class of text encoders that mteb evaluates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.tasks.sources import ObjectSource, TaskSource, TextsSource

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from mteb.abstasks import AbsTask
    from mteb.types import Array
    from torch.utils.data import DataLoader


class TextEncoder(ABC):
    """An mteb encoder of texts that compares vectors by their cosine.

    Args:
        name: name in mteb's results.
        revision: revision in mteb's results.
    """

    def __init__(self, name: str, revision: str) -> None:
        from mteb.models.model_meta import ModelMeta, ScoringFunction
        from mteb.similarity_functions import cos_sim, pairwise_cos_sim

        self.similarity = cos_sim
        self.similarity_pairwise = pairwise_cos_sim
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


class TfidfEncoder(TextEncoder):
    """An mteb encoder of TF-IDF vectors: L2-normed, float32, over the 4096 most common words of ``texts``.

    If no text has a word of two letters, as in some scripts and in formulas, characters replace the words.

    Args:
        texts: texts for the vocabulary and the document frequencies.
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
    """Return the main score of TF-IDF on ``task``, from 0 to 1, by mteb's evaluation, without changing ``task``.

    The vocabulary comes from all texts of the task, including its training texts.
    """
    return encoder_score(task, TfidfEncoder)


def encoder_score(task: AbsTask, make_encoder: Callable[[Sequence[str]], Any]) -> float:
    """Return the main score of an encoder on ``task``, from 0 to 1.

    Args:
        task: a task, which does not change.
        make_encoder: returns the encoder, or another model that mteb evaluates, for the task's texts.
    """
    import mteb

    from midlayer_encoders.tasks.mteb_internals import listed_columns

    task = ObjectSource(task).make()
    with isolated_random(), listed_columns():
        result = mteb.evaluate(
            make_encoder(task_texts(task)), task, cache=None, show_progress_bar=False, overwrite_strategy="always"
        )
    return float(result[0].get_score())


def task_texts(task: AbsTask) -> list[str]:
    """Return the distinct texts of a task in order."""
    from mteb.abstasks import AbsTaskRetrieval

    from midlayer_encoders.tasks.mteb_internals import content_columns

    if not task.data_loaded:
        task.load_data()
    columns = content_columns(task)
    if isinstance(task, AbsTaskRetrieval):
        columns |= {"title"}
    return list(dict.fromkeys(_strings(task.dataset, columns)))


def source_texts(source: TaskSource) -> list[str]:
    """Return the distinct texts of a source."""
    return list(dict.fromkeys(source.texts())) if isinstance(source, TextsSource) else task_texts(source.make())


def _strings(data: Any, columns: set[str]) -> Iterator[str]:
    """Yield all strings in the given columns of datasets that are nested in subsets and splits."""
    if isinstance(data, str):
        yield from filter(None, [data])
    elif hasattr(data, "column_names") and isinstance(data.column_names, list):
        if {"title", "text"} <= columns.intersection(data.column_names):  # mteb joins them into a passage
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
