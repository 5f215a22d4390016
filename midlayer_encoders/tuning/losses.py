"""Losses of training: on pairs, and on the vectors of a teacher."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.tuning.settings import Match, TuneSettings
from midlayer_encoders.tuning.training_rows import RowKind
from midlayer_encoders.validation import check_count, check_list

_SCALE = 20.0  # of a cosine, as in sentence-transformers' ranking loss


class LabelRankingLoss(nn.Module):
    """Rank the positive of each anchor above the positives of other labels in the batch.

    Unlike ``MultipleNegativesRankingLoss``, positives of the anchor's label are not negatives: with 77 labels and 32
    pairs per batch, four in ten anchors would have such a false negative.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        vectors = (self.model(features)["sentence_embedding"] for features in sentence_features)
        anchors, positives = (normalize(rows, dim=-1) for rows in vectors)
        diagonal = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        same_label = (labels[:, None] == labels[None]) & ~diagonal
        scores = (_SCALE * anchors @ positives.T).masked_fill(same_label, -torch.inf)
        return cross_entropy(scores, torch.arange(len(labels), device=labels.device))


_LOSSES: dict[RowKind, Callable[[Any], nn.Module]] = {
    "labels": LabelRankingLoss,
    "scored": losses.CoSENTLoss,
    "pairs": losses.MultipleNegativesRankingLoss,
}


def pair_loss(encoder: LayerEncoder, kind: RowKind, settings: TuneSettings) -> nn.Module:
    """Return the loss: ranking among in-batch negatives, or the order of scores (CoSENT)."""
    mini_batch = settings.mini_batch
    loss: nn.Module
    if mini_batch is not None:
        if kind != "pairs":
            raise OptionError("`mini_batch` must be None for rows with scores or labels: it is for in-batch negatives.")
        loss = losses.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=check_count("mini_batch", mini_batch))
    else:
        loss = _LOSSES[kind](encoder)
    if settings.matryoshka is not None:
        loss = losses.MatryoshkaLoss(encoder, loss, _dimensions(settings.matryoshka, encoder))
    return loss


def _dimensions(matryoshka: Sequence[int], encoder: LayerEncoder) -> list[int]:
    """Return the numbers of dimensions to train, the whole width first."""
    width = encoder.get_embedding_dimension() or 0
    sizes = [check_count("matryoshka", size, "dimensions") for size in check_list("matryoshka", matryoshka, "numbers")]
    if max(sizes) > width:
        raise OptionError(f"`matryoshka` must be at most {width}, the width of {encoder.name}, but got {max(sizes)}.")
    return sorted({*sizes, width}, reverse=True)


class DistillLoss(losses.EmbedDistillLoss):
    """Move the vectors of texts, or their similarities, toward those of a teacher.

    Args:
        model: the student.
        vectors: vectors ``(N, D)`` of the teacher; the label of a text is its row.
        match: ``"vectors"`` for their cosine, ``"centered"`` for the cosine with the teacher's unit vectors minus their
            mean, ``"similarities"`` for the cosines between the texts of a batch.
    """

    vectors: Tensor

    def __init__(self, model: Any, vectors: Tensor, match: Match) -> None:
        super().__init__(model, distance_metric="cosine")
        self.match = match
        if match == "centered":
            vectors = normalize(vectors, dim=-1)
            vectors = vectors - vectors.mean(0)
        self.register_buffer("vectors", vectors, persistent=False)

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Return the mean loss of a batch."""
        (features,) = sentence_features
        student = self.model(features)["sentence_embedding"]
        assert labels is not None
        teacher = self.vectors[labels].to(student)
        if self.match == "similarities":
            return mse_loss(_similarities(student), _similarities(teacher))
        return self.compute_loss_from_embeddings([student], [teacher])


def _similarities(vectors: Tensor) -> Tensor:
    """Return the cosine of each pair of different vectors."""
    units = normalize(vectors.float(), dim=-1)
    first, second = torch.triu_indices(len(units), len(units), offset=1)
    return (units @ units.T)[first, second]
