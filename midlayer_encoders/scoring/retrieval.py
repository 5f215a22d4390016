"""Retrieval and reranking: how high the relevant documents of each query come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from sentence_transformers.util import SimilarityFunction
from torch import Tensor

from midlayer_encoders.scoring.similarity import pair_similarities

RANKING_SCORES = ("ndcg", "map", "recall", "precision", "mrr", "hit_rate")
"""What stands before ``_at_10`` in the names of scores."""

_BLOCK = 1 << 25  # similarities that are held at once: 128 MiB


def ranking_score(gains: Tensor, known: Tensor, ideal: Tensor, *, score: str, cut: int) -> Tensor:
    r"""Return a score of each ranking, as trec_eval defines it.

    .. math::
        \text{nDCG} = \frac{\sum_{r \le k} g_r / \log_2(r + 1)}{\sum_{r \le k} g^*_r / \log_2(r + 1)}, \qquad
        \text{AP} = \frac{1}{\lvert\text{relevant}\rvert} \sum_{r \le k,\, g_r > 0} P_r

    Args:
        gains: relevance of the documents in the order in which they were ranked, shape ``(*, K)``.
        known: which of the K places hold a document; the others do not count as a rank.
        ideal: relevances of all judged documents of the query, descending, shape ``(*, J)``.
        score: one of :data:`RANKING_SCORES`.
        cut: ranks k that count.

    Example:
        >>> gains, known = torch.tensor([0.0, 1.0, 1.0]), torch.ones(3, dtype=torch.bool)
        >>> round(ranking_score(gains, known, torch.ones(2), score="map", cut=1000).item(), 4)
        0.5833
    """
    rank = known.long().cumsum(dim=-1)
    gains = torch.where(known & (rank <= cut), gains, 0).clamp(min=0).double()
    hits = (gains >= 1).double()
    relevant = (ideal >= 1).sum(dim=-1).double()
    rank = rank.clamp(min=1).double()
    if score == "ndcg":
        places = torch.arange(2, ideal.shape[-1] + 2, device=ideal.device, dtype=torch.float64)
        best = (ideal.clamp(min=0).double() / places.log2())[..., :cut].sum(dim=-1)
        found = (gains / (rank + 1).log2()).sum(dim=-1)
        return torch.where(best > 0, found / best.clamp(min=1e-300), 0)
    if score == "map":
        return (hits * hits.cumsum(dim=-1) / rank).sum(dim=-1) / relevant.clamp(min=1)
    if score == "recall":
        return hits.sum(dim=-1) / relevant.clamp(min=1)
    if score == "precision":
        return hits.sum(dim=-1) / cut
    if score == "mrr":
        return (hits / rank).amax(dim=-1) if hits.shape[-1] else hits.sum(dim=-1)
    return hits.amax(dim=-1) if hits.shape[-1] else hits.sum(dim=-1)  # hit_rate


@dataclass(frozen=True)
class Ranking:
    """Queries and their documents.

    Documents are numbered by their ids, descending: trec_eval puts the larger id first where two are as similar.

    Attributes:
        queries: row of each of Q queries.
        documents: row of each of M documents.
        candidates: numbers of the documents that each query ranks, ``None`` for all.
        relevance: of each judged document of each query, by number; of those outside the corpus in ``unseen``.
        unseen: relevances of judged documents that are not in the corpus.
        same: number of the document with the query's own id, which is to be ignored; -1 where there is none.
        score: one of :data:`RANKING_SCORES`.
        cut: ranks that count.
        depth: documents that mteb keeps for each query.
        similarity: the encoder's own.
    """

    queries: Tensor
    documents: Tensor
    candidates: Sequence[Tensor] | None
    relevance: Sequence[Mapping[int, float]]
    unseen: Sequence[Sequence[float]]
    same: Tensor
    score: str
    cut: int
    depth: int
    similarity: str

    def scores(self, vectors: Tensor) -> Tensor:
        """Return the mean over queries for each layer, rounded as mteb rounds, shape ``(L,)``."""
        total = vectors.new_zeros(len(vectors), dtype=torch.float64)
        blocks = self._whole(vectors) if self.candidates is None else self._reranked(vectors)
        for places, numbers, known in blocks:
            gains, ideal = self._gains(places, numbers)
            known = known & (numbers != self.same.to(numbers.device)[places][:, None])
            total += ranking_score(gains, known, ideal, score=self.score, cut=self.cut).sum(dim=1)
        mean = total / len(self.queries)
        return mean if self.score == "mrr" else (mean * 1e5).round() / 1e5

    def numbers(self, rows: int, dim: int) -> int:
        """Return about how many numbers of four bytes a layer takes."""
        return 3 * rows * dim

    def _whole(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for blocks of queries their places, the documents ranked at each layer ``(L, Q, K)``, which count."""
        similarity = SimilarityFunction.to_similarity_fn(self.similarity)
        documents = vectors[:, self.documents.to(vectors.device)]
        depth = min(self.depth + 1, len(self.documents))
        size = max(_BLOCK // (len(vectors) * len(self.documents)), 1)
        for places in torch.split(torch.arange(len(self.queries), device=vectors.device), size):
            queries = vectors[:, self.queries.to(vectors.device)[places]]
            found = torch.stack([similarity(one, all_) for one, all_ in zip(queries, documents, strict=True)])
            numbers = found.topk(depth, dim=2).indices.sort(dim=2).values  # equal ones in the order of their ids
            order = found.gather(2, numbers).sort(dim=2, descending=True, stable=True).indices[..., : self.depth]
            numbers = numbers.gather(2, order)
            yield places, numbers, torch.ones_like(numbers, dtype=torch.bool)

    def _reranked(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the same of queries that rank some documents each."""
        assert self.candidates is not None
        longest = max((len(one) for one in self.candidates), default=0)
        size = max(_BLOCK // (len(vectors) * max(longest, 1)), 1)
        every = self.documents.to(vectors.device)
        for places in torch.split(torch.arange(len(self.queries)), size):
            some = [self.candidates[place].sort().values for place in places]
            numbers = torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=-1).to(vectors.device)
            places = places.to(vectors.device)
            known = numbers >= 0
            queries = self.queries.to(vectors.device)[places][:, None].expand_as(numbers)
            found = vectors.new_full((len(vectors), *numbers.shape), -torch.inf)
            found[:, known] = pair_similarities(
                vectors, queries[known], every[numbers[known]], measure="similarity", similarity=self.similarity
            )
            order = found.sort(dim=2, descending=True, stable=True).indices
            ranked = numbers.expand_as(found).gather(2, order)
            yield places, ranked, ranked >= 0

    def _gains(self, places: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Return the relevance of ranked documents ``(L, Q, K)`` and of all judged ones, descending, ``(Q, J)``."""
        judged = [self.relevance[place] for place in places.tolist()]
        table = numbers.new_zeros(len(judged), len(self.documents) + 1, dtype=torch.float32)  # the last for no document
        row = [place for place, found in enumerate(judged) for _ in found]
        column = [number for found in judged for number in found]
        table[row, column] = torch.tensor([value for found in judged for value in found.values()], device=table.device)
        gains = table.expand(len(numbers), -1, -1).gather(2, numbers % (len(self.documents) + 1))
        every = [
            torch.tensor(sorted([*found.values(), *self.unseen[place]], reverse=True), dtype=torch.float32)
            for place, found in zip(places.tolist(), judged, strict=True)
        ]
        return gains, torch.nn.utils.rnn.pad_sequence(every, batch_first=True).to(numbers.device)


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
    """Return the ranking that mteb's dictionaries ask for.

    Args:
        queries: row of each query, by id.
        documents: row of each document, by id.
        relevant: relevance of documents, by query; queries without any are left out, as trec_eval does.
        top_ranked: ids of the documents that a query ranks; all where it is ``None``.
        score: mteb's name of it, such as ``ndcg_at_10``.
        depth: documents that are kept for each query.
        ignore_identical_ids: leave out the document with the query's own id.
        similarity: the encoder's own.
    """
    numbers = {name: number for number, name in enumerate(sorted(documents, reverse=True))}
    kept = [name for name in queries if name in relevant]
    kind, _, cut = ("recall_at_1" if score == "accuracy" else score).partition("_at_")
    candidates = None
    if top_ranked is not None:
        candidates = [
            torch.tensor(sorted({numbers[document] for document in top_ranked.get(name, ())}), dtype=torch.long)
            for name in kept
        ]
    return Ranking(
        queries=torch.tensor([queries[name] for name in kept]),
        documents=torch.tensor([documents[name] for name in numbers]),
        candidates=candidates,
        relevance=[
            {numbers[document]: float(value) for document, value in relevant[name].items() if document in numbers}
            for name in kept
        ],
        unseen=[
            [float(value) for document, value in relevant[name].items() if document not in numbers] for name in kept
        ],
        same=torch.tensor([numbers.get(name, -1) if ignore_identical_ids else -1 for name in kept]),
        score=kind,
        cut=int(cut),
        depth=depth,
        similarity=similarity,
    )
