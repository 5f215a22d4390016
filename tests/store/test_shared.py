"""Several objects and processes read, write and merge one store."""

from __future__ import annotations

import pickle
import random
import tracemalloc
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from midlayer_encoders.files import lock
from midlayer_encoders.store import shard
from tests.store.filling import LAYERS, check, child, fill, keys_of, opened, run_child, shards_of, vectors


@pytest.mark.parametrize(("first", "second"), [((0, 400), (400, 800)), ((0, 500), (300, 800))])
def test_two_processes_write_and_merge_while_a_third_reads(
    tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    draw = random.Random(0)
    reads = 0
    store = opened(tmp_path)
    keys = keys_of(range(800))
    with ExitStack() as stack:
        parts = [f"fill(store, range{part}, batch=5)" for part in (first, second)]
        writers = [stack.enter_context(child(tmp_path, part, tier=6)) for part in parts]
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
    assert len(shards_of(store)) < 50  # of 160 batches


def test_a_reader_follows_a_merge(tmp_path: Path) -> None:
    store, reader = opened(tmp_path), opened(tmp_path)
    fill(store, range(40))
    reader.refresh()
    check(reader, [3, 39])
    store.merge()
    assert len(shards_of(store)) == 1
    assert len(store) == len(opened(tmp_path)) == 40
    check(reader, range(40))
    check(store, range(39, -1, -1))


def test_a_text_left_out_of_a_merge_is_read_where_it_is_left(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    fill(one, range(60), batch=60)  # too large to be merged with those of `other`
    fill(other, range(58, 70))
    one.refresh()  # reads 58 and 59 from the shard of `other`
    other.refresh()  # reads them from that of `one`, and leaves them there
    other.merge()
    assert sorted(shard.read_head(path)[0].count for path in shards_of(one)) == [10, 60]
    check(one, range(70))
    assert one.missing(keys_of(range(70))) == []
    check(opened(tmp_path), range(70))


def test_many_small_batches_become_few_shards(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(300), batch=1)
    assert len(shards_of(store)) == 300 // 64 + 300 % 64
    check(store, range(300))


def test_only_one_process_merges(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(8))
    with lock(store.folder / "merge.lock") as held:
        assert held
        assert run_child(tmp_path, "store.merge()") == 0
    assert len(shards_of(store)) == 2


def test_more_layers_serve_those_who_ask_for_fewer(tmp_path: Path) -> None:
    few, many = opened(tmp_path, layers=[1, 5]), opened(tmp_path)
    fill(few, range(8))
    assert many.missing(keys_of(range(8))) == list(range(8))
    fill(many, range(4, 12))
    assert few.missing(keys_of(range(12))) == []
    few.merge()
    many.merge()
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
