from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midlayer_encoders.report.charts import Scale, layer_ticks, padded
from midlayer_encoders.report.labels import number, signed

FINITE = st.floats(-1e8, 1e8, allow_nan=False, allow_subnormal=False)


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_padded_range_holds_all_values(values: list[float]) -> None:
    low, high = padded(values)
    assert low < min(values) <= max(values) < high


def test_values_beyond_a_scale_get_its_end_color() -> None:
    rising, falling = Scale(0, 2, ("0", "2")), Scale(0, 2, ("0", "2"), falling=True)
    assert [rising.strength(value) for value in (-1, 0, 1, 2, 9)] == [0, 0, 0.5, 1, 1]
    assert [falling.strength(value) for value in (-1, 0, 1, 2, 9)] == [1, 1, 0.5, 0, 0]
    assert Scale(3, 3, ("3", "3")).strength(3) == 0.5


@given(st.integers(0, 200), st.integers(3, 16))
def test_layers_are_whole_from_zero_and_not_too_many(num_layers: int, most: int) -> None:
    ticks = layer_ticks(num_layers, most)
    assert ticks[0] == 0
    assert len(ticks) <= most
    assert ticks[-1] <= num_layers
    assert len({after - before for before, after in zip(ticks, ticks[1:], strict=False)}) <= 1


@pytest.mark.parametrize(("num_layers", "last"), [(6, 6), (12, 12), (24, 24), (30, 30), (32, 32), (48, 48)])
def test_the_last_layer_of_common_models_has_a_tick(num_layers: int, last: int) -> None:
    assert layer_ticks(num_layers, 7)[-1] == last


def test_numbers_for_readers() -> None:
    assert [number(value) for value in (0.05, -12.34, math.inf, -math.inf)] == ["0.1", "−12.3", "∞", "−∞"]
    assert [signed(value) for value in (0.04, -0.04, 1.0)] == ["0.0", "0.0", "+1.0"]
