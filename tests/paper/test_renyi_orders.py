from __future__ import annotations

import math

import polars as pl
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.paper.renyi_orders import order_entropies, power_law


def renyi_read_aloud(values: list[float], alpha: float) -> float:
    p = [value / sum(values) for value in values]
    if alpha == 1:
        return -sum(one * math.log(one) for one in p)
    return math.log(sum(one**alpha for one in p)) / (1 - alpha)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.5])
def test_entropies_are_the_formula_read_aloud(alpha: float, beta: float) -> None:
    values = [i**-beta for i in range(1, 17)]
    assert power_law(16, beta).tolist() == pytest.approx(values)
    found = dict(order_entropies([alpha], [beta], size=16).select("name", "value").iter_rows())
    whole, head = renyi_read_aloud(values, alpha), renyi_read_aloud(values[:8], alpha)
    assert found["matrix_entropy"] == pytest.approx(whole / math.log(16))
    assert found["tail_share"] == pytest.approx((whole - head) / whole)


def test_small_eigenvalues_count_less_the_higher_the_order() -> None:
    frame = order_entropies(exponents=[0.5, 1.0, 2.0])
    for name in ("matrix_entropy", "tail_share"):
        for _, part in frame.filter(pl.col("name") == name).group_by("beta"):
            values = part.sort("alpha").filter(pl.col("alpha") >= 0.5)["value"].to_list()
            assert values == sorted(values, reverse=True)


def test_wrong_input() -> None:
    with pytest.raises(OptionError, match="`size` must be 2"):
        order_entropies(size=1)
    with pytest.raises(OptionError, match="`orders` and `exponents`"):
        order_entropies(exponents=[-1.0])
    with pytest.raises(OptionError, match="`alpha` must be greater than 0"):
        order_entropies([0.0])
