"""Failures outside the package are one line and an exit code: folders, links, disks, devices, Ctrl-C."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import main
from midlayer_encoders.errors import DeviceError
from midlayer_encoders.files import folder_lock
from tests.others_warnings import MTEB
from tests.tasks.rows import ROWS
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]
pytestmark = MTEB


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return what runs a command line and gives its exit code and the last line that it says of an error."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["midlayer", *map(str, words), "--quiet"])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        # A process of its own turns transformers' bar off before it is imported.
        output = capsys.readouterr().err
        (output,) = [line for line in output.splitlines() if line.strip() and "Loading weights:" not in line]
        return ended.value.code, output  # type: ignore[return-value]

    return run


@pytest.fixture
def words(tiny_folder: Folder, tmp_path: Path) -> list[str]:
    task = tmp_path / "near.jsonl"
    task.write_text("\n".join(map(json.dumps, ROWS["STS"][:6])))
    model = tiny_folder("Llama")
    return ["sweep", model, "--tasks", str(task), "--layers", "1", "--workers", "1", "--metrics", "none"]


def test_a_folder_that_cannot_be_written_to(command: Any, words: list[str], read_only_disk: Path) -> None:
    code, output = command(*words, "--device", "cpu", "--out", read_only_disk / "out")
    assert code == 1
    assert output.startswith(f"Error: The folder {read_only_disk}/out/")
    assert output.endswith("cannot be created (Read-only file system): choose another, writable path.")


def test_a_folder_that_cannot_be_created(command: Any, words: list[str]) -> None:
    assert command(*words, "--out", "/proc/none/out") == (
        1,
        "Error: The folder /proc/none/out cannot be created (No such file or directory): choose another, "
        "writable path.",
    )


def test_a_dangling_link_a_file_in_place_of_a_folder_and_a_folder_in_use(
    command: Any, words: list[str], tmp_path: Path
) -> None:
    lost, file = tmp_path / "lost", tmp_path / "near.jsonl"
    lost.symlink_to("nowhere")
    assert command(*words, "--out", lost) == (
        1, f"Error: {lost} must be a folder, but {lost} is a link to nowhere, which is not a folder: remove it, or choose another path.",
    )  # fmt: skip
    code, output = command(*words, "--out", file)
    assert (code, f"{file} is a file" in output) == (1, True)
    assert file.is_file()
    code, output = command("sweep", lost, *words[2:], "--out", tmp_path / "out")  # a model that leads nowhere
    assert (code, str(lost) in output) == (1, True)
    with folder_lock(tmp_path / "used"):
        code, output = command(*words, "--out", tmp_path / "used")
        assert (code, "used is in use: process " in output) == (1, True)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:-3", "", "cpu:0:0"])
def test_a_device_that_is_not_there(device: str, command: Any, words: list[str], tmp_path: Path) -> None:
    code, output = command(*words, "--out", tmp_path / "out", "--device", device)
    assert code == 1
    assert output.startswith("Error: `device` must be one of cpu")
    assert output.endswith(f"on this machine, but got {device!r}.")
    with pytest.raises(DeviceError, match="on this machine"):
        LayerEncoder(words[1], 1, device=device)


def test_a_full_disk(command: Any, words: list[str], small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20 - 2 * 4096))
    code, output = command(*words, "--out", small_disk / "out")
    assert code == 1
    assert output.startswith(f"Error: The disk of {small_disk} is full (0.0 MiB free): {small_disk}/out/")
    texts = small_disk.parent / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    code, output = command(
        "metrics", words[1], "--texts", texts, "--metrics", "curvature", "--out", small_disk / "more"
    )
    assert (code, "is full" in output) == (1, True)


@pytest.mark.parametrize(
    ("name", "again"), [("sweep", "continues from there"), ("metrics", "starts from the beginning")]
)  # fmt: skip
def test_an_interrupted_run_prints_how_to_continue(
    name: str, again: str, command: Any, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerEncoder, "__init__", interrupted)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    arguments = words if name == "sweep" else ["metrics", words[1], "--texts", texts]
    assert command(*arguments, "--out", tmp_path / "out") == (130, f"Stopped. The same command {again}.")
