"""A process killed at any moment loses the batch in flight at most."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

from midlayer_encoders.files import remove_leftovers
from tests.store.filling import check, child, fill, keys_of, opened, run_child


@pytest.mark.parametrize(
    ("where", "survives"),
    [
        ("shard.save_file = lambda _, path, __: (path.write_bytes(bytes(99)), die())", False),  # half of it
        ("files.os.fsync = die", False),  # written, not flushed
        ("Path.replace = die", False),  # flushed, not in place
        ("files._sync = after(1, files._sync)", True),  # in place
    ],
)
def test_a_kill_amid_a_batch_loses_that_batch_at_most(tmp_path: Path, where: str, survives: bool) -> None:
    fill(opened(tmp_path), range(8))
    ended = run_child(
        tmp_path,
        f"""
        def after(calls, function, made=[]):
            return lambda *args: die() if len(made) == calls else made.append(0) or function(*args)

        {where}
        fill(store, range(8, 12))
        """,
    )
    assert ended == -signal.SIGKILL
    store = opened(tmp_path)
    assert len(list(store.folder.glob(".*.tmp"))) == (not survives)
    check(store, range(8))
    assert store.missing(keys_of(range(12))) == ([] if survives else [8, 9, 10, 11])
    fill(store, range(8, 12))
    check(store, range(12))


def test_kills_at_any_moment_lose_at_most_the_batch_in_flight(tmp_path: Path) -> None:
    draw = random.Random(0)
    told = 0
    for _ in range(5):
        body = f"""
        for start in range({told}, 100_000, 4):
            fill(store, range(start, start + 4))
            print(start + 4, flush=True)
        """
        with child(tmp_path, body) as process:
            time.sleep(draw.uniform(0.02, 0.25))
            process.kill()
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
        told = max([told, *(int(line) for line in lines if line.isdigit())])
        store = opened(tmp_path)
        assert store.missing(keys_of(range(told))) == []
        check(store, range(told))
        assert len(store) in (told, told + 4)
    assert told > 40


def test_what_a_killed_process_left_is_cleared_after_an_hour(tmp_path: Path) -> None:
    store = opened(tmp_path)
    left, folder, young = (store.folder / f".{digit * 32}.tmp" for digit in "abc")
    mine = store.folder / "mine.tmp"
    folder.mkdir()
    for path in (left, folder / "file", young, mine):
        path.touch()
    for path in (left, folder, mine):
        os.utime(path, (0, time.time() - 3700))
    remove_leftovers.cache_clear()  # as another process has it
    opened(tmp_path)
    assert [path.exists() for path in (left, folder, young, mine)] == [False, False, True, True]
