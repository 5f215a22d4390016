"""Failures outside the package are one line and an exit code: folders, links, disks, devices, Ctrl-C."""

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
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import TEXTS, Folder
from tests.tasks.rows import ROWS

pytestmark = MTEB


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Return a function that runs a command line and returns its exit code and its error line."""

    def run(*arguments: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["midlayer", *map(str, arguments), "--quiet"])
        monkeypatch.setenv("COLUMNS", "80")
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_info:
            main()
        (output,) = filter(str.strip, capsys.readouterr().err.splitlines())
        return exit_info.value.code, output  # type: ignore[return-value]

    return run


@pytest.fixture
def sweep_arguments(tiny_folder: Folder, tmp_path: Path) -> list[str]:
    task = tmp_path / "near.jsonl"
    task.write_text("\n".join(map(json.dumps, ROWS["STS"][:6])))
    model = tiny_folder("Llama")
    return ["sweep", model, "--tasks", str(task), "--layers", "1", "--workers", "1", "--metrics", "none"]


def test_read_only_folder(run_command: Any, sweep_arguments: list[str], read_only_disk: Path) -> None:
    assert run_command(*sweep_arguments, "--device", "cpu", "--out", read_only_disk / "out") == (
        1,
        f"Error: {read_only_disk}/out cannot be written (Read-only file system) because of {read_only_disk}/out: "
        "choose another path.",
    )


def test_folder_that_cannot_be_created(run_command: Any, sweep_arguments: list[str]) -> None:
    assert run_command(*sweep_arguments, "--out", "/proc/none/out") == (
        1,
        "Error: /proc/none/out cannot be written (No such file or directory) because of /proc: choose another path.",
    )


def test_dangling_link_file_in_place_of_a_folder_and_folder_in_use(
    run_command: Any, sweep_arguments: list[str], tmp_path: Path
) -> None:
    dangling_link, file = tmp_path / "lost", tmp_path / "near.jsonl"
    dangling_link.symlink_to("nowhere")
    assert run_command(*sweep_arguments, "--out", dangling_link) == (
        1,
        f"Error: {dangling_link} cannot be written (No such file or directory) because of {dangling_link}: choose another path.",
    )
    code, output = run_command(*sweep_arguments, "--out", file)
    assert (code, f"because of {file}:" in output) == (1, True)
    assert file.is_file()
    code, output = run_command(
        "sweep", dangling_link, *sweep_arguments[2:], "--out", tmp_path / "out"
    )  # a model folder that is a dangling link
    assert (code, str(dangling_link) in output) == (1, True)
    with folder_lock(tmp_path / "used"):
        code, output = run_command(*sweep_arguments, "--out", tmp_path / "used")
        assert (code, "used is in use: process " in output) == (1, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("export m --layer abc --out o", "Invalid value for '--layer': must be a layer such as 17, -1 or 0.7, but got 'abc'"),
        ("select m --text t", "No such option: --text (Possible options: --max-texts, --text-column, --texts)"),
        ("selct m", "No such command 'selct'. Did you mean 'select'?"),
    ],
)  # fmt: skip
def test_main_prints_one_line_for_a_usage_error(run_command: Any, words: str, message: str) -> None:
    assert run_command(*words.split()) == (2, f"Error: {message}")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "cuda:-3", "", "cpu:0:0"])
def test_missing_device(device: str, run_command: Any, sweep_arguments: list[str], tmp_path: Path) -> None:
    code, output = run_command(*sweep_arguments, "--out", tmp_path / "out", "--device", device)
    assert code == 1
    assert output.startswith("Error: `device` must be one of cpu")
    assert output.endswith(f"on this machine, but got {device!r}.")
    with pytest.raises(DeviceError, match="on this machine"):
        LayerEncoder(sweep_arguments[1], 1, device=device)


def test_full_disk_error(run_command: Any, sweep_arguments: list[str], small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(2**20 - 2 * 4096))
    code, output = run_command(*sweep_arguments, "--out", small_disk / "out")
    assert code == 1
    assert output.startswith(f"Error: The disk of {small_disk} is full (0.0 MiB free): {small_disk}/out/")
    texts = small_disk.parent / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    code, output = run_command(
        "metrics", sweep_arguments[1], "--texts", texts, "--metrics", "curvature", "--out", small_disk / "more"
    )
    assert (code, "is full" in output) == (1, True)


@pytest.mark.parametrize(
    ("name", "advice"), [("sweep", "continues from there"), ("metrics", "starts from the beginning")]
)  # fmt: skip
def test_interrupted_run_prints_how_to_continue(
    name: str,
    advice: str,
    run_command: Any,
    sweep_arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerEncoder, "__init__", interrupt)
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    arguments = sweep_arguments if name == "sweep" else ["metrics", sweep_arguments[1], "--texts", texts]
    assert run_command(*arguments, "--out", tmp_path / "out") == (130, f"Stopped. The same command {advice}.")
