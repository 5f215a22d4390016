from __future__ import annotations

import math

import polars as pl
import pytest
import torch

from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.paper.theorems import (
    STATEMENTS,
    Check,
    _rank_checks,
    check_theorems,
    order_entropies,
    theorem_verdicts,
)


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return check_theorems(draws=100, width=64)


def test_which_statements_hold(frame: pl.DataFrame) -> None:
    assert frame.columns == [*FRAME_SCHEMA, "statement", "draw", "holds"]
    stored = {
        name: holds / draws
        for name, draws, holds in theorem_verdicts(frame).select("statement", "draws", "holds").rows()
    }
    assert set(stored) == set(STATEMENTS)
    wrong = {"1, as printed": 0.0, "2.2, as printed": 0.0, "3, matrix entropy for H": 0.25}
    assert stored == {name: wrong.get(name, 1.0) for name in STATEMENTS}


def test_relation_is_checked_in_both_directions() -> None:
    assert Check("1, as printed", "c", 1.0, 1.0).holds
    assert not Check("1, as printed", "c", 1.1, 1.0).holds
    assert Check("1, as printed", "c", 1.1, 1.0, slack=0.2).holds
    assert Check("2.2, corrected", "c", 1.2, 1.0).holds
    assert not Check("2.2, corrected", "c", 0.7, 1.0).holds


def test_draws_are_seeded() -> None:
    first, same, second = (list(_rank_checks(4, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1))
    assert first == same
    assert first != second


def test_theorems_follow_seed_and_width() -> None:
    frame, same, second = (check_theorems(draws=100, width=16, seed=seed) for seed in (3, 3, 4))
    assert frame.equals(same)
    assert not frame.equals(second)
    printed = frame.filter(statement="2.1, as printed", name="right")
    assert printed.select("dataset", "value").rows() == [
        (f"{count} prompts of 16 tokens", count / 16**2) for count in (2, 4, 8, 16)
    ]


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
