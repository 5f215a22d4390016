"""BM25, as mteb ranks by it: its own model over the library bm25s."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

BM25_PACKAGES = ("bm25s", "PyStemmer")
_NAME = "mteb/baseline-bm25s"
_AT_ONCE = 64  # queries whose ranking of a whole corpus is held in memory


def has_bm25() -> bool:
    """Return whether what ranks by BM25 is installed."""
    return find_spec("bm25s") is not None and find_spec("Stemmer") is not None


class Bm25Search:
    """mteb's BM25 (method ``lucene``, k1 1.5, b 0.75, the language's stop words and stemmer), as mteb asks for it.

    Of a query with candidates all of them are ranked. mteb's own finds those that are among the first thousand of the
    whole corpus, so that in a larger one it would lose some.
    """

    def __init__(self) -> None:
        _import_quietly()
        import mteb

        self._model: Any = mteb.get_model(_NAME)
        self.mteb_model_meta = self._model.mteb_model_meta
        self._size = 0

    def index(self, corpus: Any, **kwargs: Any) -> None:
        """Count the words of the documents."""
        self._size = len(corpus)
        self._model.index(corpus, **kwargs)

    def search(self, queries: Any, *, top_k: int, top_ranked: Any = None, **kwargs: Any) -> dict[str, dict[str, float]]:
        """Return the score of each query's best documents, or of its candidates."""
        if top_ranked is None:
            return dict(self._model.search(queries, top_k=top_k, **kwargs))
        found: dict[str, dict[str, float]] = {}
        for start in range(0, len(queries), _AT_ONCE):
            some = queries.select(range(start, min(start + _AT_ONCE, len(queries))))
            found |= self._model.search(some, top_k=self._size, top_ranked=top_ranked, **kwargs)
        return found


def _import_quietly() -> None:
    """Import bm25s without its bars, which nothing but this variable turns off from here."""
    before = os.environ.get("DISABLE_TQDM")
    os.environ["DISABLE_TQDM"] = "1"
    try:
        import bm25s  # noqa: F401
    finally:
        if before is None:
            del os.environ["DISABLE_TQDM"]
        else:
            os.environ["DISABLE_TQDM"] = before
