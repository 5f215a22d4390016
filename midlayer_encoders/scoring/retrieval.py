"""Tasks on similarities: pairs, and retrieval and reranking with trec_eval's scores, for all layers at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy import stats
from sentence_transformers.util import SimilarityFunction
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch.nn.functional import normalize

from midlayer_encoders.scoring.resampling import resampled_correlations, resampled_means, resampled_precisions

_BLOCK = 1 << 24  # numbers of a block of pairs or similarities: 64 MiB


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    # The formula that scikit-learn uses in float32, so that equal values there are equal here.
    return 1 - 0.5 * (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(dim=-1)


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "manhattan": lambda first, second: -(first - second).abs().sum(dim=-1),
    "euclidean": lambda first, second: -(first - second).square().sum(dim=-1).sqrt(),
    "dot": lambda first, second: (first * second).sum(dim=-1),
}
"""Similarities by mteb's name, from vectors ``(*, D)`` to numbers ``(*)``; larger means more similar."""


def pair_similarities(
    vectors: Tensor, first: Tensor, second: Tensor, *, measure: str, similarity: str = "cosine"
) -> Tensor:
    """Return the similarity of each pair at each layer, shape ``(L, P)``.

    Args:
        vectors: of N rows at L layers, shape ``(L, N, D)``.
        first: row of the first element of each of P pairs.
        second: row of the second element.
        measure: one of :data:`MEASURES`, or ``"similarity"`` for the encoder's similarity.
        similarity: the encoder's similarity, as in sentence-transformers' ``similarity_fn_name``.
    """
    function = MEASURES.get(measure) or SimilarityFunction.to_similarity_pairwise_fn(similarity)
    size = max(_BLOCK // (len(vectors) * vectors.shape[2]), 1)
    blocks = []
    for first_rows, second_rows in zip(torch.split(first, size), torch.split(second, size), strict=True):
        x = vectors[:, first_rows.to(vectors.device)]
        y = vectors[:, second_rows.to(vectors.device)]
        blocks.append(function(x.flatten(0, 1), y.flatten(0, 1)).view(x.shape[:2]))
    return torch.cat(blocks, dim=1)


def _average_precision(labels: Any, similarities: Any) -> float:
    return float(average_precision_score(labels == 1, np.nan_to_num(similarities)))


@dataclass(frozen=True)
class _Pairs:
    """The pairs of a task.

    Attributes:
        first: row of the first element of each of P pairs.
        second: row of the second element.
        targets: gold similarity, or label (1 for a positive pair), shape ``(P,)``.
        score: mteb's name of the score.
        similarity: the encoder's similarity.
    """

    first: Tensor
    second: Tensor
    targets: Tensor
    score: str
    similarity: str = "cosine"

    def _scores(self, vectors: Tensor, measure: str, score: Callable[[Any, Any], float]) -> tuple[Tensor, Tensor]:
        """Return a score of the targets and of the similarities at each layer ``(L,)``, and the similarities."""
        similarities = pair_similarities(vectors, self.first, self.second, measure=measure, similarity=self.similarity)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of constant similarities, or targets without a positive pair
            values = [score(self.targets.numpy(), layer) for layer in similarities.double().cpu().numpy()]
        return torch.tensor(values, dtype=torch.float64, device=vectors.device), similarities

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        return rows * dim + 16 * len(self.first)


@dataclass(frozen=True)
class StsPairs(_Pairs):
    """Pairs with gold similarities.

    ``score`` is ``spearman`` or ``pearson``, after ``cosine_``, ``manhattan_`` or ``euclidean_``, or alone for the
    encoder's similarity.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> first, second, gold = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2]), torch.tensor([5.0, 1.0, 0.0])
        >>> StsPairs(first, second, gold, "cosine_spearman").scores(vectors)
        tensor([0.5000], dtype=torch.float64)
    """

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the correlation with the gold similarities at each layer, shape ``(L,)``; NaN if one is constant."""
        return self.resampled(vectors)[0]

    def resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, and scores on resampled pairs ``(L, S)``; ranks are those among all pairs."""
        measure, _, kind = self.score.rpartition("_")
        correlate: Callable[..., Any] = stats.spearmanr if kind == "spearman" else stats.pearsonr
        scores, similarities = self._scores(
            vectors, measure or "similarity", lambda targets, layer: correlate(targets, layer)[0]
        )
        rows = torch.cat([self.targets[None].double(), similarities.double().cpu()])
        if kind == "spearman":
            rows = torch.from_numpy(stats.rankdata(rows.numpy(), axis=1))
        return scores, resampled_correlations(rows[1:], rows[0])


@dataclass(frozen=True)
class LabeledPairs(_Pairs):
    """Pairs with labels.

    ``score`` is ``max_ap`` for the best of all measures, or the name of one, such as ``dot_ap``; ``similarity_ap`` is
    the encoder's similarity.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> pairs = LabeledPairs(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1, 0]), "max_ap")
        >>> pairs.scores(vectors)
        tensor([1.], dtype=torch.float64)
    """

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the average precision at each layer, shape ``(L,)``."""
        return self.resampled(vectors)[0]

    def resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, and scores on resampled pairs ``(L, S)``, by the measure that is best on all pairs."""
        measures = ("similarity", *MEASURES) if self.score == "max_ap" else (self.score.removesuffix("_ap"),)
        scored = [self._scores(vectors, measure, _average_precision) for measure in measures]
        scores, best = torch.stack([scores for scores, _ in scored]).max(dim=0)
        similarities = torch.stack([scored[measure][1][layer] for layer, measure in enumerate(best.tolist())])
        return scores, resampled_precisions(similarities.nan_to_num(), self.targets == 1)


RANKING_SCORES = ("ndcg", "map", "recall", "precision", "mrr", "hit_rate")
"""Names of scores, before ``_at_10``."""


def ranking_score(gains: Tensor, valid: Tensor, ideal: Tensor, *, score: str, cut: int) -> Tensor:
    r"""Return trec_eval's score of each ranking.

    .. math::
        \text{nDCG} = \frac{\sum_{r \le k} g_r / \log_2(r + 1)}{\sum_{r \le k} g^*_r / \log_2(r + 1)}, \qquad
        \text{AP} = \frac{1}{\lvert\text{relevant}\rvert} \sum_{r \le k,\, g_r > 0} P_r

    Args:
        gains: relevance of the ranked documents, shape ``(*, K)``.
        valid: which of the K places hold a document; the others do not count as a rank.
        ideal: relevance of all judged documents of the query, descending, shape ``(*, J)``.
        score: one of :data:`RANKING_SCORES`.
        cut: number k of ranks that count.

    Example:
        >>> gains, valid = torch.tensor([0.0, 1.0, 1.0]), torch.ones(3, dtype=torch.bool)
        >>> round(ranking_score(gains, valid, torch.ones(2), score="map", cut=1000).item(), 4)
        0.5833
    """
    rank = valid.long().cumsum(dim=-1)
    gains = torch.where(valid & (rank <= cut), gains, 0).clamp(min=0).double()
    hits = (gains >= 1).double()
    relevant = (ideal >= 1).sum(dim=-1).double()
    rank = rank.clamp(min=1).double()
    if score == "ndcg":
        places = torch.arange(2, ideal.shape[-1] + 2, device=ideal.device, dtype=torch.float64)
        best = (ideal.clamp(min=0).double() / places.log2())[..., :cut].sum(dim=-1)
        discounted = (gains / (rank + 1).log2()).sum(dim=-1)
        return torch.where(best > 0, discounted / best.clamp(min=1e-300), 0)
    if score == "map":
        return (hits * hits.cumsum(dim=-1) / rank).sum(dim=-1) / relevant.clamp(min=1)
    if score == "recall":
        return hits.sum(dim=-1) / relevant.clamp(min=1)
    if score == "precision" or not hits.shape[-1]:
        return hits.sum(dim=-1) / cut
    return (hits / rank if score == "mrr" else hits).amax(dim=-1)  # mrr, hit_rate


@dataclass(frozen=True)
class Ranking:
    """Queries and their documents.

    Documents are numbered by their ids, descending: trec_eval ranks the larger id first if similarities are equal.

    Attributes:
        queries: row of each of Q queries.
        documents: row of each of M documents.
        candidates: numbers of the documents that each query ranks; ``None`` for all.
        relevance: of each query's judged documents, by number.
        outside: relevance of judged documents that are not in the corpus.
        same: number of the document with the query's id, which is ignored; -1 if there is none.
        score: one of :data:`RANKING_SCORES`.
        cut: number of ranks that count.
        depth: documents that mteb ranks for each query.
        similarity: the encoder's similarity.
    """

    queries: Tensor
    documents: Tensor
    candidates: Sequence[Tensor] | None
    relevance: Sequence[Mapping[int, float]]
    outside: Sequence[Sequence[float]]
    same: Tensor
    score: str
    cut: int
    depth: int
    similarity: str

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the mean over queries for each layer, rounded like mteb's, shape ``(L,)``."""
        return self.resampled(vectors)[0]

    def resampled(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same, and means over resampled queries ``(L, S)``."""
        by_query = []
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        blocks = self._whole(vectors) if self.candidates is None else self._reranked(vectors)
        for places, numbers, valid in blocks:
            gains, ideal = self._gains(places, numbers)
            valid = valid & (numbers != self.same.to(numbers.device)[places][:, None])
            by_query.append(ranking_score(gains, valid, ideal, score=self.score, cut=self.cut))
            total += by_query[-1].sum(dim=1)
        mean = total / len(self.queries)
        rounded = mean if self.score == "mrr" else (mean * 1e5).round() / 1e5
        return rounded, resampled_means(torch.cat(by_query, dim=1))

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        return 3 * rows * dim

    def _whole(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield blocks of queries: places, ranked documents at each layer ``(L, Q, K)``, and which are valid."""
        similarity = SimilarityFunction.to_similarity_fn(self.similarity)
        documents = vectors[:, self.documents.to(vectors.device)]
        depth = min(self.depth + 1, len(self.documents))
        size = max(_BLOCK // (len(vectors) * len(self.documents)), 1)
        for places in torch.split(torch.arange(len(self.queries), device=vectors.device), size):
            queries = vectors[:, self.queries.to(vectors.device)[places]]
            similarities = torch.stack([similarity(x, y) for x, y in zip(queries, documents, strict=True)])
            numbers = similarities.topk(depth, dim=2).indices.sort(dim=2).values  # ties in the order of their ids
            order = similarities.gather(2, numbers).sort(dim=2, descending=True, stable=True).indices[..., : self.depth]
            numbers = numbers.gather(2, order)
            yield places, numbers, torch.ones_like(numbers, dtype=torch.bool)

    def _reranked(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the same for queries that rank only their candidates."""
        assert self.candidates is not None
        longest = max(map(len, self.candidates), default=0)
        size = max(_BLOCK // (len(vectors) * max(longest, 1)), 1)
        documents = self.documents.to(vectors.device)
        for places in torch.split(torch.arange(len(self.queries)), size):
            candidates = [self.candidates[place].sort().values for place in places]
            numbers = torch.nn.utils.rnn.pad_sequence(candidates, batch_first=True, padding_value=-1).to(vectors.device)
            places = places.to(vectors.device)
            valid = numbers >= 0
            queries = self.queries.to(vectors.device)[places][:, None].expand_as(numbers)
            similarities = vectors.new_full((len(vectors), *numbers.shape), -torch.inf)
            similarities[:, valid] = pair_similarities(
                vectors, queries[valid], documents[numbers[valid]], measure="similarity", similarity=self.similarity
            )
            order = similarities.sort(dim=2, descending=True, stable=True).indices
            ranked = numbers.expand_as(similarities).gather(2, order)
            yield places, ranked, ranked >= 0

    def _gains(self, places: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the relevance of ranked documents ``(L, Q, K)`` and of all judged ones, descending, ``(Q, J)``."""
        judged = [self.relevance[place] for place in places.tolist()]
        table = numbers.new_zeros(len(judged), len(self.documents) + 1, dtype=torch.float32)  # the last for no document
        for row, relevance in zip(table, judged, strict=True):
            row[list(relevance)] = torch.tensor(list(relevance.values()), dtype=row.dtype, device=row.device)
        gains = table.expand(len(numbers), -1, -1).gather(2, numbers % (len(self.documents) + 1))
        ideal = [
            torch.tensor(sorted([*relevance.values(), *self.outside[place]], reverse=True), dtype=torch.float32)
            for place, relevance in zip(places.tolist(), judged, strict=True)
        ]
        return gains, torch.nn.utils.rnn.pad_sequence(ideal, batch_first=True).to(numbers.device)


def make_ranking(
    queries: Mapping[str, int],
    documents: Mapping[str, int],
    relevant: Mapping[str, Mapping[str, int]],
    *,
    top_ranked: Mapping[str, Sequence[str]] | None = None,
    score: str,
    depth: int = 1000,
    ignore_identical_ids: bool = False,
    similarity: str = "cosine",
) -> Ranking:
    """Return the ranking that mteb's dictionaries define.

    Args:
        queries: row of each query, by id.
        documents: row of each document, by id.
        relevant: relevance of documents, by query; queries without any are excluded, as in trec_eval.
        top_ranked: ids of the documents that each query ranks; ``None`` for all.
        score: mteb's name of the score, such as ``ndcg_at_10``.
        depth: documents that are ranked for each query.
        ignore_identical_ids: exclude the document with the query's id.
        similarity: the encoder's similarity.
    """
    numbers = {name: number for number, name in enumerate(sorted(documents, reverse=True))}
    judged = [name for name in queries if name in relevant]
    kind, _, cut = ("recall_at_1" if score == "accuracy" else score).partition("_at_")
    candidates = None
    if top_ranked is not None:
        candidates = [
            torch.tensor(sorted({numbers[document] for document in top_ranked.get(name, ())}), dtype=torch.long)
            for name in judged
        ]
    return Ranking(
        queries=torch.tensor([queries[name] for name in judged]),
        documents=torch.tensor([documents[name] for name in numbers]),
        candidates=candidates,
        relevance=[
            {numbers[document]: float(value) for document, value in relevant[name].items() if document in numbers}
            for name in judged
        ],
        outside=[
            [float(value) for document, value in relevant[name].items() if document not in numbers] for name in judged
        ],
        same=torch.tensor([numbers.get(name, -1) if ignore_identical_ids else -1 for name in judged]),
        score=kind,
        cut=int(cut),
        depth=depth,
        similarity=similarity,
    )
