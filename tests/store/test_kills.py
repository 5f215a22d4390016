"""A killed process loses at most the batch in flight."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from midlayer_encoders.files import remove_leftovers
from tests.store.filling import check_vectors, fill, make_keys, open_store, run_child, start_child


@pytest.mark.parametrize(
    ("patch", "survives"),
    [
        ("module.save_file = lambda _, path, __: (path.write_bytes(bytes(99)), kill_self())", False),  # half written
        ("files.os.fsync = kill_self", False),  # written, not flushed
        ("Path.replace = kill_self", False),  # flushed, not in place
        ("files._sync = after(1, files._sync)", True),  # in place
    ],
)
def test_kill_during_a_batch_loses_at_most_that_batch(tmp_path: Path, patch: str, survives: bool) -> None:
    fill(open_store(tmp_path), range(8))
    exit_code = run_child(
        tmp_path,
        f"""
        def after(calls, function, calls_made=[]):
            return lambda *args: kill_self() if len(calls_made) == calls else calls_made.append(0) or function(*args)

        {patch}
        fill(store, range(8, 12))
        """,
    )
    assert exit_code == -signal.SIGKILL
    store = open_store(tmp_path)
    left = [path for path in store.folder.glob(".*.tmp/*") if path.name != "example"]  # of a new file's permissions
    assert len(left) == (not survives)
    check_vectors(store, range(8))
    assert store.missing(make_keys(range(12))) == ([] if survives else [8, 9, 10, 11])
    fill(store, range(8, 12))
    check_vectors(store, range(12))


@pytest.mark.long
def test_kills_at_any_moment_lose_at_most_the_batch_in_flight(tmp_path: Path) -> None:
    rng = random.Random(0)
    num_written = 0
    for _ in range(5):
        body = f"""
        for start in range({num_written}, 100_000, 4):
            fill(store, range(start, start + 4))
            print(start + 4, flush=True)
        """
        with start_child(tmp_path, body) as process:
            time.sleep(rng.uniform(0.02, 0.25))
            process.kill()
            assert process.stdout is not None
            lines = process.stdout.read().splitlines()
        num_written = max([num_written, *(int(line) for line in lines if line.isdigit())])
        store = open_store(tmp_path)
        assert store.missing(make_keys(range(num_written))) == []
        check_vectors(store, range(num_written))
        assert len(store) in (num_written, num_written + 4)
    assert num_written > 40


def test_leftovers_of_a_killed_process_are_removed_after_an_hour(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    old, new = (store.folder / f".{letter * 8}.tmp" for letter in "ab")
    user_file = store.folder / "mine.tmp"
    for path in (old, new, user_file):
        path.mkdir()
        (path / "file").touch()
    for path in (old, user_file):
        os.utime(path, (0, time.time() - 3700))
    remove_leftovers.cache_clear()  # as in another process
    open_store(tmp_path)
    assert [path.exists() for path in (old, new, user_file)] == [False, True, True]
