"""Retrieval measures of trec_eval in NumPy: the part of pytrec_eval that mteb uses.

Rankings follow trec_eval: scores are compared in single precision, and ties are broken by document id in descending
byte order. A document without a judgment counts as not relevant.

Example:
    >>> evaluator = RelevanceEvaluator({"q": {"a": 1, "b": 0}}, {"P.1,2", "ndcg_cut.2"})
    >>> evaluator.evaluate({"q": {"a": 0.5, "b": 0.9}})
    {'q': {'P_1': 0.0, 'P_2': 0.5, 'ndcg_cut_2': 0.6309297535714575}}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import numpy as np

__version__ = "0.5.6+midlayer"

__all__ = ["RelevanceEvaluator", "supported_measures"]

Measure = Callable[[np.ndarray, np.ndarray, int], float]


def _precision(ranked: np.ndarray, _judged: np.ndarray, cutoff: int) -> float:
    """Divide by the cutoff even where fewer documents were retrieved."""
    return float((ranked[:cutoff] > 0).sum() / cutoff)


def _recall(ranked: np.ndarray, judged: np.ndarray, cutoff: int) -> float:
    num_relevant = (judged > 0).sum()
    return float((ranked[:cutoff] > 0).sum() / num_relevant) if num_relevant else 0.0


def _success(ranked: np.ndarray, _judged: np.ndarray, cutoff: int) -> float:
    return float((ranked[:cutoff] > 0).any())


def _average_precision(ranked: np.ndarray, judged: np.ndarray, cutoff: int) -> float:
    """Average the precision at each relevant document over all relevant documents, retrieved or not."""
    num_relevant = (judged > 0).sum()
    relevant = ranked[:cutoff] > 0
    precision = np.cumsum(relevant) / np.arange(1, len(relevant) + 1)
    return float(precision[relevant].sum() / num_relevant) if num_relevant else 0.0


def _discounted_gain(gains: np.ndarray) -> float:
    return float((np.maximum(gains, 0) / np.log2(np.arange(2, len(gains) + 2))).sum())


def _ndcg(ranked: np.ndarray, judged: np.ndarray, cutoff: int) -> float:
    """Take each positive judgment as its gain."""
    ideal = _discounted_gain(np.sort(judged)[::-1][:cutoff])
    return _discounted_gain(ranked[:cutoff]) / ideal if ideal else 0.0


_MEASURES: dict[str, Measure] = {
    "P": _precision,
    "map_cut": _average_precision,
    "ndcg_cut": _ndcg,
    "recall": _recall,
    "success": _success,
}
supported_measures = frozenset(_MEASURES)


def _parse(measure: str) -> list[tuple[str, int]]:
    """Return the measure's name with each of its cutoffs: ``P.1,5`` or ``P_1,5``."""
    match = re.fullmatch(rf"({'|'.join(_MEASURES)})[._]([1-9][0-9]*(?:,[1-9][0-9]*)*)", measure)
    if match is None:
        raise ValueError(
            f"unsupported measure {measure!r}: this NumPy stand-in for pytrec_eval computes {', '.join(_MEASURES)} "
            "with explicit cutoffs, such as 'ndcg_cut.10' or 'P.1,5'. For all measures of trec_eval install the real "
            "package: pip install --upgrade pytrec-eval-terrier"
        )
    return [(match[1], int(cutoff)) for cutoff in match[2].split(",")]


class RelevanceEvaluator:
    """Score rankings against relevance judgments.

    Args:
        query_relevance: the judgment of each document by query id and document id; positive means relevant.
        measures: names with cutoffs, such as ``"ndcg_cut.1,10"``.
    """

    def __init__(self, query_relevance: Mapping[str, Mapping[str, int]], measures: Iterable[str]) -> None:
        self._relevance = {query: judgments for query, judgments in query_relevance.items() if judgments}
        self._measures = sorted({pair for measure in measures for pair in _parse(measure)})

    def evaluate(self, scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """Return every measure of each query that has judgments, such as ``{"q1": {"ndcg_cut_10": 0.4}}``."""
        return {
            query: self._evaluate_query(self._relevance[query], documents)
            for query, documents in scores.items()
            if query in self._relevance
        }

    def _evaluate_query(self, judgments: Mapping[str, int], documents: Mapping[str, float]) -> dict[str, float]:
        with np.errstate(over="ignore"):
            rounded = np.array(list(documents.values()), dtype=np.float32).tolist()
        ranking = sorted(
            zip(rounded, documents, strict=True), key=lambda pair: (pair[0], pair[1].encode()), reverse=True
        )
        ranked = np.array([judgments.get(document, 0) for _, document in ranking])
        judged = np.array(list(judgments.values()))
        return {f"{name}_{cutoff}": _MEASURES[name](ranked, judged, cutoff) for name, cutoff in self._measures}
