from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import MatrixEntropy, Normalization, matrix_entropy
from tests.metrics.feeding import corpus, value
from tests.metrics.oracles import entropy_by_definition, random_rotation, random_rows

sizes = st.integers(1, 9)
seeds = st.integers(0, 10_000)
quick = settings(max_examples=25, deadline=None)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("n", "d"), [(3, 8), (8, 3), (16, 16)])
def test_function_and_class_match_the_definition(n: int, d: int, alpha: float) -> None:
    states = random_rows(n, d)
    metric = MatrixEntropy([0], alpha=alpha)
    for batch in states.split(2):
        metric.update(batch[None], torch.ones(1, len(batch), dtype=torch.bool), layer=0)
    expected = entropy_by_definition(states, alpha)
    torch.testing.assert_close(matrix_entropy(states, alpha), expected)
    torch.testing.assert_close(metric.compute()[0], expected)


def test_class_treats_all_tokens_of_all_texts_as_one_set() -> None:
    texts = corpus()
    expected = [entropy_by_definition(states[texts.mask]) for states in texts.states]
    torch.testing.assert_close(value("matrix_entropy", texts), torch.stack(expected))


@pytest.mark.parametrize(
    ("normalization", "divisor"),
    [
        ("raw", 1.0),
        ("maxEntropy", math.log(4)),
        ("logN", math.log(4)),
        ("logD", math.log(6)),
        ("logNlogD", math.log(4) * math.log(6)),
    ],
)
def test_normalizations(normalization: Normalization, divisor: float) -> None:
    states = random_rows(7, 6)
    mask = torch.tensor([True, False, True, True, False, True, False])
    expected = entropy_by_definition(states[mask]) / divisor
    torch.testing.assert_close(matrix_entropy(states, mask=mask, normalization=normalization), expected)
    metric = MatrixEntropy([0], normalization=normalization)
    metric.update(states[None], mask[None], layer=0)
    torch.testing.assert_close(metric.compute()[0], expected)


def test_max_entropy_takes_the_smaller_logarithm() -> None:
    states = random_rows(9, 3)
    torch.testing.assert_close(
        matrix_entropy(states, normalization="maxEntropy"), entropy_by_definition(states) / math.log(3)
    )


def test_known_values() -> None:
    torch.testing.assert_close(matrix_entropy(torch.eye(7)), torch.tensor(math.log(7)))
    assert matrix_entropy(torch.ones(5, 3)) == pytest.approx(0.0, abs=1e-6)
    assert matrix_entropy(torch.zeros(5, 3)) == 0.0
    assert matrix_entropy(torch.ones(1, 3), normalization="logN") == 0.0
    halves = torch.tensor([[3.0, 0.0], [0.0, 3.0]])
    for alpha in (0.3, 1.0, 2.0, 5.0):
        torch.testing.assert_close(matrix_entropy(halves, alpha), torch.tensor(math.log(2)))


@quick
@given(n=sizes, d=sizes, seed=seeds)
def test_entropy_does_not_increase_with_the_order(n: int, d: int, seed: int) -> None:
    states = random_rows(n, d, seed)
    values = torch.stack([matrix_entropy(states, alpha) for alpha in (0.3, 0.9, 1.0, 1.1, 2.0, 4.0)])
    assert (values.diff() <= 1e-9).all()
    assert (values >= -1e-12).all()
    assert (values <= math.log(min(n, d)) + 1e-9).all()


@quick
@given(n=sizes, d=sizes, seed=seeds, scale=st.floats(1e-3, 1e3))
def test_scale_rotation_and_order_of_rows_do_not_matter(n: int, d: int, seed: int, scale: float) -> None:
    states = random_rows(n, d, seed)
    turned = scale * states[torch.randperm(n)] @ random_rotation(d, seed)
    torch.testing.assert_close(matrix_entropy(turned), matrix_entropy(states), rtol=1e-9, atol=1e-9)


@quick
@given(n=sizes, d=sizes, seed=seeds, alpha=st.sampled_from([0.5, 1.0, 2.0]))
def test_gram_and_covariance_agree(n: int, d: int, seed: int, alpha: float) -> None:
    states = random_rows(n, d, seed)
    torch.testing.assert_close(matrix_entropy(states, alpha), matrix_entropy(states.mT, alpha), rtol=1e-9, atol=1e-9)


def test_masked_sets_match_single_sets() -> None:
    states, mask = torch.stack([random_rows(6, 9), random_rows(6, 9, 1)]), torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3], mask[1, 4:] = False, False
    expected = torch.stack([entropy_by_definition(states[0, 3:]), entropy_by_definition(states[1, :4])])
    torch.testing.assert_close(matrix_entropy(states, mask=mask), expected)


def test_one_invalid_set_does_not_affect_the_others() -> None:
    states = torch.stack([random_rows(4, 5), random_rows(4, 5, 1)])
    states[0, 2, 2] = torch.nan
    values = matrix_entropy(states)
    assert values[0].isnan()
    torch.testing.assert_close(values[1], entropy_by_definition(states[1]))


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match="`alpha` must be greater than 0"):
        matrix_entropy(torch.eye(2), 0.0)
    with pytest.raises(OptionError, match=r"`normalization` must be one of .* Did you mean 'logN'"):
        MatrixEntropy([0], normalization="logn")  # type: ignore[arg-type]
