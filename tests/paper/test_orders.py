import math

import polars as pl
import pytest

from benchmarks.paper.token_experiments import order_entropies


def plain_renyi_entropy(values: list[float], alpha: float) -> float:
    shares = [value / sum(values) for value in values]
    if alpha == 1:
        return -sum(share * math.log(share) for share in shares)
    return math.log(sum(share**alpha for share in shares)) / (1 - alpha)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 8.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.5])
def test_entropies_of_power_laws_follow_the_formula(alpha: float, beta: float) -> None:
    values = [i**-beta for i in range(1, 17)]
    entropies = dict(order_entropies([alpha], [beta], size=16).select("name", "value").iter_rows())
    complete, head = plain_renyi_entropy(values, alpha), plain_renyi_entropy(values[:8], alpha)
    assert entropies["matrix_entropy"] == pytest.approx(complete / math.log(16))
    assert entropies["tail_share"] == pytest.approx((complete - head) / complete)


def test_small_eigenvalues_count_less_at_higher_orders() -> None:
    entropies = order_entropies(exponents=[0.5, 1.0, 2.0])
    for name in ("matrix_entropy", "tail_share"):
        for _, part in entropies.filter(name=name).group_by("beta"):
            values = part.sort("alpha").filter(pl.col("alpha") >= 0.5)["value"].to_list()
            assert values == sorted(values, reverse=True)
