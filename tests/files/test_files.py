"""Files are complete or absent, never written through a link, and rebuilt if they cannot be read."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import save_file

from midlayer_encoders.errors import DiskFullError, FolderError, OptionError
from midlayer_encoders.files import (
    atomic_write,
    check_output_folder,
    check_writable,
    dump_with_checksum,
    explain_full_disk,
    folder_lock,
    make_folder,
    read_artifact,
    read_with_checksum,
    remove_leftovers,
    scratch,
    shell_path,
    write_file,
    write_folder,
)
from midlayer_encoders.frame.tidy_result import kept_frame, write_frame

FRAME = pl.DataFrame({"layer": range(2000), "value": [n**0.5 for n in range(2000)]})


@pytest.mark.parametrize("leads", [True, False])
def test_a_link_is_replaced_and_its_target_is_unchanged(leads: bool, tmp_path: Path) -> None:
    target, place = tmp_path / "mine.txt", tmp_path / "out" / "frame.csv"
    place.parent.mkdir()
    if leads:
        target.write_text("mine")
    place.symlink_to(target)
    write_file(place, b"ours")
    assert (place.is_symlink(), place.read_text()) == (False, "ours")
    assert target.exists() == leads
    assert not leads or target.read_text() == "mine"


def test_the_first_of_several_writers_holds_for_all(tmp_path: Path) -> None:
    place = tmp_path / "plan.json"
    for content in (b"first", b"second"):
        write_file(place, content, once=True)
    assert place.read_bytes() == b"first"
    lost = tmp_path / "lost.json"
    lost.symlink_to(tmp_path / "nowhere")
    write_file(lost, b"first", once=True)
    assert (lost.read_bytes(), (tmp_path / "nowhere").exists()) == (b"first", False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost.json", "plan.json"]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1 and half of it", b"\x00" * 99], ids=repr)
def test_what_cannot_be_read_is_set_aside_by_name_and_made_again(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "step1.parquet"
    path.write_bytes(content)
    assert kept_frame(path, lambda: FRAME).equals(FRAME)
    assert pl.read_parquet(path).equals(FRAME)
    assert (tmp_path / "step1.parquet.broken").read_bytes() == content
    assert f"{path} could not be read" in caplog.text
    assert "step1.parquet.broken" in caplog.text
    caplog.clear()
    assert kept_frame(path, lambda: pl.DataFrame()).equals(FRAME)
    assert not caplog.text


def test_an_error_of_the_disk_is_not_taken_for_a_damaged_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"whole")

    def fails(_: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with pytest.raises(OSError, match="Input/output"):
        read_artifact(path, fails)
    assert path.read_bytes() == b"whole"


def test_a_full_disk_names_itself_and_the_file_and_goes_on_when_there_is_room(small_disk: Path) -> None:
    path = small_disk / "out" / "frame.parquet"
    write_frame(FRAME, path)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(shutil.disk_usage(small_disk).free))
    longer = pl.DataFrame({"value": [str(n) * 9 for n in range(9000)]})
    with pytest.raises(DiskFullError, match=rf"The disk of {small_disk} is full \(.* MiB free\): {path} was not wr"):
        write_frame(longer, path)
    with pytest.raises(DiskFullError, match=f"The disk of {small_disk} is full"):
        write_folder(small_disk / "cut", lambda aside: (aside.mkdir(), (aside / "weights").write_bytes(bytes(9999))))
    assert pl.read_parquet(path).equals(FRAME)
    assert sorted(item.name for item in small_disk.rglob("*")) == ["filler", "frame.parquet", "out"]
    filler.unlink()
    write_frame(longer, path)
    assert pl.read_parquet(path).equals(longer)


@pytest.mark.parametrize("name", ["out", "new"])
def test_check_writable_on_a_disk_without_room_names_the_disk(small_disk: Path, name: str) -> None:
    (small_disk / "out").mkdir()
    subprocess.run(["mount", "-o", "remount,nr_inodes=2", small_disk], check=True)
    with pytest.raises(DiskFullError, match=rf"The disk of {small_disk} is full .*: {small_disk / name} was not writ"):
        check_writable(small_disk / name)
    assert [path.name for path in small_disk.iterdir()] == ["out"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_atomic_write_of_safetensors_has_the_mode_of_a_new_file(tmp_path: Path, umask: int, mode: int) -> None:
    previous = os.umask(umask)
    try:
        with atomic_write(tmp_path / "one") as temporary:
            save_file({"zeros": np.zeros(2, np.uint8)}, temporary)
        for _ in range(2):  # into a new folder, then into an existing one
            write_folder(tmp_path / "out", _write_weights)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "one", tmp_path / "out" / "weights")} == {mode}


def _write_weights(folder: Path) -> None:
    folder.mkdir()
    save_file({"zeros": np.zeros(2, np.uint8)}, folder / "weights")


def test_a_folder_of_a_read_only_disk_is_named(read_only_disk: Path) -> None:
    folder = read_only_disk / "out"
    for write in (write_file, partial(write_file, once=True)):
        with pytest.raises(FolderError, match=rf"{folder} cannot be written \(Read-only file system\) because of"):
            write(folder / "file", b"content")


def test_a_file_that_exceeds_the_largest_one_permitted_is_named(tmp_path: Path) -> None:
    """As on a FAT32 disk, which has room for more files but not for one of more than 4 GiB."""
    path = tmp_path / "file"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(DiskFullError, match=rf"permits no such size: {path} was not written"):
            write_file(path, bytes(2**21))
        with pytest.raises(DiskFullError, match="no such size"), atomic_write(path) as temporary:
            save_file({"zeros": np.zeros(2**21, np.uint8)}, temporary)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_the_free_space_of_a_full_disk_is_in_mebibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil._ntuple_diskusage(total=9 * 2**20, used=2**20, free=3 * 2**19)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    for error in (OSError(errno.ENOSPC, "full"), OSError(errno.EDQUOT, "quota")):
        with pytest.raises(DiskFullError, match=r"is full \(1\.5 MiB free\)"), explain_full_disk(tmp_path / "a"):
            raise error
    for free, is_full in ((2**16, True), (2**16 + 1, False)):  # of an error without a number
        usage = usage._replace(free=free)
        with pytest.raises(DiskFullError if is_full else ValueError), explain_full_disk(tmp_path / "a"):
            raise ValueError("a library failed")


def test_a_folder_that_is_a_file_or_a_dangling_link_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "lost").symlink_to("nowhere")
    with pytest.raises(FolderError, match=rf"{tmp_path}/file/out cannot be written \(.*\) because of {tmp_path}/file:"):
        make_folder(tmp_path / "file" / "out")
    with pytest.raises(FolderError, match=rf"{tmp_path}/lost/out cannot be written \(.*\) because of {tmp_path}/lost:"):
        make_folder(tmp_path / "lost" / "out")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    make_folder(tmp_path / "link")


def test_links_inside_a_folder_may_not_lead_out_of_it(tmp_path: Path) -> None:
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "mteb" / "results").mkdir(parents=True)
    (home / "frame.parquet").touch()
    elsewhere.mkdir()
    (home / "mteb" / "same").symlink_to(home / "mteb" / "results")
    (tmp_path / "linked").symlink_to(home)
    for out in (home, tmp_path / "linked"):
        with folder_lock(out):
            pass
    (home / "mteb" / "results" / "m").symlink_to(elsewhere)
    for out in (home, tmp_path / "linked"):
        with pytest.raises(OptionError, match=f"must not contain links.* is a link to {elsewhere}: remove the"):
            folder_lock(out).__enter__()


def test_what_is_left_beside_a_file_is_removed_after_an_hour(tmp_path: Path) -> None:
    with scratch(tmp_path) as aside:
        (aside / "folder").mkdir(parents=True)
    assert not aside.exists()
    old, young, own_options = (tmp_path / name for name in (f".{'a' * 8}.tmp", f".{'b' * 8}.tmp", ".mine.tmp"))
    for path in (old, young, own_options):
        path.mkdir()
        (path / "new").write_text("half")
    for path, age in ((old, 3700), (own_options, 3700), (young, 3500)):
        os.utime(path, (time.time() - age,) * 2)
    remove_leftovers.cache_clear()  # as another process has it
    write_file(tmp_path / "frame.csv", b"")
    assert [path.exists() for path in (old, young, own_options)] == [False, True, True]


HOLDER = """
import sys, time
from pathlib import Path
from midlayer_encoders.files import folder_lock
with folder_lock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_run_writes_to_a_folder_and_its_lock_dies_with_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with (
            pytest.raises(FolderError, match=rf"{tmp_path} is in use: process {process.pid} on .*, since 2") as error,
            folder_lock(tmp_path),
        ):
            pass
        assert "use another folder" in str(error.value)
        process.send_signal(signal.SIGKILL)
    with folder_lock(tmp_path), pytest.raises(FolderError, match=f"process {os.getpid()} "), folder_lock(tmp_path):
        pass  # not in another thread of this process either
    with folder_lock(tmp_path):
        pass


