import logging
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from midlayer_encoders._isolation import isolated_random


def draw_all() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def seed_all(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def test_generators_continue_as_if_nothing_had_been_seeded() -> None:
    seed_all(3)
    expected = draw_all()
    seed_all(3)
    with isolated_random():
        seed_all(42)
        draw_all()
    assert draw_all() == expected


def test_generators_are_restored_when_the_block_raises() -> None:
    seed_all(3)
    expected = draw_all()
    seed_all(3)
    with pytest.raises(TypeError), isolated_random():
        seed_all("no number")  # type: ignore[arg-type]
    assert draw_all() == expected


def test_threads_do_not_draw_from_generators_seeded_by_others() -> None:
    def draw_isolated(number: int) -> list[tuple[float, float, float]]:
        with isolated_random():
            seed_all(number)
            values = []
            for _ in range(50):
                values.append(draw_all())
                time.sleep(0)  # another thread could run without the lock
            return values

    expected = [draw_isolated(number) for number in range(4)]
    seed_all(3)
    after = draw_all()
    seed_all(3)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw_isolated, range(4))) == expected
    assert draw_all() == after


@pytest.mark.parametrize("level", [logging.NOTSET, logging.DEBUG, logging.CRITICAL])
def test_mteb_logs_again_after_it_was_quiet(level: int) -> None:
    from midlayer_encoders.sweeping.mteb_jobs import quiet_mteb

    logger = logging.getLogger("mteb")
    before = logger.level
    logger.setLevel(level)
    try:
        with quiet_mteb():
            assert logger.level == logging.ERROR
        assert logger.level == level
    finally:
        logger.setLevel(before)
