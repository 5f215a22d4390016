"""Help, examples, shell completion, the version, and errors of the command line."""

import importlib.metadata
import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from midlayer_encoders import __version__
from midlayer_encoders.cli import app, main

PANELS = ["Try it", "Find the layer", "Use it", "Look inside"]
EPILOGS = {str(item.name or item.callback.__name__): item.epilog or "" for item in app.registered_commands}  # type: ignore[union-attr]


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments], env={"COLUMNS": "80"})


def test_help_is_shown_without_arguments_in_groups_of_commands() -> None:
    bare, requested = invoke(), invoke("--help")
    assert bare.exit_code == 2  # click's exit code without a command
    assert requested.exit_code == 0
    assert bare.output.strip() == requested.output.strip()
    headings = [line.split("─ ")[1].split(" ─")[0] for line in requested.output.splitlines() if line.startswith("╭")]
    assert headings == ["Options", *PANELS]


@pytest.mark.parametrize("name", EPILOGS)
def test_every_command_has_two_valid_examples(name: str) -> None:
    text = invoke(name, "--help").output
    head, *lines = EPILOGS[name].split("\n\n")
    assert (head, len(lines)) == ("Examples:", 2)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    for line in lines:
        assert line in text  # on one line of 80 columns
        program, example_command, *arguments = shlex.split(line)
        assert (program, example_command) == ("midlayer", name)
        command.make_context(name, arguments)  # raises for an unknown or missing flag


@pytest.mark.parametrize("name", ["sweep", "select", "embed"])
def test_help_all_shows_the_options_of_the_encoder(name: str) -> None:
    short, whole = invoke(name, "--help").output, invoke(name, "--help-all").output
    assert ("--device-map" in short, "--device-map" in whole) == (False, True)
    assert "--help-all" in short
    assert len(short.splitlines()) <= 85
    assert ("--device-map" in invoke(name, "--help").output) is False, "the options are hidden again"


def test_completion_can_be_installed_and_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in invoke("--help").output
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    completing = {"_MIDLAYER_COMPLETE": "complete_bash", "COMP_WORDS": "midlayer swe", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="midlayer", env=completing)
    assert result.output.split() == ["sweep"]


def test_version_is_printed_without_heavy_imports() -> None:
    code = (
        "import sys; sys.argv = ['midlayer', '--version']\nfrom midlayer_encoders.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'mteb', 'numpy', 'polars'} & set(sys.modules); assert not heavy, heavy"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    version = importlib.metadata.version("pytrec-eval-terrier")
    assert process.stdout.startswith(f"midlayer-encoders {__version__} (pytrec-eval-terrier {version}"), process.stderr


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_main_invalid_arguments_print_one_line(
    flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["midlayer", "board", "nowhere", *flags])
    with pytest.raises(SystemExit) as exit_info:
        main()
    (line,) = capsys.readouterr().err.splitlines()
    assert exit_info.value.code == 2
    assert "nowhere" in (json.loads(line)["error"] if flags else line)
    assert "Try:" not in line


def test_closed_output_pipe_is_not_an_error() -> None:
    command = [sys.executable, "-m", "midlayer_encoders.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode in (0, 1)
