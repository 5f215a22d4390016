"""The interval of a mean against scipy's one-sample t test."""

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from benchmarks.intervals import mean_cell, mean_interval


@pytest.mark.parametrize("count", [3, 7, 10])
def test_the_interval_is_that_of_a_t_test(count: int) -> None:
    values = np.random.default_rng(count).normal(2, 3, count)
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    np.testing.assert_allclose(mean_interval(values.tolist()), [values.mean(), expected.low, expected.high])


def test_two_values_and_equal_values_have_no_interval() -> None:
    with pytest.raises(ValueError, match="at least 3 values, but got 2"):
        mean_interval([1.0, 2.0])
    assert mean_cell([1.0, 2.0]) == "1.50"
    assert mean_cell([0.0, 0.0, 0.0], "+.2f") == "+0.00"
    assert mean_cell([1.0, 2.0, 3.0], "+.2f") == "+2.00 (-0.48 to 4.48)"
    assert mean_cell([1.0, 2.0, 3.0], ".1f") == "2.0 (-0.5 to 4.5)"
