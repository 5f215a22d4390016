"""LiDAR: the entropy of the differences between texts relative to those between the views of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics._gram import full_precision, precise, result_dtype, smaller_gram
from midlayer_encoders.metrics._sample_metric import ViewMetric
from midlayer_encoders.spectra import Method, spectral_entropy


def lidar(views: Tensor, *, delta: float = 1e-4, exponential: bool = False, method: Method = "auto") -> Tensor:
    r"""Return the entropy of the spectrum of linear discriminant analysis with each text as a class, in nats.

    .. math::
        S_1\bigl(S_w^{-1/2} S_b S_w^{-1/2}\bigr), \quad
        S_b = \frac{1}{N-1} \sum_i (\mu_i - \mu)(\mu_i - \mu)^\top, \quad
        S_w = \frac{1}{N(V-1)} \sum_{i,v} (x_{iv} - \mu_i)(x_{iv} - \mu_i)^\top + \delta I

    with :math:`\mu_i` the mean of text i's views and :math:`\mu` the mean of those. Thilak et al. (2024) define LiDAR
    as :math:`\exp S_1`, with a small constant added to each share as in RankMe; ``exponential=True``, or
    ``make_metrics("exp_lidar", …)``, returns that without the constant. "Layer by Layer" plots the entropy.

    Args:
        views: V views of N texts, shape ``(V, N, D)``, two or more of each.
        delta: added to the within-text scatter, ``> 0``; in the units of the vectors, squared.
        exponential: return exp of the entropy, between 1 and ``min(N - 1, D)``: exp-LiDAR.
        method: eigenvalue method, see :mod:`midlayer_encoders.spectra`.

    Returns:
        Scalar, between ``0`` and ``log(min(N - 1, D))``; ``0`` if all texts have the same mean. NaN if the views hold
        NaN or infinity, or are so large that ``delta`` is lost in their rounding.

    Example:
        >>> lidar(torch.eye(4).expand(2, 4, 4))  # four orthogonal texts span three dimensions: log 3
        tensor(1.0986)
    """
    _check_delta(delta)
    if views.ndim != 3 or min(views.shape[:2]) < 2:
        raise OptionError(
            f"`views` must be (V, N, D) with two or more views and texts, but got {tuple(views.shape)}: "
            "the scatter within a text needs two views, and the scatter between texts two texts."
        )
    return _lidar(*precise(views), delta=delta, exponential=exponential, method=method).to(result_dtype(views))


def _lidar(*views: Tensor, delta: float, exponential: bool, method: Method) -> Tensor:
    """Return LiDAR of views, each ``(*, N, D)``: shape ``(*)``."""
    entropy = _entropy(torch.stack(views, dim=-3), delta, method)
    return entropy.exp() if exponential else entropy


def _entropy(views: Tensor, delta: float, method: Method) -> Tensor:
    """Return the entropy of views, ``(*, V, N, D)``: shape ``(*)``."""
    num_views, texts = views.shape[-3:-1]
    means = views.mean(dim=-3, keepdim=True)
    within = (views - means).flatten(-3, -2) / (texts * (num_views - 1)) ** 0.5
    means = means.squeeze(-3)
    between = (means - means.mean(dim=-2, keepdim=True)) / (texts - 1) ** 0.5
    with full_precision(views.device):
        scatter = within.mT @ within
        scatter.diagonal(dim1=-2, dim2=-1).add_(delta)
        # With S_w = C C', the spectrum of C^-1 S_b C^-T is that of S_w^-1/2 S_b S_w^-1/2.
        # Not `cholesky`, which waits for the GPU to check that the factor exists.
        factor, failed = torch.linalg.cholesky_ex(scatter)
        whitened = torch.linalg.solve_triangular(factor, between.mT, upper=False).mT
    entropy = spectral_entropy(smaller_gram(whitened), method=method, check=False)
    return torch.where(failed == 0, entropy, torch.nan)


def _check_delta(delta: float) -> None:
    if not delta > 0:
        raise OptionError(f"`delta` must be greater than 0, or the scatter has no inverse, but got {delta}.")


class LiDAR(ViewMetric, function=lidar, check=_check_delta, number=_lidar):
    """:func:`lidar` of all views of each text, per layer.

    ``views`` is the number of views of each text, 2 or more; the other options are those of the function and of
    :class:`SampleMetric`. ``max_samples`` is half of the other metrics' default because there are many views.
    """

    def __init__(self, layers: Sequence[int], *, views: int = 16, max_samples: int = 500, **options: Any) -> None:
        if views < 2:
            raise OptionError(f"`views` must be 2 or more, but got {views}.")
        super().__init__(layers, max_samples=max_samples, **options)
        self.views = views
