"""The loss and the batch sampler for each kind of pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tuning.training_pairs import PairKind
from midlayer_encoders.validation import check_count, check_list

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

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
        anchors, positives = (
            normalize(self.model(features)["sentence_embedding"], dim=-1) for features in sentence_features
        )
        diagonal = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        same_label = (labels[:, None] == labels[None]) & ~diagonal
        scores = (_SCALE * anchors @ positives.T).masked_fill(same_label, -torch.inf)
        return cross_entropy(scores, torch.arange(len(labels), device=labels.device))


def batch_sampler(kind: PairKind) -> Any:
    """Return the batch sampler: with in-batch negatives, no text occurs twice in a batch."""
    return BatchSamplers.NO_DUPLICATES if kind == "pairs" else BatchSamplers.BATCH_SAMPLER


def make_loss(
    encoder: LayerEncoder,
    kind: PairKind,
    *,
    mini_batch: int | None = None,
    matryoshka: Sequence[int] | None = None,
    adaptive: bool = False,
) -> nn.Module:
    """Return the loss: ranking among in-batch negatives, or the order of scores (CoSENT).

    Args:
        encoder: to tune.
        kind: of the pairs.
        mini_batch: rows in memory at a time; the gradient is that of the whole batch.
        matryoshka: numbers of leading dimensions to train too.
        adaptive: whether to train earlier layers too.
    """
    if mini_batch is not None and (kind != "pairs" or adaptive):
        reason = "with `adaptive`" if adaptive else "for rows with scores or labels"
        raise OptionError(f"`mini_batch` must be None {reason}: it applies to in-batch negatives only.")
    loss: nn.Module
    if mini_batch is not None:
        loss = losses.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=check_count("mini_batch", mini_batch))
    elif kind == "labels":
        loss = LabelRankingLoss(encoder)
    elif kind == "scored":
        loss = losses.CoSENTLoss(encoder)
    else:
        loss = losses.MultipleNegativesRankingLoss(encoder)
    if matryoshka is not None:
        loss = losses.MatryoshkaLoss(encoder, loss, _dimensions(matryoshka, encoder))
    if adaptive:  # outermost, as in Matryoshka2dLoss
        _check_adaptive(encoder)
        loss = losses.AdaptiveLayerLoss(encoder, loss)
    return loss


def _check_adaptive(encoder: LayerEncoder) -> None:
    """Raise if ``AdaptiveLayerLoss`` would train other states than a cut at an earlier layer reads."""
    if encoder.norm == "final" and encoder.anatomy.final:
        raise OptionError(
            f"`adaptive` must be False for {encoder.name} with norm='final': AdaptiveLayerLoss pools the raw states "
            "of earlier layers, but an encoder that is cut there applies the model's final norm "
            f"({', '.join(encoder.anatomy.final)}) to them. Pass norm='none', or tune each depth separately."
        )


def _dimensions(matryoshka: Sequence[int], encoder: LayerEncoder) -> list[int]:
    """Return the numbers of dimensions to train, the whole width first."""
    width = encoder.get_embedding_dimension() or 0
    sizes = [check_count("matryoshka", size, "dimensions") for size in check_list("matryoshka", matryoshka, "numbers")]
    if max(sizes) > width:
        raise OptionError(f"`matryoshka` must be at most {width}, the width of {encoder.name}, but got {max(sizes)}.")
    return sorted({*sizes, width}, reverse=True)
