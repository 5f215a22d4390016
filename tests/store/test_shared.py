"""Several objects and processes read and write one store."""

import pickle
import random
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.store.filling import LAYERS, check_vectors, expected_vectors, fill, make_keys, open_store, start_child


@pytest.mark.long
@pytest.mark.parametrize(("first", "second"), [((0, 200), (200, 400)), ((0, 250), (150, 400))])
def test_two_processes_write_while_a_third_reads(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    rng = random.Random(0)
    reads = 0
    store = open_store(tmp_path)
    keys = make_keys(range(400))
    with ExitStack() as stack:
        write = "import time\nfor start in range({}, {}, 5):\n    fill(store, range(start, start + 5))\n    time.sleep(0.02)"
        parts = [write.format(*part) for part in (first, second)]
        writers = [stack.enter_context(start_child(tmp_path, part)) for part in parts]
        while any(writer.poll() is None for writer in writers):
            reader = store if rng.random() < 0.5 else open_store(tmp_path)
            missing = set(reader.missing(keys))
            present = [number for number in range(400) if number not in missing]
            layer = rng.choice(LAYERS)
            np.testing.assert_array_equal(reader.read(layer, make_keys(present)), expected_vectors(present, [layer])[0])
            reads += bool(present)
            time.sleep(0.01)
    assert [writer.returncode for writer in writers] == [0, 0]
    assert reads > 3
    assert store.missing(make_keys(range(400))) == []
    check_vectors(store, range(400))
    check_vectors(open_store(tmp_path), range(400))


def test_store_with_more_layers_serves_readers_of_fewer(tmp_path: Path) -> None:
    fewer_layers, all_layers = open_store(tmp_path, layers=[1, 5]), open_store(tmp_path)
    fill(fewer_layers, range(8))
    assert all_layers.missing(make_keys(range(8))) == list(range(8))
    fill(all_layers, range(4, 12))
    assert fewer_layers.missing(make_keys(range(12))) == []
    for store in (fewer_layers, open_store(tmp_path, layers=[1, 5])):
        check_vectors(store, range(12))
    for store in (all_layers, open_store(tmp_path)):
        check_vectors(store, range(4, 12))
        assert store.missing(make_keys(range(12))) == [0, 1, 2, 3]


def test_store_can_be_pickled(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, range(4))
    check_vectors(pickle.loads(pickle.dumps(store)), range(4))


def test_reading_uses_memory_for_the_requested_rows_only(tmp_path: Path) -> None:
    store = open_store(tmp_path, layers=[0, 1], dim=64)
    fill(store, range(8000), batch=2000)
    keys = make_keys(range(8000))
    for count in (50, 8000):
        tracemalloc.start()
        store.read(1, keys[:count])
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1.6 * count * 64 * 4 + 200 * count + 50_000
