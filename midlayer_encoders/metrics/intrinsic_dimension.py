"""Intrinsic dimension by TwoNN: the dimension of the texts' neighborhoods."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import lengths, precise, result_dtype
from midlayer_encoders.metrics._layer_metric import check_at_least
from midlayer_encoders.metrics._sample_metric import PooledSampleMetric, layer_by_layer
from midlayer_encoders.validation import check_choice

TwoNNForm: TypeAlias = Literal["fit", "mle"]
"""A line through the origin fitted to the empirical distribution, or the maximum-likelihood estimate."""


def intrinsic_dimension(embeddings: Tensor, *, form: TwoNNForm = "fit", discard: float = 0.1) -> Tensor:
    r"""Return the intrinsic dimension of the texts from the distances to their two nearest neighbors (TwoNN).

    With :math:`\mu_i = r_{i2} / r_{i1}` in ascending order and :math:`n` of the :math:`N` ratios kept,

    .. math::
        d = \arg\min_d \sum_{i \le n} \Bigl(-\log\bigl(1 - \tfrac{i}{N}\bigr) - d \log \mu_i\Bigr)^2
        \qquad \text{or} \qquad d = \frac{n - 1}{\sum_{i \le n} \log \mu_i + (N - n) \log \mu_n}

    (Facco et al., 2017, for the fit without the largest tenth of the ratios; the other is the unbiased
    maximum-likelihood estimate of the same law with the largest ratios censored.)

    Args:
        embeddings: one row per text, shape ``(N, D)``. Equal rows count as one point.
        form: ``"fit"`` or ``"mle"``.
        discard: share of the largest ratios that are discarded, in ``[0, 1)``.

    Returns:
        Scalar, ``> 0``. NaN if the rows hold NaN or infinity.

    Raises:
        TooFewTextsError: fewer than three different rows, or none whose two neighbors differ in distance.

    Example:
        >>> intrinsic_dimension(torch.tensor([[0.0], [1.0], [3.0], [7.0]]), form="mle", discard=0.0)
        tensor(1.1527)
    """
    _check_options(form, discard)
    points = precise(embeddings)
    if not torch.isfinite(points.sum()):
        return torch.tensor(torch.nan, dtype=result_dtype(embeddings), device=points.device)
    points = torch.unique(points, dim=0)
    check_at_least(3, len(points), "Different rows of `embeddings`")
    logs = _log_ratios(points).sort().values
    count = max(2, int(len(logs) * (1 - discard)))
    check_at_least(1, int((logs[:count] > 0).sum()), "Rows whose two nearest neighbors differ in distance")
    return (_fit(logs, count) if form == "fit" else _likeliest(logs, count)).to(result_dtype(embeddings))


def _log_ratios(points: Tensor) -> Tensor:
    """Return the logarithm of each point's second over first neighbor distance, shape ``(N,)``."""
    # Products round off the distances of near neighbors, so the distances of a few candidates are computed again.
    points = points - points.mean(dim=0)
    rough = torch.cdist(points, points)
    rough.fill_diagonal_(torch.inf)
    near = rough.topk(min(8, len(points) - 1), largest=False).indices
    exact = lengths(points[near] - points.unsqueeze(1)).sort(dim=-1).values
    return exact[:, 1].log() - exact[:, 0].log()


def _fit(logs: Tensor, count: int) -> Tensor:
    count = min(count, len(logs) - 1)  # the empirical distribution is 1 at the largest ratio, where the log diverges
    share = torch.arange(1, count + 1, dtype=logs.dtype, device=logs.device) / len(logs)
    return (-torch.log1p(-share) * logs[:count]).sum() / logs[:count].square().sum()


def _likeliest(logs: Tensor, count: int) -> Tensor:
    return (count - 1) / (logs[:count].sum() + (len(logs) - count) * logs[count - 1])


def _check_options(form: str, discard: float) -> None:
    check_choice("form", form, get_args(TwoNNForm))
    if not 0 <= discard < 1:
        raise OptionError(f"`discard` must be in [0, 1), but got {discard}.")


class IntrinsicDimension(
    PooledSampleMetric,
    function=intrinsic_dimension,
    check=_check_options,
    number=layer_by_layer(intrinsic_dimension),
):
    """:func:`intrinsic_dimension` of one vector per text, per layer.

    Options are those of the function and of :class:`SampleMetric`. The estimate depends on the number of texts.
    """

    least = 3
