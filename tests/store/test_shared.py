"""Several objects and processes read and write one store."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.store.filling import LAYERS, check, child, fill, keys_of, opened, vectors


@pytest.mark.parametrize(("first", "second"), [((0, 400), (400, 800)), ((0, 500), (300, 800))])
def test_two_processes_write_while_a_third_reads(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    draw = random.Random(0)
    reads = 0
    store = opened(tmp_path)
    keys = keys_of(range(800))
    with ExitStack() as stack:
        write = "import time\nfor start in range({}, {}, 5):\n    fill(store, range(start, start + 5))\n    time.sleep(0.02)"
        parts = [write.format(*part) for part in (first, second)]
        writers = [stack.enter_context(child(tmp_path, part)) for part in parts]
        while any(writer.poll() is None for writer in writers):
            reader = store if draw.random() < 0.5 else opened(tmp_path)
            missing = set(reader.missing(keys))
            present = [number for number in range(800) if number not in missing]
            layer = draw.choice(LAYERS)
            np.testing.assert_array_equal(reader.read(layer, keys_of(present)), vectors(present, [layer])[0])
            reads += bool(present)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 3
    assert store.missing(keys_of(range(800))) == []
    check(store, range(800))
    check(opened(tmp_path), range(800))


def test_more_layers_serve_those_who_ask_for_fewer(tmp_path: Path) -> None:
    few, many = opened(tmp_path, layers=[1, 5]), opened(tmp_path)
    fill(few, range(8))
    assert many.missing(keys_of(range(8))) == list(range(8))
    fill(many, range(4, 12))
    assert few.missing(keys_of(range(12))) == []
    for store in (few, opened(tmp_path, layers=[1, 5])):
        check(store, range(12))
    for store in (many, opened(tmp_path)):
        check(store, range(4, 12))
        assert store.missing(keys_of(range(12))) == [0, 1, 2, 3]


def test_an_object_can_be_pickled(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(4))
    check(pickle.loads(pickle.dumps(store)), range(4))


def test_reading_takes_the_memory_of_the_rows_asked_for(tmp_path: Path) -> None:
    store = opened(tmp_path, layers=[0, 1], dim=64)
    fill(store, range(8000), batch=2000)
    keys = keys_of(range(8000))
    for count in (50, 8000):
        tracemalloc.start()
        store.read(1, keys[:count])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.6 * count * 64 * 4 + 200 * count + 50_000
