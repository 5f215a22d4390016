"""Metrics of the spectrum of a set of rows, exact for any number of rows and in bounded memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, LayerMetric, Normalization
from midlayer_encoders.metrics.eigen import Method, eigenvalues, spectral_entropy


@dataclass(frozen=True)
class Moments:
    """Summary of sets of rows Z.

    Attributes:
        matrix: the smaller of ``Z Z'`` and ``Z' Z``, shape ``(*, n, n)``, of the prepared rows.
        total: sum of the rows, shape ``(*, D)``, before centering.
        count: number of rows N, shape ``(*)``.
        width: their dimension D.
    """

    matrix: Tensor
    total: Tensor
    count: Tensor
    width: int


def _number_of_rows(
    embeddings: Tensor, number: Callable[..., Tensor], *, center: bool, unit: bool, **options: Any
) -> Tensor:
    """Return the numbers of sets of rows ``(*, N, D)``, shape ``(*)``; NaN if they contain NaN or infinity.

    Rows are first scaled to unit length (``unit``), then centered (``center``): in this order they can be accumulated.
    """
    rows = base.prepare_rows(embeddings.double(), None, center=False, unit=unit)
    centered = base.prepare_rows(rows, None, center=True, unit=False) if center else rows
    count = torch.full(rows.shape[:-2], rows.shape[-2], device=rows.device)
    moments = Moments(base.smaller_gram(centered), rows.sum(dim=-2), count, rows.shape[-1])
    return _finite_number(moments, partial(number, **options)).to(base.result_dtype(embeddings))


def _finite_number(moments: Moments, number: Callable[[Moments], Tensor]) -> Tensor:
    # No `if`, which would wait for a GPU.
    finite = torch.isfinite(moments.matrix).all(dim=-1).all(dim=-1)
    return torch.where(finite, number(moments), torch.nan)


class MomentMetric(LayerMetric):
    """A number that depends on the moment matrix of all rows, accumulated as one D x D float64 matrix per layer.

    A subclass passes ``number``, which computes the numbers of sets of rows, shape ``(*)``, from their
    :class:`Moments` and the options other than ``center`` and ``unit``.

    Attributes:
        least: smallest number of rows that has a value.
        center: subtract the mean of all rows, after ``unit``.
        unit: scale each row to unit length.
    """

    least: int = 1

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.center = bool(self.options.get("center", False))
        self.unit = bool(self.options.get("unit", False))
        number_options = {name: value for name, value in self.options.items() if name not in ("center", "unit")}
        self._number_of_moments = partial(self._number, **number_options)
        for layer in self.layers:
            for name in ("rows", "sums"):
                self.add_state(f"{name}_{layer}", [], dist_reduce_fx="cat")

    def _fold(self, layer: int, rows: Tensor, real: Tensor | None = None) -> None:
        """Add prepared rows, shape ``(n, D)``, to the sums of a layer; padding rows are zero, and not ``real``."""
        self._position(layer)
        sums = getattr(self, f"sums_{layer}")
        new = _sums(rows, real).to(self.device)
        sums[:] = [sums[0] + new[None] if sums else new[None]]

    def _values(self) -> Tensor:
        rows = {layer: base.concat_state(getattr(self, f"rows_{layer}")) for layer in self.layers}
        sums = {layer: base.concat_state(getattr(self, f"sums_{layer}")) for layer in self.layers}
        folded = {layer: self._moments(sums[layer].sum(dim=0), rows[layer]) for layer in rows if len(sums[layer])}
        for layer in rows:
            count = int(folded[layer].count) if layer in folded else len(rows[layer])
            base.check_at_least(self.least, count, f"Rows given to {type(self).__name__} at layer {layer}")
        numbers = {layer: _finite_number(moments, self._number_of_moments) for layer, moments in folded.items()}
        few = {layer: layer_rows for layer, layer_rows in rows.items() if layer not in folded}
        numbers |= zip(few, base.in_stacks(list(few.values()), self._number_of_stack), strict=True)
        return base.one_device([numbers[layer] for layer in self.layers])

    def _number_of_stack(self, rows: Tensor) -> Tensor:
        return _number_of_rows(rows.double(), self._number_of_moments, center=self.center, unit=self.unit)

    def _moments(self, sums: Tensor, rows: Tensor) -> Moments:
        """Return the moments of all rows of a layer: the folded ones and those not yet folded."""
        if len(rows):
            sums = sums + _sums(base.prepare_rows(rows.double(), None, center=False, unit=self.unit)).to(sums.device)
        matrix, total, count = sums[:-1, :-1], sums[-1, :-1], sums[-1, -1]
        if self.center:
            centered = matrix - torch.outer(total, total) / count
            # Zero if rows differ from the mean only by rounding.
            rounding = 32 * count.sqrt() * torch.finfo(matrix.dtype).eps * matrix.trace()
            matrix = torch.where(centered.trace() <= rounding, 0.0, centered)
        return Moments(matrix, total, count, len(total))


def _sums(rows: Tensor, real: Tensor | None = None) -> Tensor:
    """Return ``rows' rows`` bordered by the sum of the rows and their number, shape ``(D + 1, D + 1)``, float64."""
    ones = torch.ones_like(rows[:, :1]) if real is None else real.to(rows).unsqueeze(-1)
    rows = torch.cat([rows, ones], dim=1)
    return base.products(rows.mT, rows.mT).double()


