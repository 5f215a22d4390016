"""What is minimized for each kind of pairs, and which rows may share a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sentence_transformers.base.sampler import BatchSamplers
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tuning.training_pairs import Kind
from midlayer_encoders.validation import check_count, check_list

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = ["LabelRankingLoss", "batch_sampler", "make_loss"]

_SCALE = 20.0  # of a cosine, as in sentence-transformers' ranking loss


class LabelRankingLoss(nn.Module):
    """Ranks the positive of each anchor above the positives of other labels in the batch.

    It is ``MultipleNegativesRankingLoss`` but for the positives of the anchor's own label, which are no negatives:
    with 77 labels and 32 pairs a batch, four in ten anchors would have one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        anchors, positives = (
            normalize(self.model(features)["sentence_embedding"], dim=-1) for features in sentence_features
        )
        own = torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        alike = (labels[:, None] == labels[None]) & ~own
        scores = (_SCALE * anchors @ positives.T).masked_fill(alike, -torch.inf)
        return cross_entropy(scores, torch.arange(len(labels), device=labels.device))


def batch_sampler(kind: Kind) -> Any:
    """Return how batches are drawn: among in-batch negatives no text twice."""
    return BatchSamplers.NO_DUPLICATES if kind == "pairs" else BatchSamplers.BATCH_SAMPLER


def make_loss(
    encoder: LayerEncoder,
    kind: Kind,
    *,
    mini_batch: int | None = None,
    matryoshka: Sequence[int] | None = None,
    adaptive: bool = False,
) -> nn.Module:
    """Return the loss: ranking among in-batch negatives, or the order of scores (CoSENT).

    Args:
        encoder: that is tuned.
        kind: of the pairs.
        mini_batch: rows that are in memory at a time; the gradient is that of the whole batch.
        matryoshka: numbers of leading dimensions that are trained too.
        adaptive: whether earlier layers are trained too.
    """
    if mini_batch is not None and (kind != "pairs" or adaptive):
        why = "with `adaptive`" if adaptive else "for rows with scores or labels"
        raise OptionError(f"`mini_batch` must be None {why}: only in-batch negatives alone are computed in parts.")
    loss: nn.Module
    if mini_batch is not None:
        loss = losses.CachedMultipleNegativesRankingLoss(encoder, mini_batch_size=check_count("mini_batch", mini_batch))
    elif kind == "labels":
        loss = LabelRankingLoss(encoder)
    else:
        loss = (losses.CoSENTLoss if kind == "scored" else losses.MultipleNegativesRankingLoss)(encoder)
    if matryoshka is not None:
        loss = losses.MatryoshkaLoss(encoder, loss, _dimensions(matryoshka, encoder))
    if adaptive:  # around the other, as in Matryoshka2dLoss: it counts layers as the model runs, which the other keeps
        _check_adaptive(encoder)
        loss = losses.AdaptiveLayerLoss(encoder, loss)
    return loss


def _check_adaptive(encoder: LayerEncoder) -> None:
    """Raise where ``AdaptiveLayerLoss`` would train other states than a cut at an earlier layer reads."""
    if encoder.norm == "final" and encoder.anatomy.final:
        raise OptionError(
            f"`adaptive` must be False for {encoder.name} with norm='final': AdaptiveLayerLoss pools the raw states "
            "of earlier layers, but an encoder that is cut there applies the model's final norm "
            f"({', '.join(encoder.anatomy.final)}) to them: what is trained would not be what is used. Pass "
            "norm='none', or tune each depth by itself."
        )


def _dimensions(wanted: Sequence[int], encoder: LayerEncoder) -> list[int]:
    """Return the numbers of dimensions to train, the whole width first."""
    width = encoder.get_embedding_dimension() or 0
    sizes = [check_count("matryoshka", size, "dimensions") for size in check_list("matryoshka", wanted, "numbers")]
    if max(sizes) > width:
        raise OptionError(f"`matryoshka` must be at most {width}, the width of {encoder.name}, but got {max(sizes)}.")
    return sorted({*sizes, width}, reverse=True)
