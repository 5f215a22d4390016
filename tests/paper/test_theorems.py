from __future__ import annotations

import polars as pl
import pytest
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame import FRAME_SCHEMA
from midlayer_encoders.paper.theorems import STATEMENTS, Check, _effective_rank, check_theorems, theorem_verdicts


@pytest.fixture(scope="module")
def frame() -> pl.DataFrame:
    return check_theorems(draws=100, width=64)


def test_which_statements_hold(frame: pl.DataFrame) -> None:
    assert frame.columns == [*FRAME_SCHEMA, "statement", "draw", "holds"]
    held = {
        name: holds / draws
        for name, draws, holds in theorem_verdicts(frame).select("statement", "draws", "holds").rows()
    }
    assert set(held) == set(STATEMENTS)
    wrong = {"1, as printed": 0.0, "2.2, as printed": 0.0, "3, matrix entropy for H": 0.25}
    assert held == {name: wrong.get(name, 1.0) for name in STATEMENTS}


def test_a_relation_is_checked_both_ways() -> None:
    assert Check("s", "c", 1.0, 1.0).holds
    assert not Check("s", "c", 1.1, 1.0).holds
    assert Check("s", "c", 1.1, 1.0, slack=0.2).holds
    assert Check("s", "c", 1.2, 1.0, "=").holds
    assert not Check("s", "c", 0.7, 1.0, "=").holds


def test_draws_are_seeded() -> None:
    one, same, other = (list(_effective_rank(4, torch.Generator().manual_seed(seed))) for seed in (0, 0, 1))
    assert one == same
    assert one != other


def test_wrong_input() -> None:
    with pytest.raises(OptionError, match="`draws` must be 100 or more and `width` 16 or more, but got 9 and 256"):
        check_theorems(draws=9)
