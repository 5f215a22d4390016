"""Progress of a command: lines, bars, or nothing; always on standard error."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from midlayer_encoders import sweeping
from midlayer_encoders.cli import _progress, app
from midlayer_encoders.cli._app import with_flags
from midlayer_encoders.cli._progress import show_progress, show_waiting
from midlayer_encoders.cli.find import STAGES


@pytest.fixture
def set_mode(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_progress_mode(kind: str | None) -> None:
        monkeypatch.setattr(_progress, "_mode", kind)

    return set_progress_mode


def error_lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    out, err = capsys.readouterr()
    assert out == ""
    return err.splitlines()


def test_without_a_terminal_lines_mark_the_end_of_each_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now)
    with show_progress({"embedding": "texts embedded"}) as progress:
        progress("embedding", 0, 0)  # nothing to do yet
        progress("embedding", 0, 400)
        now = 2.0
        progress("embedding", 100, 400)
        now = 4.0
        progress("scoring", 0, 31)
        progress("embedding", 400, 400)
        now = 70.0
        progress("scoring", 31, 31)
    assert error_lines(capsys) == ["texts embedded: 400 of 400, 0:00:04", "scoring: 31 of 31, 0:01:06"]


def test_an_unfinished_stage_has_the_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(_progress.time, "monotonic", lambda: now)
    with show_progress() as progress:
        for seconds in range(41):
            now = float(seconds)
            progress("labels", 10 * seconds, 440)
    assert error_lines(capsys) == ["labels: 400 of 440, 0:00:40, 0:00:04 left"]


def test_a_stage_that_is_done_is_not_repeated(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_LINES", 0.02)
    with show_progress() as progress:
        progress("labels", 4, 4)
        time.sleep(0.2)
    assert error_lines(capsys) == []


@pytest.mark.parametrize("mode", [None, "json"])
def test_alternating_stages_write_no_line_for_each_change(
    mode: Any, set_mode: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_mode(mode)
    monkeypatch.setattr(_progress.time, "monotonic", lambda: 0.0)
    with show_progress() as progress:
        for done in (0, 1, 2):
            progress("planning", done, 5)
            progress("scoring", 0, 31)
    assert error_lines(capsys) == []


def test_stage_without_reports_still_writes_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_progress, "_SECONDS_BETWEEN_LINES", 0.05)
    before = threading.active_count()
    with show_waiting("Loading a model"):
        time.sleep(0.4)
    assert len(error_lines(capsys)) >= 4
    assert threading.active_count() == before


def test_thread_ends_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with pytest.raises(ValueError, match="no"), show_waiting("Loading a model"):
        raise ValueError("no")
    assert threading.active_count() == before
    assert error_lines(capsys) == ["Loading a model …"]


def test_quiet_prints_nothing(set_mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    set_mode("quiet")
    with show_waiting("Loading"), show_progress() as progress:
        progress("embedding", 1, 4)
    assert error_lines(capsys) == []


def test_terminal_shows_bars(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress({"embedding": "texts embedded"}) as progress:
        for done in range(0, 401, 100):
            progress("embedding", done, 400)
            time.sleep(0.02)
    text = "\n".join(error_lines(capsys))
    assert "texts embedded" in text
    assert "400/400" in text


def test_long_commands_take_quiet_or_json() -> None:
    calls: list[Any] = []
    application = typer.Typer()

    def work(steps: int = 3) -> None:
        calls.append((steps, _progress._mode))

    application.command()(with_flags(work))
    run = CliRunner().invoke
    assert run(application, []).exit_code == run(application, ["--quiet", "--steps", "2"]).exit_code == 0
    assert run(application, ["--json"]).exit_code == 0
    assert calls == [(3, None), (2, "quiet"), (3, "json")]
    assert _progress._mode is None
    assert run(application, ["--json", "--quiet"]).exit_code == 2


@pytest.mark.long
def test_every_long_command_has_the_flags() -> None:
    short = {"board"}  # finishes immediately
    assert app.registered_commands
    for command in app.registered_commands:
        name = command.name or command.callback.__name__  # type: ignore[union-attr]
        flags = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        assert "--json" in flags, name
        assert ("--quiet" in flags) is (name not in short), name


@pytest.mark.long
def test_output_is_separate_from_progress(tiny_folder: Any, tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(f"text number {n} of a few" for n in range(8)))
    command = ["metrics", tiny_folder("Llama"), "--texts", str(tmp_path / "texts.txt"), "--metrics", "prompt_entropy"]
    command += ["--out", str(tmp_path / "out"), "--device", "cpu"]
    lines, machine = (CliRunner().invoke(app, [*command, *extra_flags]) for extra_flags in ((), ("--json",)))
    assert "Loading" not in lines.stdout
    assert "Loading" in lines.stderr
    values = json.loads(machine.stdout)["values"]  # a single JSON object
    assert [value["layer"] for value in values] == [0, 1, 2, 3, 4]
    assert f"{values[4]['value']:.4g}" in lines.stdout
    assert "Loading" in machine.stderr


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # from mteb and datasets
def test_reading_and_planning_are_stages_of_a_sweep(
    tiny_folder: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"sentence1": f"one {n}", "sentence2": f"two {n * n}", "score": n % 5} for n in range(8)]
    (tmp_path / "near.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks, model = str(tmp_path / "near.jsonl"), tiny_folder("Llama")
    command = ["sweep", model, "--tasks", tasks, "--metrics", "none", "--device", "cpu", "--workers", "1", "--out"]
    lines = CliRunner().invoke(app, [*command, str(tmp_path / "lines")]).stderr.splitlines()
    assert any(line.startswith("Reading") for line in lines)
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal to rich
    monkeypatch.setenv("COLUMNS", "120")
    with show_progress(STAGES) as progress:
        sweeping.sweep(model, tasks, out=tmp_path / "bars", device="cpu", progress=progress)
    assert "tasks planned" in capsys.readouterr().err
