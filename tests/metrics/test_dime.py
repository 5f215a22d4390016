from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import DiME, dime
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import entropy_of_shares, random_rotation, random_rows


def kernel_entropy(kernel: Tensor, alpha: float) -> float:
    values = torch.linalg.eigvalsh(kernel).clamp(min=0)
    return entropy_of_shares((values / values.sum()).tolist(), alpha)


def dime_by_definition(
    first: Tensor, second: Tensor, *, alpha: float, permutations: int, seed: int, unit: bool
) -> Tensor:
    """The mean entropy of the product of kernels with shuffled texts, minus that of the true pairing."""
    if unit:
        first, second = (torch.stack([row / row.norm() for row in rows]) for rows in (first, second))
    n, shuffled = len(first), []
    generator = torch.Generator().manual_seed(seed)
    x = torch.tensor([[float(a @ b) for b in first] for a in first], dtype=torch.float64)
    for _ in range(permutations):
        order = torch.randperm(n, generator=generator).tolist()
        permutation = torch.zeros(n, n, dtype=torch.float64)
        for i, j in enumerate(order):
            permutation[i, j] = 1.0
        y = permutation @ (second @ second.T) @ permutation.T
        shuffled.append(kernel_entropy(x * y, alpha))
    return torch.tensor(sum(shuffled) / permutations - kernel_entropy(x * (second @ second.T), alpha)).double()


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize(("alpha", "permutations", "seed"), [(1.0, 10, 0), (2.0, 3, 4)])
def test_function_and_class_match_the_definition(alpha: float, permutations: int, seed: int, unit: bool) -> None:
    texts = corpus()
    options = {"alpha": alpha, "permutations": permutations, "seed": seed, "unit": unit}
    expected = torch.stack([dime_by_definition(*layer[:2], **options) for layer in texts.views])
    values = torch.stack([dime(*layer[:2], **options) for layer in texts.views])
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-9)
    batches = torch.arange(13).split(5)
    torch.testing.assert_close(value("dime", texts, batches, **options), expected, rtol=1e-6, atol=1e-9)


def test_paired_views_score_above_shuffled_ones() -> None:
    first = random_rows(20, 3)
    second = first + 0.05 * random_rows(20, 3, 1)
    assert dime(first, second) > 0.2
    assert dime(first, second[torch.randperm(20)]) < dime(first, second)


def test_constant_view_has_no_information() -> None:
    assert dime(torch.ones(6, 2), random_rows(6, 4)) == pytest.approx(0.0, abs=1e-9)


def test_dime_can_be_negative() -> None:
    values = [float(dime(random_rows(5, 2, seed), random_rows(5, 2, seed + 50))) for seed in range(20)]
    assert min(values) < 0 < max(values)
    assert max(values) <= math.log(5)


def test_scale_and_rotation_do_not_matter_and_the_seed_does() -> None:
    first, second = random_rows(12, 4), random_rows(12, 4) + random_rows(12, 4, 1)
    expected = dime(first, second)
    torch.testing.assert_close(dime(3 * first @ random_rotation(4), 0.1 * second), expected)
    assert dime(first, second, seed=1) != expected


def test_global_generator_is_unchanged() -> None:
    before = torch.get_rng_state()
    dime(random_rows(5, 2), random_rows(5, 2, 1))
    assert torch.equal(torch.get_rng_state(), before)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(OptionError, match="N of 2 or more"):
        dime(torch.ones(1, 3), torch.ones(1, 3))
    with pytest.raises(OptionError, match="`permutations` must be a whole number, 1 or more"):
        DiME([0], permutations=0)
    with pytest.raises(OptionError, match="`alpha` must be greater than 0"):
        DiME([0], alpha=-1.0)