def test_folder_lock_of_a_read_only_disk_raises(read_only_disk: Path) -> None:
    folder = read_only_disk / "out"
    with (
        pytest.raises(FolderError, match=rf"{folder} cannot be written \(Read-only file system\)"),
        folder_lock(folder),
    ):
        pass


def test_folder_lock_with_a_read_only_lock_file_is_held(small_disk: Path) -> None:
    """As that of another user, in a folder that both can write to."""
    lock_file = small_disk / "midlayer.lock"
    lock_file.touch()
    subprocess.run(["mount", "--bind", lock_file, lock_file], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", lock_file], check=True)
        with pytest.raises(OSError, match="Read-only"):
            lock_file.write_text("mine")
        with folder_lock(small_disk):
            (small_disk / "results.parquet").touch()
    finally:
        subprocess.run(["umount", lock_file], check=True)


def test_no_lock_is_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "midlayer.lock").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(OSError, match="symbolic link"), folder_lock(tmp_path / "home"):
        pass
    assert (tmp_path / "mine.txt").read_text() == "mine"
    (tmp_path / "mine.txt").unlink()
    with (
        pytest.raises(FolderError, match="must be a file, but is a symbolic link or a folder"),
        folder_lock(tmp_path / "home"),
    ):
        pass


def test_a_folder_takes_its_place_in_one_step_or_file_by_file(tmp_path: Path) -> None:
    def make(aside: Path) -> None:
        (aside / "1_Pooling").mkdir(parents=True)
        (aside / "1_Pooling" / "config.json").write_text("pool")
        (aside / "config.json").write_text("new")
        (aside / "weights").write_text("new")

    def dies(aside: Path) -> None:
        make(aside)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        write_folder(tmp_path / "cut", dies)
    assert list(tmp_path.iterdir()) == []
    write_folder(tmp_path / "cut", make, last=["config.json"])
    complete = sorted(str(path.relative_to(tmp_path / "cut")) for path in (tmp_path / "cut").rglob("*"))
    assert complete == ["1_Pooling", "1_Pooling/config.json", "config.json", "weights"]
    (tmp_path / "cut" / "weights").unlink()
    (tmp_path / "cut" / "weights").mkdir()  # cannot be replaced: the old folder and the new one are never mixed
    (tmp_path / "cut" / "config.json").write_text("old")
    with pytest.raises(OSError, match="weights"):
        write_folder(tmp_path / "cut", make, last=["config.json"])
    assert not (tmp_path / "cut" / "config.json").exists()
    (tmp_path / "cut" / "weights").rmdir()
    write_folder(tmp_path / "cut", make, last=["config.json"])
    assert (tmp_path / "cut" / "config.json").read_text() == "new"
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_error_that_numpy_raises_without_a_number_is_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError, match="is full"), explain_full_disk(tmp_path / "file"):
        raise OSError("Not enough free space to write 30081024 bytes after offset 1770208")  # as `tofile` says it


