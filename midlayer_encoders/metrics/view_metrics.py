"""Metrics that compare texts with views of them: augmented copies."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import _layer_metric as base
from midlayer_encoders.metrics._layer_metric import Kind, precise, products, result_dtype, unit_rows
from midlayer_encoders.metrics._sample_metric import ViewMetric, check_pair
from midlayer_encoders.metrics.eigen import Method, spectral_entropy
from midlayer_encoders.validation import check_count


def infonce(first: Tensor, second: Tensor, *, temperature: float = 0.1) -> Tensor:
    r"""Return the InfoNCE loss of two views of each text, in nats.

    .. math::
        -\frac{1}{2N} \sum_{i=1}^{2N} \log
        \frac{\exp(\cos(u_i, u_{i'}) / \tau)}{\sum_{j \ne i} \exp(\cos(u_i, u_j) / \tau)}

    over the 2N views u of both sides, i' being the other view of i's text.

    Args:
        first: one view of each text, shape ``(*, N, D)``, two texts or more.
        second: another view of the same texts, shape ``(*, N, D)``.
        temperature: :math:`\tau`, ``> 0``.

    Returns:
        Shape ``(*)``, ``>= 0``; at chance ``log(2N - 1)``. A zero vector has cosine 0 with all others. NaN if the views
        hold NaN or infinity.

    Example:
        >>> infonce(torch.ones(4, 3), torch.ones(4, 3))  # at chance, log 7
        tensor(1.9459)
    """
    base.check_options(temperature=temperature)
    check_pair(first, second, same_width=True, batched=True)
    views = torch.cat([unit_rows(precise(first)), unit_rows(precise(second))], dim=-2)
    cosine = products(views, views) / temperature
    cosine.diagonal(dim1=-2, dim2=-1).fill_(-torch.inf)  # a view is not compared with itself
    texts = first.shape[-2]
    positive = torch.cat([cosine.diagonal(offset, dim1=-2, dim2=-1) for offset in (texts, -texts)], dim=-1)
    return (cosine.logsumexp(dim=-1) - positive).mean(dim=-1).to(result_dtype(first))


class InfoNCE(ViewMetric, function=infonce):
    """:func:`infonce` of views 0 and 1 of each text, per layer.

    Options as in the function and :class:`SampleMetric`. The loss grows with the number of texts.
    """


def dime(
    first: Tensor,
    second: Tensor,
    *,
    alpha: float = 1.0,
    permutations: int = 10,
    seed: int = 0,
    unit: bool = True,
    method: Method = "auto",
) -> Tensor:
    r"""Return the difference of matrix entropies of two views of each text, in nats.

    .. math::
        \mathbb{E}_\Pi\, S_\alpha(K_x \circ \Pi K_y \Pi^\top) - S_\alpha(K_x \circ K_y)

    with :math:`K_x = X X^\top`, :math:`\circ` the elementwise product and :math:`\Pi` a random permutation of texts. It
    is a kernel measure of the views' dependence (Skean et al., 2023).

    Args:
        first: one view of each text, shape ``(*, N, D)``, two texts or more.
        second: another view of the same texts, shape ``(*, N, E)``.
        alpha: order of the entropy, ``> 0``.
        permutations: number of random permutations.
        seed: seed of the permutations.
        unit: scale vectors to unit length, so that each kernel has a diagonal of ones, as matrix entropy assumes.
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Shape ``(*)``, at most ``log(N)``; 0 for independent views, and negative if a permutation fits better than the
        true pairs. NaN if the views hold NaN or infinity.

    Example:
        >>> dime(torch.ones(4, 2), torch.eye(4))  # one view is the same for every text
        tensor(0.)
    """
    base.check_options(alpha=alpha, permutations=permutations)
    check_pair(first, second, batched=True)
    orders = _orders(first.shape[-2], permutations, seed).to(first.device, non_blocking=True)
    shuffled = _kernel(second, unit)[..., orders[:, :, None], orders[:, None, :]]
    entropies = spectral_entropy(_kernel(first, unit).unsqueeze(-3) * shuffled, alpha=alpha, method=method, check=False)
    return (entropies[..., 1:].mean(dim=-1) - entropies[..., 0]).to(result_dtype(first))


def _kernel(rows: Tensor, unit: bool) -> Tensor:
    rows = unit_rows(precise(rows)) if unit else precise(rows)
    return products(rows, rows)


def _orders(count: int, permutations: int, seed: int) -> Tensor:
    """Return the identity and then random permutations, shape ``(1 + permutations, count)``."""
    generator = torch.Generator().manual_seed(seed)
    shuffled = [torch.randperm(count, generator=generator) for _ in range(permutations)]
    return torch.stack([torch.arange(count), *shuffled])


class DiME(ViewMetric, function=dime):
    """:func:`dime` of views 0 and 1 of each text, per layer.

    The most expensive metric: it finds ``permutations + 1`` spectra of the sample's size per layer. Options are those
    of the function and of :class:`SampleMetric`; both use ``seed``.
    """

    def _temporaries(self, views: int, texts: int) -> int:  # noqa: ARG002
        return (int(self.options["permutations"]) + 1) * texts**2


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
        method: eigenvalue method, see :mod:`midlayer_encoders.metrics.eigen`.

    Returns:
        Scalar, between ``0`` and ``log(min(N - 1, D))``; ``0`` if all texts have the same mean. NaN if the views hold
        NaN or infinity, or are so large that ``delta`` is lost in their rounding.

    Example:
        >>> lidar(torch.eye(4).expand(2, 4, 4))  # four orthogonal texts span three dimensions: log 3
        tensor(1.0986)
    """
    base.check_options(delta=delta)
    if views.ndim != 3 or min(views.shape[:2]) < 2:
        raise OptionError(
            f"`views` must be (V, N, D) with two or more views and texts, but got {tuple(views.shape)}: "
            "the scatter within a text needs two views, and the scatter between texts two texts."
        )
    return _lidar(*precise(views), delta=delta, exponential=exponential, method=method).to(result_dtype(views))


def _lidar(*all_views: Tensor, delta: float, exponential: bool, method: Method) -> Tensor:
    """Return LiDAR of views, each ``(*, N, D)``: shape ``(*)``."""
    views = torch.stack(all_views, dim=-3)
    num_views, texts = views.shape[-3:-1]
    means = views.mean(dim=-3, keepdim=True)
    within = (views - means).flatten(-3, -2) / (texts * (num_views - 1)) ** 0.5
    means = means.squeeze(-3)
    between = (means - means.mean(dim=-2, keepdim=True)) / (texts - 1) ** 0.5
    with base.exact_products(views):
        scatter = within.mT @ within
        scatter.diagonal(dim1=-2, dim2=-1).add_(delta)
        # With S_w = C C', C^-1 S_b C^-T and S_w^-1/2 S_b S_w^-1/2 have the same spectrum.
        # Not `cholesky`, which waits for the GPU to check that the factor exists.
        factor, failed = torch.linalg.cholesky_ex(scatter)
        whitened = torch.linalg.solve_triangular(factor, between.mT, upper=False).mT
    entropy = spectral_entropy(base.smaller_gram(whitened), method=method, check=False)
    return torch.where(failed == 0, entropy.exp() if exponential else entropy, torch.nan)


class LiDAR(ViewMetric, function=lidar, number=_lidar):
    """:func:`lidar` of all views of each text, per layer.

    ``views`` is the number of views of each text, 2 or more; the other options are as in the function and
    :class:`SampleMetric`. ``max_samples`` is half of the other metrics' default because there are many views.
    """

    def __init__(self, layers: Sequence[int], *, views: int = 16, max_samples: int = 500, **options: Any) -> None:
        super().__init__(layers, max_samples=max_samples, **options)
        self.views = check_count("views", views, minimum=2)


def alignment(first: Tensor, second: Tensor, *, center: bool = True) -> Tensor:
    r"""Return the mean cosine between the vectors of each text and of a shortened copy of it.

    .. math::
        \frac{1}{N} \sum_i \cos(x_i - \bar x, y_i - \bar x)

    With unit vectors :math:`u` and :math:`v` of these differences it is :math:`1 - \frac{1}{2N} \sum_i \lVert u_i -
    v_i \rVert^2`, which falls as the alignment loss of Wang & Isola (2020) rises.

    Args:
        first: one row per text, shape ``(*, N, D)``, two texts or more.
        second: rows of copies of the same texts, shape ``(*, N, D)``, such as without a quarter of their words.
        center: subtract the mean of the texts from both, which removes common components.

    Returns:
        Shape ``(*)``, between ``-1`` and ``1``. A row that equals the mean has cosine 0. NaN if the rows hold NaN or
        infinity.

    Example:
        >>> texts = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> alignment(texts, texts + torch.tensor([0.0, 1.0]))  # each copy is turned by 45 degrees
        tensor(0.7071)
    """
    check_pair(first, second, same_width=True, batched=True)
    mean = precise(first).mean(dim=-2, keepdim=True) * center
    rows = precise(torch.cat([first, second], dim=-2)) - mean
    rows = rows * base.row_scale(base.lengths(rows), base.lengths(mean), None, unit=True).unsqueeze(-1)
    x, y = rows.chunk(2, dim=-2)
    return (x * y).sum(dim=-1).mean(dim=-1).to(result_dtype(first))


class Alignment(ViewMetric, function=alignment):
    """:func:`alignment` of each text, view 0, and its shortened copy, view 1, per layer.

    Options as in the function and :class:`SampleMetric`.
    """

    kind: ClassVar[Kind] = "copies"
