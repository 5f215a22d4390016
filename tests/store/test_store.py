"""The store: contents are compared with what was written, after kills, damage, full disks and crowds."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from midlayer_encoders.errors import LayerIndexError, MidlayerError, NotFiniteError, OptionError
from midlayer_encoders.store import (
    EmbeddingStore,
    StoreError,
    StoreFullError,
    TextNotStoredError,
    embeddings,
    list_stores,
    prune,
    shard,
    text_key,
)

LAYERS = [0, 1, 2, 5]
DIM = 6


def vectors(numbers: Sequence[int], layers: Sequence[int] = LAYERS, dim: int = DIM) -> np.ndarray:
    """Return what the texts with these numbers embed to, shape ``(L, N, D)``: the oracle."""
    layer, number, dimension = np.ix_(layers, np.array(numbers, dtype=int), range(dim))
    waves = np.sin(layer * 1.7 + number * 0.9 + dimension * 2.3)
    return (waves * 10).astype(np.float32)


def keys_of(numbers: Sequence[int]) -> list[str]:
    return [text_key(f"text {number}") for number in numbers]


def opened(root: Path, **options) -> EmbeddingStore:
    return EmbeddingStore(root, **{"key": "k", "layers": LAYERS, "dim": DIM, **options})


def shards_of(store: EmbeddingStore) -> list[Path]:
    return sorted(store.folder.glob("*.safetensors"))


def check(store: EmbeddingStore, numbers: Sequence[int]) -> None:
    """Compare every vector at every layer with what it must be."""
    expected = vectors(numbers, store.layers, store.dim)
    for place, layer in enumerate(store.layers):
        np.testing.assert_array_equal(store.read(layer, keys_of(numbers)), expected[place])


def fill(store: EmbeddingStore, numbers: Sequence[int], batch: int = 4) -> None:
    for start in range(0, len(numbers), batch):
        part = numbers[start : start + batch]
        store.write(keys_of(part), vectors(part, store.layers, store.dim))


# In another process: the oracle from here, and a batch at a time, each told once it is written.
CHILD = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_store import *

def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

store = opened(Path({root!r}))
embeddings._TIER = {tier}
print("ready", flush=True)
{body}
"""


@contextmanager
def child(root: Path, body: str, *, tier: int = 64) -> Iterator[subprocess.Popen[str]]:
    code = CHILD.format(tests=str(Path(__file__).parent), root=str(root), tier=tier, body=textwrap.dedent(body))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def run_child(root: Path, body: str, *, tier: int = 64) -> int:
    with child(root, body, tier=tier) as process:
        return process.wait(timeout=20)


def test_reads_what_was_written_in_the_order_asked(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(10), batch=3)
    assert len(store) == 10
    assert keys_of([3])[0] in store
    assert keys_of([10])[0] not in store
    for numbers in ([9, 0, 5, 0, 9], [7], list(range(9, -1, -1)), []):
        for again in (store, opened(tmp_path)):
            check(again, numbers)
    assert store.read(5, []).shape == (0, DIM)
    assert store.read(0, keys_of([1])).dtype == np.float32


def test_missing_lists_each_key_once_and_sees_other_writers(tmp_path: Path) -> None:
    one, other = opened(tmp_path), opened(tmp_path)
    keys = keys_of([0, 1, 2, 1, 3, 2])
    assert one.missing(keys) == [0, 1, 2, 4]
    fill(other, [1, 3])
    assert one.missing(keys) == [0, 2]
    check(one, [3, 1])
    assert one.missing([]) == []


def test_stored_texts_are_not_written_again(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [0, 1])
    store.write(keys_of([1, 2, 2]), np.concatenate([vectors([1]) + 9, vectors([2, 2])], axis=1))
    store.write(keys_of([0, 1]), vectors([0, 1]) + 9)
    store.write([], vectors([0])[:, :0])
    check(store, [0, 1, 2])
    assert sum(shard.read_head(path)[0].count for path in shards_of(store)) == 3


def test_any_safetensors_reader_opens_a_shard(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [4, 2, 7])
    with safe_open(shards_of(store)[0], framework="numpy") as file:
        assert file.metadata()["store"] == "k"
        assert json.loads(file.metadata()["layers"]) == LAYERS
        assert [bytes(key).hex() for key in file.get_tensor("keys")] == keys_of([4, 2, 7])
        for place, layer in enumerate(LAYERS):
            np.testing.assert_array_equal(file.get_tensor(f"layer.{layer}"), vectors([4, 2, 7])[place])


