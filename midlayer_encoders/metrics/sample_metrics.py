"""Metrics that compare the texts of a sample with each other."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, precise, products, result_dtype, unit_rows
from midlayer_encoders.metrics._sample_metric import PairMetric, PooledSampleMetric, SampleMetric, check_pair


def intrinsic_dimension(embeddings: Tensor, *, discard: float = 0.1) -> Tensor:
    r"""Return the intrinsic dimension of the texts from the distances to their two nearest neighbors (TwoNN).

    With :math:`\mu_i = r_{i2} / r_{i1}` in ascending order and :math:`n` of the :math:`N` ratios kept,

    .. math::
        d = \arg\min_d \sum_{i \le n} \Bigl(-\log\bigl(1 - \tfrac{i}{N}\bigr) - d \log \mu_i\Bigr)^2

    (Facco et al., 2017).

    Args:
        embeddings: one row per text, shape ``(N, D)``. Equal rows count as one point.
        discard: share of the largest ratios that are discarded, in ``[0, 1)``.

    Returns:
        Scalar, ``> 0``. NaN if the rows hold NaN or infinity.

    Raises:
        TooFewTextsError: fewer than three different rows, or none whose two neighbors differ in distance.

    Example:
        >>> intrinsic_dimension(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), discard=0.0)
        tensor(1.6788)
    """
    base.check_options(discard=discard)
    points = precise(embeddings)
    if not torch.isfinite(points.sum()):
        return torch.tensor(torch.nan, dtype=result_dtype(embeddings), device=points.device)
    points = torch.unique(points, dim=0)
    base.check_at_least(3, len(points), "Different rows of `embeddings`")
    logs = _log_ratios(points).sort().values
    count = min(max(2, int(len(logs) * (1 - discard))), len(logs) - 1)  # the log diverges at the largest ratio
    base.check_at_least(1, int((logs[:count] > 0).sum()), "Rows whose two nearest neighbors differ in distance")
    share = torch.arange(1, count + 1, dtype=logs.dtype, device=logs.device) / len(logs)
    dimension = (-torch.log1p(-share) * logs[:count]).sum() / logs[:count].square().sum()
    return dimension.to(result_dtype(embeddings))


def _dimensions(embeddings: Tensor, **options: Any) -> Tensor:
    """Return the dimension of each layer, shape ``(L,)``, from vectors ``(L, N, D)``."""
    return torch.stack([intrinsic_dimension(rows, **options) for rows in embeddings])


def _log_ratios(points: Tensor) -> Tensor:
    """Return the logarithm of each point's second over first neighbor distance, shape ``(N,)``."""
    # Products round off the distances of near neighbors, so the distances of a few candidates are computed again.
    points = points - points.mean(dim=0)
    rough = torch.cdist(points, points)
    rough.fill_diagonal_(torch.inf)
    near = rough.topk(min(8, len(points) - 1), largest=False).indices
    exact = base.lengths(points[near] - points.unsqueeze(1)).sort(dim=-1).values
    return exact[:, 1].log() - exact[:, 0].log()


class IntrinsicDimension(PooledSampleMetric, function=intrinsic_dimension, number=_dimensions):
    """:func:`intrinsic_dimension` of one vector per text, per layer.

    Options as in the function and :class:`SampleMetric`. The estimate depends on the number of texts.
    """

    least = 3


#: Texts with fewer tokens are excluded: one token is not half a text.
LEAST_TOKENS = 4


