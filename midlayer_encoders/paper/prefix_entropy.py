r"""Prompt entropy along a text (Figure 5): every prefix of it from one forward pass and one Gram matrix.

A causal model gives the tokens of a prefix the states that they have in the whole text, so one pass serves all
prefixes. Centering acts on the Gram matrix itself: with :math:`G = Z Z^\top` of the whole text, prefix :math:`t` needs

.. math::
    A^{(t)}_{ij} = G_{ij} - m_i - m_j + c, \qquad m_i = \tfrac1t \sum_{j \le t} G_{ij}, \quad
    c = \tfrac1t \sum_{i \le t} m_i

which cumulative sums of G give. Scaling to unit length divides by the roots of its diagonal. The order 2 then needs no
prefix's matrix at all; other orders find the spectra of the leading corners, many at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import Normalization, prompt_entropy
from midlayer_encoders.metrics.row_metrics import check_entropy_options, normalized_entropy
from midlayer_encoders.paper.token_ids import check_experiment, experiment_frame, ids_reader, text_values, tokenized
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.spectra import Method, spectral_entropy

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


_ELEMENTS = 2**24  # numbers in the prefixes' matrices at a time: 128 MB in float64
_TOGETHER = 16  # prefixes at a time on a CPU: more would be made too large, fewer would be many calls
_ROUNDING = 64 * torch.finfo(torch.float64).eps


def prefix_entropies(
    states: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    alpha: float = 1.0,
    normalization: Normalization = "raw",
    center: bool = True,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the prompt entropy of prefixes of one text, in nats, from its states.

    .. math::
        S_\alpha\bigl(\hat Z_{1:t}\bigr), \qquad
        \hat z_i = \frac{z_i - \bar z_{1:t}}{\lVert z_i - \bar z_{1:t} \rVert}

    the same as :func:`~midlayer_encoders.metrics.prompt_entropy` of ``states[:t]`` to within rounding, for every t at
    once. A token whose squared distance from the prefix's mean is under ``64 eps`` (float64) of the longest counts as
    equal to it, where :func:`prompt_entropy`, which subtracts vectors, can tell smaller distances from 0.

    Args:
        states: of one text's tokens, shape ``(T, D)``.
        lengths: of the prefixes, each in ``[1, T]``; ``None`` for every one.
        alpha: order, ``> 0``; ``2`` finds no eigenvalues.
        normalization: see :func:`~midlayer_encoders.metrics.matrix_entropy`.
        center: subtract the mean of the prefix's tokens.
        unit: scale each token to unit length, after that.
        method: how eigenvalues are found, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Shape ``(P,)``, float64, one for each length; ``0`` for one token.

    Example:
        >>> prefix_entropies(torch.eye(4), [1, 2, 4], center=False)
        tensor([0.0000, 0.6931, 1.3863], dtype=torch.float64)
    """
    check_entropy_options(alpha, normalization)
    count, width = states.shape
    prefix_lengths = torch.arange(1, count + 1) if lengths is None else torch.tensor(list(lengths), dtype=torch.int64)
    if prefix_lengths.numel() == 0 or int(prefix_lengths.min()) < 1 or int(prefix_lengths.max()) > count:
        raise OptionError(f"`lengths` must be within [1, {count}], the tokens of `states`, but got {lengths}.")
    rows = states.double()
    if center:
        rows = rows - rows.mean(0)  # any fixed shift is as good, and small numbers lose fewer digits
    gram, prefix_lengths = rows @ rows.T, prefix_lengths.to(states.device)
    if alpha == 2:
        return normalized_entropy(
            _collision_entropies(gram, prefix_lengths, center, unit), prefix_lengths, width, normalization
        )
    entropy = torch.empty(len(prefix_lengths), dtype=torch.float64, device=states.device)
    # Prefixes of like length together, each group in the corner of the Gram matrix that it needs.
    most = _TOGETHER if gram.device.type == "cpu" else len(prefix_lengths)
    for group in torch.split(prefix_lengths.argsort(), max(1, min(most, _ELEMENTS // gram.numel()))):
        longest = int(prefix_lengths[group[-1]])
        corner = _prefix_grams(gram[:longest, :longest], prefix_lengths[group], center, unit)
        entropy[group] = spectral_entropy(corner, prefix_lengths[group], alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, prefix_lengths, width, normalization)


def _prefix_grams(gram: Tensor, lengths: Tensor, center: bool, unit: bool) -> Tensor:
    """Return the Gram matrix of each prefix, centered and scaled, in its leading corner; shape ``(P, T, T)``."""
    means, middle, scale = _centering(gram, lengths, center, unit)
    grams = gram - means[:, :, None] - means[:, None, :] + middle[:, None, None]
    return grams.mul_(scale[:, :, None]).mul_(scale[:, None, :])


def _centering(gram: Tensor, lengths: Tensor, center: bool, unit: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what each prefix subtracts from the Gram matrix, ``(P, T)`` and ``(P,)``, and its scales, ``(P, T)``."""
    inside = torch.arange(len(gram), device=gram.device) < lengths[:, None]
    means, middle = torch.zeros_like(inside, dtype=gram.dtype), gram.new_zeros(len(lengths))
    if center:
        means = gram.cumsum(-1)[:, lengths - 1].T / lengths[:, None]
        middle = torch.where(inside, means, 0.0).sum(-1) / lengths
    squares = gram.diagonal() - 2 * means + middle[:, None]
    longest = torch.where(inside, gram.diagonal(), 0.0).amax(-1, keepdim=True)
    nonzero = inside & ~(squares <= (_ROUNDING * longest if center else 0.0))  # True for NaN
    return means, middle, torch.where(nonzero, squares.rsqrt() if unit else torch.ones_like(squares), 0.0)


def _collision_entropies(gram: Tensor, lengths: Tensor, center: bool, unit: bool) -> Tensor:
    """Return the entropies of order 2, shape ``(P,)``, from a few products of ``(P, T)`` by ``(T, T)``.

    The squared Frobenius norm of a prefix's matrix is a quadratic form of its scales: with :math:`w_i` their squares,
    the sum of :math:`w_i w_j (G_{ij} - m_i - m_j + c)^2` is multiplied out, so no matrix is made for a prefix.
    """
    means, middle, scale = _centering(gram, lengths, center, unit)
    weights = scale.square()
    through, weighted = weights @ gram, weights * means
    total, first, second = weights.sum(-1), weighted.sum(-1), (weighted * means).sum(-1)
    norm = (weights @ gram.square() * weights).sum(-1) - 4 * (weighted * through).sum(-1)
    norm += 2 * middle * (through * weights).sum(-1) + 2 * total * second + 2 * first.square()
    norm += (middle * total).square() - 4 * middle * first * total
    trace = (weights * (gram.diagonal() - 2 * means + middle[:, None])).sum(-1)
    entropy: Tensor = 2 * trace.log() - norm.log()
    return entropy.masked_fill(trace == 0, 0.0).clamp_min(0.0)


def entropy_along(
    encoder: LayerEncoder,
    texts: Sequence[str],
    *,
    layers: Sequence[Layer] | str = "all",
    stride: int = 1,
    alpha: float = 1.0,
    normalization: Normalization = "raw",
    max_length: int = 128,
    pass_per_prefix: bool = False,
    dataset: str = "texts",
    token_budget: int = 4096,
) -> pl.DataFrame:
    """Return the tidy frame of prompt entropy along texts: mean and deviation over texts at each position.

    Args:
        encoder: with the whole model.
        texts: such as worked solutions; two or more, of three tokens or more each.
        layers: ``"all"`` or some.
        stride: number of tokens between the measured prefixes.
        alpha: order of the entropy.
        normalization: what it is divided by.
        max_length: tokens after which a text is truncated.
        pass_per_prefix: pass every prefix through the model by itself, which a model that looks ahead needs.
        dataset: what the frame calls the texts.
        token_budget: tokens in a batch.

    Returns:
        The tidy columns, and ``position`` (tokens so far), ``deviation`` (standard deviation over texts) and ``texts``
        (how many are that long).
    """
    check_experiment(encoder, texts)
    if stride < 1:
        raise OptionError(f"`stride` must be a positive number of tokens, but got {stride}.")
    ids = tokenized(encoder, texts, max_length=max_length)
    reader = ids_reader(encoder, layers=layers)
    if not pass_per_prefix and looks_ahead(reader.model, reader.anatomy, reader.preprocess([ids[0]])):
        raise OptionError(
            f"`encoder` must hold a causal model for all prefixes to come from one pass, but the first token of "
            f"{encoder.spec.model} sees the last. Pass `pass_per_prefix=True` (--pass-per-prefix): a pass for each."
        )
    entropies = _entropies_per_prefix if pass_per_prefix else _entropies_in_one_pass
    values = entropies(reader, ids, stride, token_budget, alpha=alpha, normalization=normalization)
    return _along_frame(encoder, reader.layers, values, stride, dataset)


def _entropies_in_one_pass(
    reader: LayerReader, ids: Sequence[Sequence[int]], stride: int, token_budget: int, **options: Any
) -> Tensor:
    """Return the entropy of each layer, text and prefix, ``(L, N, P)``, from one pass over each text."""
    values = _no_values(reader, ids, stride)
    rows = {layer: row for row, layer in enumerate(reader.layers)}

    def tokens(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        for text_states, real, text in zip(states, mask, positions, strict=True):
            lengths = range(stride, len(ids[text]) + 1, stride)
            entropies = prefix_entropies(text_states[real], lengths, **options)
            values[rows[layer], text, : len(entropies)] = entropies.cpu()

    for _ in reader.embed(
        ids, plan_batches([len(text_ids) for text_ids in ids], token_budget=token_budget), tokens=tokens
    ):
        pass
    return values


def _entropies_per_prefix(
    reader: LayerReader, ids: Sequence[Sequence[int]], stride: int, token_budget: int, **options: Any
) -> Tensor:
    """Return the same from a pass over each prefix."""
    values = _no_values(reader, ids, stride)
    places = [(text, place) for text, text_ids in enumerate(ids) for place in range(len(text_ids) // stride)]
    prefixes = [ids[text][: stride * (place + 1)] for text, place in places]
    entropies = text_values(reader, prefixes, partial(prompt_entropy, **options), token_budget=token_budget)
    for (text, place), column in zip(places, entropies.T, strict=True):
        values[:, text, place] = column
    return values


def _no_values(reader: LayerReader, ids: Sequence[Sequence[int]], stride: int) -> Tensor:
    shape = len(reader.layers), len(ids), max(map(len, ids)) // stride
    return torch.full(shape, torch.nan, dtype=torch.float64)


def _along_frame(
    encoder: LayerEncoder, layers: Sequence[int], values: Tensor, stride: int, dataset: str
) -> pl.DataFrame:
    reached = values[0].isfinite().sum(0)
    rows = [
        {
            "layer": layer,
            "name": "prompt_entropy",
            "value": float(reached_values.mean()),
            "position": stride * (place + 1),
            "deviation": float(reached_values.std(correction=0)),
            "texts": len(reached_values),
        }
        for row, layer in enumerate(layers)
        for place in range(int((reached > 0).sum()))
        for reached_values in [values[row, :, place][values[row, :, place].isfinite()]]
    ]
    extra = {"position": pl.Int64(), "deviation": pl.Float64(), "texts": pl.Int64()}
    return experiment_frame(encoder, rows, dataset=dataset, extra=extra)
