"""How sure a metric of a set of texts is: its spread over random halves of them."""

from __future__ import annotations

from math import sqrt
from statistics import NormalDist

import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_count, check_number

__all__ = ["check_confidence", "half_width", "random_halves"]


def random_halves(count: int, resamples: int, *, seed: int = 0) -> Tensor:
    """Return positions of random halves of ``count`` texts, each text once at most, shape ``(R, count // 2)``.

    A bootstrap with replacement would hold texts twice, and a text that is there twice is its own nearest neighbor
    and a wrong negative: it moves InfoNCE by 12 and DiME by 29 of their standard errors, effective rank by 3
    (benchmarks/results/halves.md).

    Example:
        >>> random_halves(6, 2).shape, len(set(random_halves(6, 2)[0].tolist()))
        (torch.Size([2, 3]), 3)
    """
    resamples = check_count("resamples", resamples, minimum=2)
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(count, generator=generator)[: count // 2] for _ in range(resamples)])


def half_width(values: Tensor, count: int, *, confidence: float = 0.95) -> Tensor:
    r"""Return half the width of the interval of a number, from its values on random halves of the texts.

    .. math::
        z \sqrt{\frac{m}{n - m}} \operatorname{sd}_r \theta_r, \qquad m = \lfloor n / 2 \rfloor

    the standard error by half-sampling (McCarthy, 1969; Shao & Wu, 1989): a half is as far from the whole as the whole
    is from all texts there could be. For a mean it is the usual standard error.

    Args:
        values: on R halves, shape ``(R, *)``.
        count: number n of texts that the halves are of.
        confidence: of the interval, in ``(0, 1)``; z is its normal quantile.

    Returns:
        Shape ``(*)``.

    Example:
        >>> half_width(torch.tensor([1.0, 2.0, 3.0]), 10)
        tensor(1.9600)
    """
    check_confidence(confidence)
    taken = count // 2
    scale = NormalDist().inv_cdf((1 + confidence) / 2) * sqrt(taken / (count - taken))
    return values.std(dim=0) * scale


def check_confidence(confidence: float) -> float:
    """Return a ``confidence`` that can be that of an interval, or raise an :class:`OptionError`."""
    number = check_number("confidence", confidence, maximum=1.0)
    if not 0 < number < 1:
        raise OptionError(f"`confidence` must be in (0, 1), as 0.95, but got {confidence}.")
    return number