def half_match(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    r"""Return the mean reciprocal rank at which the halves of a text find each other, in both directions.

    .. math::
        \frac{1}{2N} \sum_i \frac{1}{r_{1 \to 2}(i)} + \frac{1}{r_{2 \to 1}(i)}

    where :math:`r_{1 \to 2}(i)` is the rank of text i's second half, by cosine with its first half, among all second
    halves. Equally near halves share the mean of their ranks.

    Args:
        first: mean of each text's first half, shape ``(*, N, D)``, two texts or more.
        second: mean of its second half, shape ``(*, N, D)``.
        center: subtract the mean of all first halves from the first halves, and likewise for the second ones. This
            removes common components, such as a massive first token.

    Returns:
        Shape ``(*)``, above ``0`` and up to ``1``; about ``(log(N) + 0.58) / N`` for independent vectors. NaN if the
        rows hold NaN or infinity.

    Example:
        >>> half_match(torch.eye(4), 2 * torch.eye(4)), half_match(torch.ones(3, 2), torch.ones(3, 2))
        (tensor(1.), tensor(0.5000))
    """
    return half_match_by_text(first, second, center=center).mean(dim=-1).to(result_dtype(first))


def half_match_by_text(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    """Return the reciprocal ranks of each text, shape ``(*, N)``, whose mean over the texts is :func:`half_match`."""
    check_pair(first, second, same_width=True, batched=True)
    halves = [precise(first), precise(second)]
    x, y = (unit_rows(half - half.mean(dim=-2, keepdim=True) if center else half) for half in halves)
    cosine = products(x, y)
    ranks = (_reciprocal_ranks(cosine) + _reciprocal_ranks(cosine.mT)) / 2
    return torch.where(torch.isfinite(cosine.sum(dim=(-2, -1))).unsqueeze(-1), ranks, torch.nan)


def _reciprocal_ranks(cosine: Tensor) -> Tensor:
    """Return the reciprocal rank of each row's diagonal entry, shape ``(*, N)``."""
    true_pairs = cosine.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
    # Equal up to rounding, as cosines are at most 1.
    close = (cosine - true_pairs).abs() <= 16 * torch.finfo(cosine.dtype).eps
    nearer = (cosine > true_pairs) & ~close
    return 2 / (1 + 2 * nearer.sum(dim=-1) + close.sum(dim=-1)).double()


def half_means(states: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each text's first half of tokens and of the rest, shape ``(2, B, D)``, float32 or better.

    Args:
        states: shape ``(B, T, D)``.
        mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.

    Example:
        >>> half_means(torch.tensor([[[1.0], [3.0], [5.0], [9.0]]]), torch.ones(1, 4, dtype=torch.bool)).flatten()
        tensor([2., 7.])
    """
    count = mask.sum(dim=1, keepdim=True)
    early = mask & (mask.cumsum(dim=1) <= count // 2)
    halves = torch.stack([early, mask & ~early])  # (2, B, T)
    # Padding may hold NaN, and NaN times zero is NaN.
    clean = precise(torch.where(mask.unsqueeze(-1), states, 0.0))
    with base.exact_products(clean):
        total = torch.einsum("vbt,btd->vbd", halves.to(clean.dtype), clean)
    return (total / halves.sum(dim=2).clamp(min=1).unsqueeze(-1)).to(result_dtype(states))


class HalfMatch(SampleMetric, function=half_match):
    """:func:`half_match` of each layer, from the token states of one pass: no augmentation, no second pass.

    Texts of fewer than four tokens are excluded. Options as in the function and :class:`SampleMetric`. The
    value decreases with the number of texts.
    """

    kind: ClassVar[Kind] = "tokens"
    views: int = 2
    counted: ClassVar[str] = f"Different texts of {LEAST_TOKENS} tokens or more"

    def update(self, states: Tensor, mask: Tensor, *, layer: int, index: Tensor | None = None) -> None:
        """Add one layer's token states of a batch.

        Args:
            states: shape ``(B, T, D)``.
            mask: which tokens are real, shape ``(B, T)``, bool; padding may be on either side.
            layer: one of ``layers``.
            index: position of each text in the whole list, shape ``(B,)``. By default texts are numbered in order of
                arrival, which does not work with several processes.
        """
        base.check_tokens(states, mask)
        index = self._numbered(layer, len(states), index)
        halves = torch.cat([half_means(*chunk) for chunk in base.chunks(states.detach(), mask)], dim=1)
        long_enough = mask.sum(dim=1) >= LEAST_TOKENS
        index = index.to(states.device)[long_enough]
        for view, rows in enumerate(halves):
            self._store(layer, rows[long_enough], index, view)


def uniformity(embeddings: Tensor, *, t: float = 2.0, center: bool = True) -> Tensor:
    r"""Return the logarithm of the mean Gaussian potential of all pairs of texts on the unit sphere.

    .. math::
        \log \frac{2}{N(N-1)} \sum_{i < j} \exp(-t \lVert u_i - u_j \rVert^2), \qquad
        u_i = \frac{z_i - \bar z}{\lVert z_i - \bar z \rVert}

    (Wang & Isola, 2020, who do not subtract the mean.)

    Args:
        embeddings: one row per text, shape ``(*, N, D)``, two texts or more.
        t: scale of the squared distances, ``> 0``.
        center: subtract the mean of the rows, before they are scaled to unit length.

    Returns:
        Shape ``(*)``, between ``-4 t`` and ``0``; ``0`` for equal rows, about ``-2 t`` for independent directions in
        many dimensions. A row that equals the mean stays zero. NaN if the rows hold NaN or infinity.

    Example:
        >>> uniformity(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])), uniformity(torch.ones(3, 2))
        (tensor(-8.), tensor(0.))
    """
    base.check_options(t=t)
    base.check_at_least(2, embeddings.shape[-2], "Rows of `embeddings`")
    rows = base.prepare_rows(embeddings, None, center=center, unit=True)
    squares = rows.square().sum(dim=-1)
    distances = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * products(rows, rows)
    potentials = -t * distances.clamp(min=0.0)
    potentials.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)  # a text is no pair with itself
    texts = rows.shape[-2]
    number = potentials.flatten(-2).logsumexp(dim=-1) - math.log(texts * (texts - 1))
    return number.to(result_dtype(embeddings))


class Uniformity(PooledSampleMetric, function=uniformity):
    """:func:`uniformity` of one vector per text, per layer.

    Options as in the function and :class:`SampleMetric`.
    """


def cka(first: Tensor, second: Tensor, *, unbiased: bool = False) -> Tensor:
    r"""Return the linear centered kernel alignment of two layers' or models' vectors of the same texts.

    .. math::
        \frac{\operatorname{HSIC}(K, L)}{\sqrt{\operatorname{HSIC}(K, K) \operatorname{HSIC}(L, L)}}, \qquad
        K = X X^\top, \; L = Y Y^\top, \; \operatorname{HSIC}(K, L) = \operatorname{tr}(K H L H)

    (Kornblith et al., 2019), or with the unbiased estimate of HSIC (Nguyen et al., 2021), which does not rise towards 1
    if there are fewer texts than dimensions.

    Args:
        first: one row per text, shape ``(N, D)``, two texts or more; four for ``unbiased``.
        second: rows of the same texts, shape ``(N, E)``.
        unbiased: use the unbiased estimate.

    Returns:
        Scalar, between ``0`` and ``1`` (unbiased: at most ``1``, may be below ``0``); ``0`` if either set is
        constant. NaN if the rows hold NaN or infinity.

    Example:
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> cka(rows, 3 * rows.flip(1) + 5)
        tensor(1.)
    """
    check_pair(first, second, least=4 if unbiased else 2)
    hsic = _unbiased_hsic if unbiased else _hsic
    x, y = _centered_gram(precise(first)), _centered_gram(precise(second))
    norms = hsic(x, x) * hsic(y, y)
    # NaN is unequal to 0 and stays NaN.
    return torch.where(norms == 0, 0.0, hsic(x, y) / norms.sqrt()).to(result_dtype(first))


def _centered_gram(rows: Tensor) -> Tensor:
    rounding = 32 * torch.finfo(rows.dtype).eps * base.lengths(rows).amax()
    rows = rows - rows.mean(dim=0)
    rows = torch.where((base.lengths(rows) <= rounding).unsqueeze(-1), 0.0, rows)
    gram = products(rows, rows)
    # Only ratios matter: this scale keeps the sums of squares from overflow and underflow.
    trace = gram.trace()
    return gram / torch.where(trace == 0, 1.0, trace)


def _hsic(first: Tensor, second: Tensor) -> Tensor:
    return (first * second).sum()


def _unbiased_hsic(first: Tensor, second: Tensor) -> Tensor:
    """Return HSIC without the bias of the diagonal (Song et al., 2012, equation 5), up to a factor that cancels."""
    n = len(first)
    first, second = (gram - torch.diag(gram.diagonal()) for gram in (first, second))
    sums = first.sum() * second.sum() / ((n - 1) * (n - 2))
    crossed = 2 * (first.sum(dim=0) * second.sum(dim=0)).sum() / (n - 2)
    return (first * second).sum() + sums - crossed


class CKA(PairMetric, function=cka):
    """:func:`cka` between the vectors of each layer and the previous layer.

    For two models, call :func:`cka`. Options as in the function and :class:`PairMetric`.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = 4 if self.options["unbiased"] else 2


def neighbor_overlap(first: Tensor, second: Tensor, *, k: int = 10) -> Tensor:
    r"""Return the mean share of each text's k nearest texts that two sets of vectors have in common.

    .. math::
        \frac{1}{N k} \sum_i \bigl| \mathcal{N}_k^X(i) \cap \mathcal{N}_k^Y(i) \bigr|

    (Doimo et al., 2020), by cosine; a zero vector has cosine 0 with all others. Of texts at the same distance, the
    first one counts as nearest.

    Args:
        first: one row per text, shape ``(N, D)``, more than ``k`` texts.
        second: rows of the same texts, shape ``(N, E)``.
        k: number of neighbors, 1 or more.

    Returns:
        Scalar, between ``0`` and ``1``; ``k / (N - 1)`` for independent vectors. NaN if the rows hold NaN or
        infinity.

    Example:
        >>> rows = torch.eye(4) + torch.arange(4.0)
        >>> neighbor_overlap(rows, 2 * rows, k=1)
        tensor(1.)
    """
    base.check_options(k=k)
    check_pair(first, second, least=k + 1)
    near = _neighbors(precise(first), k) & _neighbors(precise(second), k)
    share = near.sum().double() / (len(first) * k)
    return torch.where(torch.isfinite(first.sum() + second.sum()), share, torch.nan).to(result_dtype(first))


def _neighbors(rows: Tensor, k: int) -> Tensor:
    """Return True where text j is among the k nearest of text i, shape ``(N, N)``."""
    rows = unit_rows(rows)
    far = -products(rows, rows)
    far.fill_diagonal_(torch.inf)
    order = far.argsort(dim=-1, stable=True)[:, :k]
    return torch.zeros_like(far, dtype=torch.bool).scatter_(1, order, True)


class NeighborOverlap(PairMetric, function=neighbor_overlap):
    """:func:`neighbor_overlap` between the vectors of each layer and the previous layer.

    Options as in the function and :class:`PairMetric`. The value depends on the number of texts.
    """

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.least = int(self.options["k"]) + 1
