from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midlayer_encoders.report.ticks import layer_ticks, number, padded, signed, value_ticks

FINITE = st.floats(-1e8, 1e8, allow_nan=False, allow_subnormal=False)


@given(st.lists(FINITE, min_size=1, max_size=5), st.integers(2, 7))
def test_ticks_lie_inside_are_few_rise_and_have_texts_of_their_own(values: list[float], most: int) -> None:
    low, high = padded(values)
    assert low < min(values) <= max(values) < high
    ticks = value_ticks(low, high, most)
    places = [place for place, _ in ticks]
    slack = 1e-6 * (high - low)
    assert 2 <= len(ticks) <= 2 * most + 2
    assert places == sorted(places)
    assert len({text for _, text in ticks}) == len(ticks)
    assert low - slack <= places[0]
    assert places[-1] <= high + slack


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.2, 0.9, ["0.25", "0.50", "0.75"]),
        (-1300, -800, ["−1200", "−1000", "−800"]),
        (1.2e6, 3e6, ["2M", "3M"]),
        (9990, 10110, ["10k", "10.05k", "10.1k"]),
        (1e-6, 9e-6, ["2.5e−6", "5e−6", "7.5e−6"]),
        (-5, 5, ["−5", "0", "5"]),
    ],
)
def test_texts_are_short_and_differ(low: float, high: float, texts: list[str]) -> None:
    assert [text for _, text in value_ticks(low, high, 3)] == texts


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