def test_float16_is_rounded_once(tmp_path: Path) -> None:
    store = opened(tmp_path, dtype="float16")
    fill(store, range(5))
    for place, layer in enumerate(LAYERS):
        read = store.read(layer, keys_of(range(5)))
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, vectors(range(5))[place].astype(np.float16))
        np.testing.assert_allclose(read, vectors(range(5))[place], rtol=2**-11, atol=6e-5 * 2**-10)


def test_wider_types_are_taken_and_rounded(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.write(keys_of([0]), vectors([0]).astype(np.float64) * (1 + 1e-12))
    check(store, [0])


# --- killed


@pytest.mark.parametrize(
    ("where", "survives"),
    [
        ("shard.zlib.crc32 = after(4, shard.zlib.crc32)", False),  # amid the rows
        ("shard.os.fsync = die", False),  # written, not flushed
        ("Path.replace = die", False),  # flushed, not in place
        ("shard._sync_folder = die", True),  # in place
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
    assert len(list(store.folder.glob("*.tmp"))) == (not survives)
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
        with child(tmp_path, body, tier=4) as process:  # so that merges are killed too
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


@pytest.mark.parametrize("where", ["Path.unlink = die", "shard._sync_folder = die", "Path.replace = die"])
def test_a_killed_merge_loses_nothing(tmp_path: Path, where: str) -> None:
    fill(opened(tmp_path), range(24))
    assert run_child(tmp_path, f"{where}\nstore.merge()") == -signal.SIGKILL
    store = opened(tmp_path)
    assert len(store) == 24
    check(store, range(24))
    store.merge()
    assert sum(shard.read_head(path)[0].count for path in shards_of(store)) == 24
    check(store, range(24))
    check(opened(tmp_path), range(24))


def test_what_a_killed_process_left_is_cleared_after_an_hour(tmp_path: Path) -> None:
    store = opened(tmp_path)
    left, young = store.folder / "a.tmp", store.folder / "b.tmp"
    left.touch()
    young.touch()
    os.utime(left, (0, time.time() - 3700))
    opened(tmp_path)
    assert not left.exists()
    assert young.exists()


# --- damaged


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def cut(path: Path, size: int) -> None:
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: cut(path, -1),
        lambda path: cut(path, 300),
        lambda path: cut(path, 5),
        lambda path: cut(path, 0),
        lambda path: flip(path, -1),
        lambda path: flip(path, -DIM * 4 * 4 * 2),
        lambda path: path.write_bytes(path.read_bytes() + b"x"),
        lambda path: path.write_bytes(path.read_bytes()[:-64] + bytes(64)),
        lambda path: path.write_bytes(bytes(path.stat().st_size)),
    ],
)
def test_damage_costs_the_texts_of_one_shard(tmp_path: Path, caplog: pytest.LogCaptureFixture, harm) -> None:
    fill(opened(tmp_path), range(12))
    harm(shards_of(opened(tmp_path))[1])  # that of texts 4 to 7
    store = opened(tmp_path)
    assert store.missing(keys_of(range(12))) == [4, 5, 6, 7]
    assert "is damaged" in caplog.text
    check(store, [0, 1, 2, 3, 8, 9, 10, 11])
    with pytest.raises(TextNotStoredError, match=r"4 of 12 are not, the first `keys\[4\]`"):
        store.read(0, keys_of(range(12)))
    fill(store, range(4, 8))
    check(store, range(12))
    check(opened(tmp_path), range(12))


def test_a_shard_that_is_cut_off_is_noticed_on_opening(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(opened(tmp_path), range(8))
    cut(shards_of(opened(tmp_path))[1], -1)
    assert len(opened(tmp_path)) == 4
    assert "bytes instead of" in caplog.text


def test_no_flipped_byte_anywhere_gives_a_wrong_vector(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(3))
    path = shards_of(opened(tmp_path))[0]
    whole = path.read_bytes()
    for at in range(len(whole)):
        flip(path, at)
        store = opened(tmp_path)
        assert store.missing(keys_of(range(3))) == [0, 1, 2], f"byte {at}"
        assert not path.exists()
        path.write_bytes(whole)


def test_a_reader_that_does_not_ask_what_is_missing_sees_damage_too(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    store = opened(tmp_path)
    flip(shards_of(store)[0], -1)  # in the last layer
    check(opened(tmp_path, layers=[0, 1]), range(4))
    with pytest.raises(TextNotStoredError, match="4 of 4 are not"):
        store.read(5, keys_of(range(4)))


def test_damage_under_an_open_store_is_an_error_not_a_crash(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(8))
    check(store, range(8))
    cut(shards_of(store)[0], 100)
    with pytest.raises(TextNotStoredError, match="4 of 8 are not"):
        store.read(0, keys_of(range(8)))
    shards_of(store)[0].unlink()
    with pytest.raises(TextNotStoredError, match="8 of 8 are not"):
        store.read(0, keys_of(range(8)))


def test_a_merge_does_not_launder_damage(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, range(12))
    flip(shards_of(store)[2], -3)
    store.merge()
    assert store.missing(keys_of(range(12))) == [8, 9, 10, 11]
    check(store, range(8))


def test_a_damaged_label_is_written_again(tmp_path: Path) -> None:
    fill(opened(tmp_path), range(4))
    (tmp_path / "k" / "store.json").write_text('{"format"')
    check(opened(tmp_path), range(4))


# --- full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if (
        mount is None
        or subprocess.run([mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True).returncode
    ):
        pytest.skip("mounting a tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_is_told_and_leaves_the_store_readable(small_disk: Path) -> None:
    store = opened(small_disk, dim=500)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(500_000))
    with pytest.raises(
        StoreFullError, match=r"is full \(.* MiB free\)\. What was stored stays readable: make room"
    ) as error:
        fill(store, range(1000))
    assert isinstance(error.value, MidlayerError)
    assert isinstance(error.value.__cause__, OSError)
    written = len(store)
    assert 8 <= written < 120
    assert not list(store.folder.glob("*.tmp"))
    for reader in (store, opened(small_disk, dim=500)):
        check(reader, range(written))
        assert reader.missing(keys_of(range(written + 4))) == [written + i for i in range(4)]
    filler.unlink()
    fill(store, range(written, written + 20))
    check(opened(small_disk, dim=500), range(written + 20))


def test_a_merge_without_room_leaves_the_batch_written(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(embeddings, "_TIER", 16)
    store = opened(small_disk, dim=500)
    (small_disk / "filler").write_bytes(bytes(200_000))
    fill(store, range(68))  # 17 shards of 33 kB
    assert "were not merged" in caplog.text
    check(store, range(68))


# --- shared


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
    with embeddings._lock(store.folder / "merge.lock") as held:
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


# --- refused


def test_other_dimensions_or_dtype_are_refused(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(OptionError, match=r"`dim` must be 6 for the store in .*, but got 7: pass that, choose another"):
        opened(tmp_path, dim=7)
    with pytest.raises(OptionError, match=r"`dtype` must be 'float32' for the store in .*, but got 'float16'"):
        opened(tmp_path, dtype="float16")


def test_a_shard_of_another_store_is_refused(tmp_path: Path) -> None:
    other = opened(tmp_path, key="other")
    fill(other, range(2))
    store = opened(tmp_path)
    shutil.copy(shards_of(other)[0], store.folder)
    with pytest.raises(StoreError, match=r"must hold .* of the store 'k', but holds .* of 'other': move it away"):
        store.refresh()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "float61"},
            "`dtype` must be one of 'float16', 'float32', but got 'float61'. Did you mean 'float16'",
        ),
        ({"key": "../k"}, "`key` must be letters, digits, '-' and '_', since it names a folder, but got '../k'"),
        ({"key": ""}, "`key` must be letters"),
        ({"layers": []}, r"`layers` must be increasing layers from 0, at least one, but got \[\]"),
        ({"layers": [2, 1]}, r"`layers` must be increasing layers from 0, at least one, but got \[2, 1\]"),
        ({"layers": [-1, 1]}, r"`layers` must be increasing layers from 0"),
        ({"dim": 0}, "`dim` must be at least 1, but got 0"),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        opened(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_wrong_calls_are_named(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [0])
    with pytest.raises(
        LayerIndexError, match="`layer` must be one of the stored layers 0, 1, 2, 5, but got 3: open the"
    ):
        store.read(3, keys_of([0]))
    with pytest.raises(OptionError, match=r"`embeddings` must have the shape \(4, 2, 6\) .* but got \(4, 1, 6\)"):
        store.write(keys_of([1, 2]), vectors([1]))
    with pytest.raises(OptionError, match="A key must be 32 hexadecimal digits, but got 'a text': use `text_key"):
        store.read(0, ["a text"])
    with pytest.raises(
        TextNotStoredError, match=rf"1 of 2 are not, the first `keys\[1\]` \({keys_of([1])[0]}\): embed"
    ):
        store.read(0, keys_of([0, 1]))
    check(store, [0])


def test_what_is_not_finite_is_refused(tmp_path: Path) -> None:
    store = opened(tmp_path, dtype="float16")
    rows = vectors([0, 1])
    rows[2, 1, 3] = 70_000
    with pytest.raises(NotFiniteError, match="row 1 at layer 2 is too large for float16: use `dtype='float32'`"):
        store.write(keys_of([0, 1]), rows)
    rows[3, 0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="row 0 at layer 5 is NaN or infinite: look at that text"):
        opened(tmp_path, key="k32").write(keys_of([0]), rows[:, :1])
    assert store.missing(keys_of([0, 1])) == [0, 1]


def test_a_store_removed_under_a_writer_is_told(tmp_path: Path) -> None:
    store = opened(tmp_path)
    fill(store, [0])
    assert [info.key for info in prune(tmp_path, keys=["k"])] == ["k"]
    with pytest.raises(StoreError, match="was removed while it was in use: run again"):
        fill(store, [1])
    with pytest.raises(TextNotStoredError):
        store.read(0, keys_of([0]))


# --- keys, lists and pruning


def test_text_keys_differ_where_texts_or_prompts_do() -> None:
    pairs = [
        ("", ""),
        ("a", ""),
        ("", "a"),
        ("b", "a"),
        ("ab", ""),
        ("", "ab"),
        ("a ", ""),
        ("1:a", ""),
        ("\ud800", ""),
    ]
    assert len({text_key(text, prompt) for text, prompt in pairs}) == len(pairs)
    assert all(len(text_key(text, prompt)) == 32 for text, prompt in pairs)
    assert text_key("a text") == text_key("a text", "")


def test_stores_are_listed_with_what_they_hold(tmp_path: Path) -> None:
    assert list_stores(tmp_path / "nowhere") == []
    fill(opened(tmp_path, key="old", description={"model": "tiny", "layers": (1, 2)}), range(8))
    fill(opened(tmp_path, key="new", layers=[1, 2], dtype="float16"), range(3))
    (tmp_path / "else").mkdir()
    os.utime(tmp_path / "new" / "store.json", (0, time.time() + 60))
    new, old = list_stores(tmp_path)
    assert (new.key, new.texts, new.layers, new.dim, new.dtype) == ("new", 3, (1, 2), DIM, "float16")
    assert (old.key, old.texts, old.layers, old.dim, old.dtype) == ("old", 8, tuple(LAYERS), DIM, "float32")
    assert old.description == {"model": "tiny", "layers": [1, 2]}
    assert old.bytes == sum(path.stat().st_size for path in old.folder.iterdir())
    assert abs(old.last_used.timestamp() - time.time()) < 60


def test_pruning_removes_what_is_named_unused_or_too_much(tmp_path: Path) -> None:
    def three() -> None:
        for age, key in enumerate(["today", "yesterday", "earlier"]):
            store = opened(tmp_path, key=key)
            fill(store, range(4))
            for path in store.folder.iterdir():
                os.utime(path, (0, time.time() - 86400 * age - 60))

    three()
    size = list_stores(tmp_path)[0].bytes
    cases = [
        ({"keys": ["yesterday"]}, ["yesterday"]),
        ({"unused_for": timedelta(hours=12)}, ["yesterday", "earlier"]),
        ({"keep_bytes": 2 * size + 10}, ["earlier"]),
        ({"keep_bytes": 0}, ["today", "yesterday", "earlier"]),
        ({"keys": ["today"], "unused_for": timedelta(hours=30)}, ["today", "earlier"]),
        ({"unused_for": timedelta(days=90)}, []),
    ]
    for options, expected in cases:
        assert [info.key for info in prune(tmp_path, **options, dry_run=True)] == expected
        assert len(list_stores(tmp_path)) == 3
        assert [info.key for info in prune(tmp_path, **options)] == expected
        assert {path.name for path in tmp_path.iterdir()} == {"today", "yesterday", "earlier"} - set(expected)
        three()
    with pytest.raises(OptionError, match=r"`keys` must be stores in .*, but got 'todya'. Did you mean 'today'"):
        prune(tmp_path, keys=["todya"])
    with pytest.raises(OptionError, match="`prune` must be told what to remove"):
        prune(tmp_path)
