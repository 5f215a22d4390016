"""mteb's BM25 baseline, which uses the library bm25s."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

BM25_PACKAGES = ("bm25s", "PyStemmer")
_NAME = "mteb/baseline-bm25s"
_QUERIES_PER_BATCH = 64  # whose rankings of the whole corpus are in memory


def has_bm25() -> bool:
    """Return True if the packages for BM25 are installed."""
    return find_spec("bm25s") is not None and find_spec("Stemmer") is not None


class Bm25Search:
    """mteb's BM25 (method ``lucene``, k1 1.5, b 0.75, the language's stop words and stemmer) as an mteb search model.

    Unlike mteb's own model, it ranks all candidates of a query. mteb's model drops candidates that are not among the
    first thousand documents of the whole corpus.
    """

    def __init__(self) -> None:
        _import_quietly()
        import mteb

        self._model: Any = mteb.get_model(_NAME)
        self.mteb_model_meta = self._model.mteb_model_meta
        self._size = 0

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Index the documents."""
        self._size = len(corpus)
        self._model.index(corpus, **kwargs)

    def search(self, queries: Any, *, top_k: int, top_ranked: Any = None, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Return the scores of each query's best documents or of its candidates."""
        if top_ranked is None:
            return dict(self._model.search(queries, top_k=top_k, **kwargs))
        scores: dict[str, dict[str, float]] = {}
        for start in range(0, len(queries), _QUERIES_PER_BATCH):
            batch = queries.select(range(start, min(start + _QUERIES_PER_BATCH, len(queries))))
            scores |= self._model.search(batch, top_k=self._size, top_ranked=top_ranked, **kwargs)
        return scores


def _import_quietly() -> None:
    """Import bm25s without progress bars, which only this environment variable disables."""
    previous = os.environ.get("DISABLE_TQDM")
    os.environ["DISABLE_TQDM"] = "1"
    try:
        import bm25s  # noqa: F401
    finally:
        if previous is None:
            del os.environ["DISABLE_TQDM"]
        else:
            os.environ["DISABLE_TQDM"] = previous
