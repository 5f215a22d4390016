"""Losses of training: on pairs, on the vectors of a teacher, and on masked tokens."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from sentence_transformers.sentence_transformer import losses
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, mse_loss, normalize

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.extras.settings import Match, TuneSettings
from midlayer_encoders.tasks.training_rows import RowKind
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
    """Move the vectors of texts, or their similarities, toward a teacher's.

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
        terms = []
        if self.match != "similarities":
            terms.append(self.compute_loss_from_embeddings([student], [teacher]))
        if self.match in ("similarities", "both"):
            terms.append(mse_loss(_similarities(student), _similarities(teacher)))
        return torch.stack(terms).sum()


def _similarities(vectors: Tensor) -> Tensor:
    """Return the cosine of each pair of different vectors."""
    units = normalize(vectors.float(), dim=-1)
    first, second = torch.triu_indices(len(units), len(units), offset=1)
    return (units @ units.T)[first, second]


_MASKED_SHARE = 0.2  # of the tokens; 80 % of these are masked, 10 % random, 10 % unchanged: LLM2Vec's recipe
_BLANK = "_"  # stands for a mask token where a tokenizer has none, as in LLM2Vec


class MaskedNextTokenLoss(nn.Module):
    """Predict masked tokens from the states of the positions before them (MNTP).

    Args:
        model: a causal model with bidirectional attention.
        head: output embeddings ``(vocabulary, D)``.
        seed: for the masks of held-out texts, which are the same at every evaluation.
    """

    def __init__(self, model: LayerEncoder, head: Tensor, seed: int) -> None:
        super().__init__()
        self.model = model
        self.head = head
        self.seed = seed
        tokenizer: Any = model.tokenizer
        self.mask_id = tokenizer.convert_tokens_to_ids(tokenizer.mask_token or _BLANK)
        if self.mask_id in (None, tokenizer.unk_token_id):
            raise OptionError(
                f"`objective` must be 'pairs' for {model.name}, whose tokenizer has neither a mask token nor "
                f"{_BLANK!r}. Add a mask token to the tokenizer, and save it with the model."
            )
        self.special_ids = torch.tensor(tokenizer.all_special_ids)

    def maskable(self, features: dict[str, Any]) -> Tensor:
        """Return which tokens can be masked: those after the first that are neither special nor padding."""
        ids = features["input_ids"]
        maskable: Tensor = features["attention_mask"].bool() & ~torch.isin(ids, self.special_ids.to(ids.device))
        maskable[:, 0] = False  # no state comes before it
        return maskable

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return the mean cross-entropy of the masked tokens of a batch."""
        (features,) = sentence_features
        ids = features["input_ids"]
        generator = None if self.model.training else torch.Generator().manual_seed(self.seed)
        masked_ids, masked = mask_tokens(ids, self.maskable(features), self.mask_id, len(self.head), generator)
        states = self.model[0]({**features, "input_ids": masked_ids})["token_embeddings"]
        logits = linear(states[:, :-1][masked[:, 1:]], self.head.to(states.dtype)).float()
        # The sum over no tokens is 0, while their mean is not a number.
        return cross_entropy(logits, ids[masked], reduction="sum") / max(int(masked.sum()), 1)


def mask_tokens(
    ids: Tensor, maskable: Tensor, mask_id: int, vocabulary: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Return token ids in which a fifth of the maskable ones is replaced, and a mask of the tokens to predict."""
    draws = torch.rand(3, *ids.shape, generator=generator).to(ids.device)
    masked = maskable & (draws[0] < _MASKED_SHARE)
    random_ids = (draws[2] * vocabulary).long()
    replaced = torch.where(draws[1] < 0.8, torch.full_like(ids, mask_id), random_ids)
    return torch.where(masked & (draws[1] < 0.9), replaced, ids), masked


def masked_token_head(encoder: LayerEncoder) -> Tensor:
    """Return the output embeddings of a causal model, which predict its masked tokens.

    Raises:
        OptionError: the encoder does not return the states that they read.
    """
    config = encoder.transformer.config
    if not encoder.options.bidirectional:
        raise OptionError(
            "`objective` must be 'pairs' without `bidirectional`: MNTP adapts a causal model to attention in both "
            "directions. Pass bidirectional=True."
        )
    if encoder.norm != "final":
        raise OptionError("`norm` must be 'final' with objective='mntp': the output embeddings read normed states.")
    scales = ("final_logit_softcapping", "logits_scaling", "logit_scale")
    if changed := [name for name in scales if getattr(config, name, None) not in (None, 1, 1.0)]:
        raise OptionError(f"`objective` must be 'pairs' for {encoder.name}, which scales its logits ({changed[0]}).")
    return encoder.output_embeddings().to(encoder.device)
