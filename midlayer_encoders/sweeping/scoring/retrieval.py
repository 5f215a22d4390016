"""Retrieval and reranking with trec_eval's scores, for all layers at once; a large corpus is read block by block."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from sentence_transformers.util import SimilarityFunction
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.sweeping.scoring.pairs import pair_similarities
from midlayer_encoders.sweeping.scoring.resampling import resampled_means

_BLOCK = 1 << 24  # numbers of a block of similarities or documents, or of the best similarities: 64 MiB

#: Names of scores, before ``_at_10``.
RANKING_SCORES = ("ndcg", "map", "recall", "precision", "mrr", "hit_rate")


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


#: Returns the vectors of some of a task's rows, shape ``(N, D)``.
ReadRows: TypeAlias = Callable[[Tensor], Tensor]

#: Similarities and numbers ``(Q, K)`` of the most similar documents of each part of the queries.
_Best: TypeAlias = Sequence[tuple[Tensor, Tensor]]


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

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean over queries, rounded like mteb's ``(L,)``, and means over resampled queries ``(L, S)``."""
        if self.candidates is not None:
            return self._means(self._rerank(vectors))
        read_layers = [layer.__getitem__ for layer in vectors]
        layers = [self.resampled_in_blocks(read, vectors.shape[2], vectors.device) for read in read_layers]
        scores, resampled = zip(*layers, strict=True)
        return torch.cat(scores), torch.cat(resampled)

    def resampled_in_blocks(self, read: ReadRows, dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the same of one layer, for queries that rank all documents, which are read block by block.

        Args:
            read: called in another thread, one block ahead.
            dim: number D of dimensions of the vectors.
            device: device of the vectors.
        """
        return self._means(self._search(read, max(_BLOCK // dim, 1), device))

    def _means(self, rankings: Iterator[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        by_query = []
        for places, numbers, valid in rankings:
            gains, ideal = self._gains(places, numbers)
            valid = valid & (numbers != self.same.to(numbers.device)[places][:, None])
            by_query.append(ranking_score(gains, valid, ideal, score=self.score, cut=self.cut))
        mean = torch.stack([block.sum(dim=1) for block in by_query]).sum(dim=0) / len(self.queries)
        rounded = mean if self.score == "mrr" else (mean * 1e5).round() / 1e5
        return rounded, resampled_means(torch.cat(by_query, dim=1))

    def size_per_layer(self, rows: int, dim: int) -> int:
        """Return approximately how many numbers of four bytes a layer needs."""
        return 3 * rows * dim

    def _search(self, read: ReadRows, block: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield groups of queries: places, ranked documents ``(1, Q, K)``, and which are valid.

        Args:
            read: returns the vectors of rows.
            block: documents that are read at a time.
            device: device of the vectors.
        """
        blocks = torch.split(self.documents.argsort(), block)  # in the order of rows: nearby rows are stored together
        all_queries = read(self.queries.to(device))
        documents = self.documents.to(device)
        depth = min(self.depth + 1, len(documents))
        for places in torch.split(torch.arange(len(all_queries), device=device), max(_BLOCK // depth, 1)):
            queries = torch.split(all_queries[places], max(_BLOCK // min(block, len(documents)), 1))
            best: _Best = [(part[:, :0], part[:, :0].long()) for part in queries]
            rows = (numbers.to(device) for numbers in blocks)
            for numbers, following in ahead(lambda numbers: read(documents[numbers]), rows, depth=1):
                best = self._closer(best, queries, following(), numbers, depth)
            similarities, numbers = (torch.cat(parts) for parts in zip(*best, strict=True))
            by_id = numbers.argsort(dim=1)  # ties in the order of their ids
            order = similarities.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, : self.depth]
            numbers = numbers.gather(1, by_id).gather(1, order)[None]
            yield places, numbers, torch.ones_like(numbers, dtype=torch.bool)

    def _closer(self, best: _Best, queries: Sequence[Tensor], documents: Tensor, numbers: Tensor, depth: int) -> _Best:
        """Return the most similar documents of each query among those found before and the documents of a block."""
        similarity = SimilarityFunction.to_similarity_fn(self.similarity)
        merged = []
        for (values, ranked), part in zip(best, queries, strict=True):
            similarities = similarity(part, documents)
            closest = similarities.topk(min(depth, similarities.shape[1]), dim=1)
            values = torch.cat([values, closest.values], dim=1)
            ranked = torch.cat([ranked, numbers[closest.indices]], dim=1)
            top = values.topk(min(depth, values.shape[1]), dim=1)
            merged.append((top.values, ranked.gather(1, top.indices)))
        return merged

    def _rerank(self, vectors: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield the same for queries that rank only their candidates."""
        assert self.candidates is not None
        longest = max(map(len, self.candidates), default=0)
        size = max(_BLOCK // (len(vectors) * max(longest, 1)), 1)
        documents = self.documents.to(vectors.device)
        for places in torch.split(torch.arange(len(self.queries)), size):
            candidates = [self.candidates[place].sort().values for place in places]
            numbers = pad_sequence(candidates, batch_first=True, padding_value=-1).to(vectors.device)
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
        # Judged documents, sorted by query and number; a table of all documents would grow with the corpus.
        count = len(self.documents) + 1
        pairs = sorted(
            (row * count + number, gain) for row, grades in enumerate(judged) for number, gain in grades.items()
        )
        keys = torch.tensor([key for key, _ in pairs] + [len(judged) * count], device=numbers.device)
        values = torch.tensor([gain for _, gain in pairs] + [0.0], device=numbers.device)
        ranked_keys = numbers + count * torch.arange(len(judged), device=numbers.device)[:, None]
        places_in_keys = torch.searchsorted(keys, ranked_keys)
        gains = torch.where(keys[places_in_keys] == ranked_keys, values[places_in_keys], 0)
        ideal = [
            torch.tensor(sorted([*relevance.values(), *self.outside[place]], reverse=True), dtype=torch.float32)
            for place, relevance in zip(places.tolist(), judged, strict=True)
        ]
        return gains, pad_sequence(ideal, batch_first=True).to(numbers.device)


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
