"""Tasks on pairs, with gold similarities or labels, for all layers at once."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from sentence_transformers.util import SimilarityFunction
from sklearn.metrics import average_precision_score
from sklearn.metrics.pairwise import paired_cosine_distances
from torch import Tensor
from torch.nn.functional import normalize

from midlayer_encoders.sweeping.scoring.resampling import correlations, resampled_precisions

_BLOCK = 1 << 24  # numbers of a block of pairs: 64 MiB


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    if ((first[:1] == 0) | (first[:1] == 1)).all():  # binary vectors, whose many ties mteb breaks by rounding
        return 1 - torch.from_numpy(paired_cosine_distances(first.cpu().numpy(), second.cpu().numpy())).to(first)
    # The formula that scikit-learn uses in float32, so that equal values there are equal here.
    return 1 - 0.5 * (normalize(first, dim=-1) - normalize(second, dim=-1)).square().sum(dim=-1)


#: Similarities by mteb's name, from vectors ``(*, D)`` to numbers ``(*)``; larger means more similar.
MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine": _cosine,
    "manhattan": lambda first, second: -(first - second).abs().sum(dim=-1),
    "euclidean": lambda first, second: -(first - second).square().sum(dim=-1).sqrt(),
    "dot": lambda first, second: (first * second).sum(dim=-1),
}


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

    def similarities(self, vectors: Tensor, measure: str) -> Tensor:
        """Return the similarity of each pair at each layer, in float64 on the CPU, shape ``(L, P)``."""
        values = pair_similarities(vectors, self.first, self.second, measure=measure, similarity=self.similarity)
        return values.double().cpu()

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
        >>> StsPairs(first, second, gold, "cosine_spearman").bootstrap(vectors)[0]
        tensor([0.5000], dtype=torch.float64)
    """

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the correlation with the gold similarities ``(L,)``, and scores on resampled pairs ``(L, S)``.

        NaN if one of them is constant. Ranks are those among all pairs.
        """
        measure, _, kind = self.score.rpartition("_")
        rows = torch.cat([self.targets[None].double(), self.similarities(vectors, measure or "similarity")])
        if kind == "spearman":
            rows = torch.from_numpy(stats.rankdata(rows.numpy(), axis=1))
        values = correlations(rows[1:], rows[0]).to(vectors.device)
        return values[:, 0], values[:, 1:]


@dataclass(frozen=True)
class LabeledPairs(_Pairs):
    """Pairs with labels.

    ``score`` is ``max_ap`` for the best of all measures, or the name of one, such as ``dot_ap``; ``similarity_ap`` is
    the encoder's similarity.

    Example:
        >>> vectors = torch.tensor([[[1.0, 0.0], [1.0, 0.1], [0.0, 1.0]]])
        >>> pairs = LabeledPairs(torch.tensor([0, 0]), torch.tensor([1, 2]), torch.tensor([1, 0]), "max_ap")
        >>> pairs.bootstrap(vectors)[0]
        tensor([1.], dtype=torch.float64)
    """

    def bootstrap(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the average precision ``(L,)``, and scores on resampled pairs ``(L, S)``.

        The measure is the one that is best on all pairs.
        """
        measures = ("similarity", *MEASURES) if self.score == "max_ap" else (self.score.removesuffix("_ap"),)
        similarities = torch.stack([self.similarities(vectors, measure) for measure in measures]).nan_to_num()
        positive = self.targets == 1
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of targets without a positive pair
            precisions = [
                [average_precision_score(positive.numpy(), row) for row in layers.numpy()] for layers in similarities
            ]
        scores, best = torch.tensor(precisions, dtype=torch.float64, device=vectors.device).max(dim=0)
        chosen = similarities[best.cpu(), torch.arange(len(vectors))].to(vectors)
        return scores, resampled_precisions(chosen, positive)