@pytest.mark.parametrize("change", [("1.5", "2.5"), ("checksum", "cheksum")])
def test_a_changed_file_or_one_without_its_checksum_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "scores.json"
    path.write_bytes(dump_with_checksum({"score": 1.5}))
    assert read_with_checksum(path) == {"score": 1.5}
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(ValueError, match="checksum"):
        read_with_checksum(path)
    path.write_text('{"score": 1.5}')
    with pytest.raises(ValueError, match="checksum"):
        read_with_checksum(path)


def test_a_folder_of_other_files_is_refused_and_one_of_results_accepted(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    with folder_lock(mine):
        pass
    (mine / "embeddings").mkdir()
    with folder_lock(mine):  # as after a run
        pass
    (mine / "midlayer.lock").unlink()
    (mine / "other").touch()
    with pytest.raises(OptionError, match=r"`out` must be a new .* holds other files, such as 'embeddings': choose"):
        check_output_folder(mine)
    (mine / "frame.parquet").touch()  # of a release that did not lock the folder
    check_output_folder(mine)


@pytest.mark.parametrize(
    "name",
    ["x\u202egnp 'é'\\n", "a\nrm b", "-\x1b[2Kc", os.fsdecode(b"\xff1")],
    ids=["marks", "lines", "escape", "bytes"],
)
def test_a_path_in_a_printed_command_has_no_hidden_characters(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("content")
    line = f"cat {shell_path(name)}"
    assert line.isprintable()
    bash = shutil.which("bash") or pytest.skip("bash is not installed")
    printed = subprocess.run([bash, "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout == "content"


@pytest.mark.parametrize("name", ["-rf", "a; touch pwned", "it's $(touch pwned)", "-"])
def test_a_path_in_a_printed_command_is_one_word_and_no_flag(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("content")
    line = f"cat {shell_path(name)}"
    printed = subprocess.run(["sh", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert printed.stdout == "content"
    assert [path.name for path in tmp_path.iterdir()] == [name]