class RowMetric(MomentMetric):
    """A number that depends on the spectrum of the texts' vectors, one row per text.

    Exact for any number of texts. Rows are stored in their own dtype (without a copy if they own their memory) until a
    layer has more than 1024 and more than twice as many as dimensions; from then on only the D x D moment matrix in
    float64 is stored. So few texts need a small Gram matrix, and many never need more than D x D.

    A text counts as often as it is passed: shards of several processes must not overlap.
    """

    kind: ClassVar[Kind] = "pooled"

    def update(self, embeddings: Tensor, *, layer: int, index: Tensor | None = None) -> None:
        """Add one layer's vectors of a batch.

        Args:
            embeddings: one row per text, shape ``(B, D)``.
            layer: one of ``layers``.
            index: ignored; other metrics of one vector per text need it.
        """
        base.check_embeddings(embeddings, index)
        self._position(layer)
        rows = getattr(self, f"rows_{layer}")
        rows.append(base.copy_if_view(embeddings))
        if sum(map(len, rows)) > max(1024, 2 * embeddings.shape[-1]):
            prepared_rows = base.prepare_rows(torch.cat(rows).double(), None, center=False, unit=self.unit)
            rows.clear()
            self._fold(layer, prepared_rows)


def matrix_entropy(
    states: Tensor,
    alpha: float = 1.0,
    *,
    mask: Tensor | None = None,
    normalization: Normalization = "raw",
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix-based Rényi entropy of each set of states, in nats.

    .. math::
        S_\alpha(Z) = \frac{1}{1-\alpha} \log \sum_i p_i^\alpha, \qquad
        p_i = \lambda_i(Z Z^\top) / \operatorname{tr}(Z Z^\top)

    Args:
        states: rows to compare, shape ``(*, N, D)``.
        alpha: order, ``> 0``; ``1`` is the limit :math:`-\sum_i p_i \log p_i`.
        mask: which rows are real, shape ``(*, N)``, bool; ``None`` for all.
        normalization: ``"raw"``, or divided by ``"maxEntropy"`` (the smaller of log N and log D), ``"logN"``,
            ``"logD"``, or ``"logNlogD"`` (their product); N counts real rows.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Shape ``(*)``, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for a single row and for zero rows. NaN if
        the rows hold NaN or infinity.

    Example:
        >>> matrix_entropy(torch.eye(4))
        tensor(1.3863)
    """
    base.check_options(alpha=alpha, normalization=normalization)
    mask = base.all_real(states) if mask is None else mask
    gram, sizes = base.token_gram(states, mask, center=False, unit=False)
    entropy = spectral_entropy(gram, sizes, alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, mask.sum(dim=-1), states.shape[-1], normalization).to(base.result_dtype(states))


def _entropy_of_moments(moments: Moments, *, alpha: float, normalization: Normalization, method: Method) -> Tensor:
    # Without the check, nothing waits for a GPU and one NaN text does not stop the others.
    entropy = spectral_entropy(moments.matrix, alpha=alpha, method=method, check=False)
    return normalized_entropy(entropy, moments.count, moments.width, normalization)


def normalized_entropy(entropy: Tensor, count: Tensor, width: int, normalization: Normalization) -> Tensor:
    """Return normalized entropies of ``count`` rows of ``width`` numbers, shape ``(*)``."""
    if normalization == "raw":
        return entropy
    log_n = count.to(entropy).clamp(min=1).log()
    log_d = torch.full_like(log_n, width).log()
    scales = {"logN": log_n, "logD": log_d, "logNlogD": log_n * log_d, "maxEntropy": torch.minimum(log_n, log_d)}
    scale = scales[normalization]
    # One row, or one dimension, has entropy 0 (or NaN, which stays NaN) and the divisor 0.
    return torch.where(scale > 0, entropy / scale, 0.0 * entropy)


class MatrixEntropy(MomentMetric, function=matrix_entropy, number=_entropy_of_moments):
    """Matrix entropy, per layer, of the tokens of all texts as one set of rows.

    :class:`PromptEntropy` reads one text at a time and :class:`DatasetEntropy` one vector per text; this metric reads
    all tokens of the corpus. It stores one D x D float64 matrix per layer and no token states. Options are those of
    :func:`matrix_entropy`, where N counts the tokens of all texts.

    Example:
        >>> metric = MatrixEntropy(layers=[0])
        >>> metric.update(torch.eye(4)[None], torch.ones(1, 4, dtype=torch.bool), layer=0)
        >>> metric.compute()
        tensor([1.3863], dtype=torch.float64)
    """

    kind: ClassVar[Kind] = "tokens"

    def update(self, states: Tensor, mask: Tensor, *, layer: int, index: Tensor | None = None) -> None:  # noqa: ARG002
        """Add one layer's token states of a batch, ``(B, T, D)``, and their mask ``(B, T)``; ``index`` is ignored."""
        base.check_tokens(states, mask)
        for chunk, real in base.chunks(states, mask):
            rows = base.prepare_rows(chunk, real, center=False, unit=False).flatten(0, 1)
            self._fold(layer, rows, real.flatten())


def dataset_entropy(
    embeddings: Tensor,
    alpha: float = 1.0,
    *,
    normalization: Normalization = "raw",
    center: bool = False,
    unit: bool = False,
    method: Method = "auto",
) -> Tensor:
    r"""Return the matrix entropy of one vector per text, in nats.

    .. math::
        S_\alpha(\bar Z), \qquad \bar z_i = \text{the pooled states of text } i

    with :math:`S_\alpha` of :func:`matrix_entropy`.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        alpha: order, ``> 0``.
        normalization: see :func:`matrix_entropy`.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale each row to unit length.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Scalar, between ``0`` and ``log(min(N, D))`` when raw. ``0`` for one text and for equal texts. NaN if the
        rows hold NaN or infinity.

    Example:
        >>> import torch
        >>> dataset_entropy(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]]))
        tensor(0.6931)
    """
    base.check_options(alpha=alpha, normalization=normalization)
    options = {"alpha": alpha, "normalization": normalization, "method": method}
    return _number_of_rows(embeddings, _entropy_of_moments, center=center, unit=unit, **options)


class DatasetEntropy(RowMetric, function=dataset_entropy, number=_entropy_of_moments):
    """:func:`dataset_entropy` of all texts, per layer; exact, see :class:`RowMetric`.

    Options as in the function.
    """


def effective_rank(
    states: Tensor,
    *,
    mask: Tensor | None = None,
    center: bool = False,
    unit: bool = False,
    epsilon: float = 0.0,
    method: Method = "exact",
) -> Tensor:
    r"""Return the effective rank of each set of rows (Roy & Vetterli, 2007), or RankMe (Garrido et al., 2023).

    .. math::
        \operatorname{EffRank}(Z) = \exp\Bigl(-\sum_i q_i \log q_i\Bigr), \qquad
        q_i = \sigma_i(Z) / \textstyle\sum_j \sigma_j(Z) + \epsilon

    over the :math:`\min(N, D)` singular values, not their squares, so
    :math:`\exp S_1(Z) \le \operatorname{EffRank}(Z)`; the paper's Theorem 1 states the opposite. With
    ``epsilon=1e-7`` it is RankMe, the same as ``make_metrics("rankme", …)``.

    Args:
        states: rows, shape ``(*, N, D)``.
        mask: which rows are real, shape ``(*, N)``, bool; ``None`` for all.
        center: subtract the mean of the rows.
        unit: scale rows to unit length, before centering.
        epsilon: added to each share, ``>= 0``.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`; ``"fast"`` loses the small ones.

    Returns:
        Shape ``(*)``, between ``1`` and ``min(N, D)``, up to ``epsilon``; ``0`` if all rows are zero, NaN if they hold
        NaN or infinity.

    Example:
        >>> effective_rank(torch.diag(torch.tensor([1.0, 1.0, 0.0])))
        tensor(2.)
    """
    base.check_options(epsilon=epsilon)
    mask = base.all_real(states) if mask is None else mask
    # float64 on every device: the square root of float32's rounding is 3e-4 of the largest singular value.
    rows = base.prepare_rows(states.double(), mask, center=False, unit=unit)
    gram = base.smaller_gram(base.prepare_rows(rows, mask, center=True, unit=False) if center else rows)
    return rank_of_gram(gram, None, method, epsilon, mask.sum(dim=-1)).to(base.result_dtype(states))


def rank_of_gram(
    gram: Tensor, sizes: Tensor | None, method: Method, epsilon: float = 0.0, count: Tensor | None = None
) -> Tensor:
    """Return the effective rank of Gram or moment matrices, shape ``(*)``; NaN if a matrix is not finite.

    Args:
        gram: shape ``(*, n, n)``.
        sizes: sizes of the leading corners, shape ``(*)``; ``None`` for whole matrices.
        method: eigenvalue method.
        epsilon: added to the share of every singular value.
        count: number of rows of each set, shape ``(*)``, an upper limit of the number of singular values.
    """
    finite = torch.isfinite(gram.diagonal(dim1=-2, dim2=-1).sum(dim=-1))
    values = eigenvalues(torch.where(finite[..., None, None], gram, 0.0), sizes, method=method, check=False)
    # The square root of rounding is not small: it would raise the rank of a rank-one matrix.
    rounding = values[..., :1] * values.shape[-1] * torch.finfo(values.dtype).eps
    sigma = torch.where(values > rounding, values, 0.0).sqrt()
    total = sigma.sum(dim=-1, keepdim=True)
    share = sigma / torch.where(total > 0, total, 1.0)
    if epsilon and count is not None:
        exists = torch.arange(share.shape[-1], device=share.device) < count.unsqueeze(-1)
        share = torch.where(exists, share + epsilon, share)
    rank = torch.special.entr(share).sum(dim=-1).exp()
    return torch.where(finite, torch.where(total[..., 0] > 0, rank, 0.0), torch.nan)


def _rank(moments: Moments, *, epsilon: float, method: Method) -> Tensor:
    return rank_of_gram(moments.matrix, None, method, epsilon, moments.count)


class EffectiveRank(RowMetric, function=effective_rank, number=_rank):
    """:func:`effective_rank` of one vector per text, per layer; exact, see :class:`RowMetric`.

    For the tokens of each text see :class:`PromptEffectiveRank`. Options as in the function.
    """


def logdet_entropy(
    embeddings: Tensor, *, epsilon: float = 0.5, center: bool = False, unit: bool = True, method: Method = "auto"
) -> Tensor:
    r"""Return the coding rate of one vector per text, in nats per text: a log-determinant entropy.

    .. math::
        \tfrac12 \log\det\Bigl(I + \frac{D}{N \epsilon^2}\, Z Z^\top\Bigr)

    the number of nats that coding a row up to a squared error of :math:`\epsilon^2` takes (Ma et al., 2007; Yu et al.,
    2020). It is defined for singular covariances, and small directions count little.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        epsilon: precision of the code, ``> 0``, in the units of the rows.
        center: subtract the mean of the rows, after ``unit``.
        unit: scale each row to unit length; without it the value grows with the scale of the states.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Scalar, ``>= 0``; for unit rows at most ``n / 2 * log(1 + D / (n * epsilon ** 2))`` with ``n = min(N, D)``.
        ``0`` if all rows are zero. NaN if they hold NaN or infinity.

    Example:
        >>> logdet_entropy(torch.eye(2), epsilon=1.0)  # log det of diag(2, 2), halved
        tensor(0.6931)
    """
    _check_precision(epsilon)
    return _number_of_rows(embeddings, _rate, center=center, unit=unit, epsilon=epsilon, method=method)


def _rate(moments: Moments, *, epsilon: float, method: Method) -> Tensor:
    values = eigenvalues(moments.matrix, method=method, check=False)
    return 0.5 * torch.log1p(values * moments.width / (moments.count.unsqueeze(-1) * epsilon**2)).sum(dim=-1)


def _check_precision(epsilon: float) -> None:
    if not epsilon > 0:
        raise OptionError(f"`epsilon` must be greater than 0, but got {epsilon}.")


class LogdetEntropy(RowMetric, function=logdet_entropy, number=_rate):
    """:func:`logdet_entropy` of all texts, per layer; exact, see :class:`RowMetric`. Options as in the function."""

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        _check_precision(self.options["epsilon"])


def alpha_req(
    embeddings: Tensor,
    *,
    first: int = 3,
    last: int = 100,
    weighted: bool = True,
    center: bool = True,
    method: Method = "exact",
) -> Tensor:
    r"""Return the exponent of the power law of the covariance's eigenvalues.

    .. math::
        \lambda_i \propto i^{-\alpha}: \quad
        (\alpha, c) = \arg\min \sum_{i=\text{first}}^{\text{last}} w_i\, (\log \lambda_i - c + \alpha \log i)^2

    with weights :math:`w_i = 1 / i`, which account for the growing density of ranks on a log axis (Stringer et al.,
    2019; Agrawal et al., 2022), or all equal.

    Args:
        embeddings: one row per text, shape ``(N, D)``.
        first: first rank of the fit, from 1; the largest few eigenvalues rarely follow the law.
        last: last rank of the fit, included; lower if the covariance has fewer eigenvalues above rounding.
        weighted: weigh rank i by 1 / i.
        center: subtract the mean of the rows.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`; ``"fast"`` loses the small ones.

    Returns:
        Scalar, ``>= 0``: ``0`` for a flat spectrum, ``1`` at the edge of smooth codes, large for few directions. NaN
        if the rows hold NaN or infinity.

    Raises:
        TooFewTextsError: the covariance has fewer than two eigenvalues in the range of the fit.

    Example:
        >>> alpha_req(torch.diag(torch.arange(1.0, 9.0) ** -0.5), center=False)  # eigenvalues 1, 1/2, ..., 1/8
        tensor(1.0000)
    """
    base.check_options(first=first, last=last)
    options = {"first": first, "last": last, "weighted": weighted, "method": method}
    return _number_of_rows(embeddings, _slope, center=center, unit=False, **options)


def _slope(moments: Moments, *, first: int, last: int, weighted: bool, method: Method) -> Tensor:
    values = eigenvalues(moments.matrix, method=method, check=False)
    slopes = [_slope_of_one(spectrum, first, last, weighted) for spectrum in values.reshape(-1, values.shape[-1])]
    return torch.stack(slopes).reshape(values.shape[:-1])


def _slope_of_one(values: Tensor, first: int, last: int, weighted: bool) -> Tensor:
    """Return the slope of one spectrum, a scalar; NaN if the spectrum is NaN."""
    if torch.isnan(values[0]):
        return values[0]
    # Rows are rounded to float32, so a direction without variance has the square of that rounding, not 0.
    rounding = values[0] * len(values) * torch.finfo(torch.float32).eps ** 2
    values = values[values > rounding][first - 1 : last]
    base.check_at_least(2, len(values), f"Eigenvalues above rounding from rank {first} to {last}")
    rank = torch.arange(first, first + len(values), dtype=values.dtype, device=values.device)
    weight = 1 / rank if weighted else torch.ones_like(rank)
    x, y = (axis - (weight * axis).sum() / weight.sum() for axis in (-rank.log(), values.log()))
    return (weight * x * y).sum() / (weight * x * x).sum()


class AlphaReQ(RowMetric, function=alpha_req, number=_slope):
    """:func:`alpha_req` of all texts, per layer; exact, see :class:`RowMetric`. Options as in the function."""


def anisotropy(embeddings: Tensor) -> Tensor:
    r"""Return the mean cosine over all pairs of different texts.

    .. math::
        \frac{1}{N(N-1)} \sum_{i \ne j} \cos(z_i, z_j)
        = \frac{\lVert \sum_i u_i \rVert^2 - \sum_i \lVert u_i \rVert^2}{N(N-1)}, \qquad u_i = z_i / \lVert z_i \rVert

    (Ethayarajh, 2019, over all pairs instead of a sample).

    Args:
        embeddings: one row per text, shape ``(N, D)``, two texts or more.

    Returns:
        Scalar, between ``-1 / (N - 1)`` and ``1``; ``0`` for random directions. A zero vector has cosine 0 with all
        others. NaN if the rows hold NaN or infinity.

    Example:
        >>> anisotropy(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]]))
        tensor(0.3333)
    """
    if len(embeddings) < 2:
        raise OptionError(f"`embeddings` must be two or more rows, but got {len(embeddings)}.")
    return _number_of_rows(embeddings, _anisotropy, center=False, unit=True)


def _anisotropy(moments: Moments) -> Tensor:
    pairs = moments.count * (moments.count - 1)
    squared_lengths = moments.matrix.diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return (moments.total.square().sum(dim=-1) - squared_lengths) / pairs


class Anisotropy(RowMetric, function=anisotropy, number=_anisotropy):
    """:func:`anisotropy` of all texts, per layer; exact, see :class:`RowMetric`."""

    least = 2

    def __init__(self, layers: Sequence[int], **options: Any) -> None:
        super().__init__(layers, **options)
        self.unit = True
