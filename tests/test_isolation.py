from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from midlayer_encoders.tasks import isolated_random


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_generators_go_on_as_if_nothing_had_been_seeded() -> None:
    seed(3)
    expected = draw()
    seed(3)
    with isolated_random():
        seed(42)
        draw()
    assert draw() == expected


def test_generators_are_restored_when_the_block_raises() -> None:
    seed(3)
    expected = draw()
    seed(3)
    with pytest.raises(TypeError), isolated_random():
        seed("no number")  # type: ignore[arg-type]
    assert draw() == expected


def test_threads_do_not_draw_from_what_another_seeded() -> None:
    def drawn(number: int) -> list[tuple[float, float, float]]:
        with isolated_random():
            seed(number)
            values = []
            for _ in range(50):
                values.append(draw())
                time.sleep(0)  # let another thread run, were it not for the lock
            return values

    expected = [drawn(number) for number in range(4)]
    seed(3)
    after = draw()
    seed(3)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(drawn, range(4))) == expected
    assert draw() == after
