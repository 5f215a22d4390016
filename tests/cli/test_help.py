"""Help, examples, shell completion, the version, and errors of the command line."""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from midlayer_encoders import __version__
from midlayer_encoders.cli import app, command_names, main

PANELS = ["Try it", "Find the layer", "Use it", "Look inside", "Keep house"]
EPILOGS = dict(zip(command_names(), (command.epilog or "" for command in app.registered_commands), strict=True))


def shown(*words: str) -> Any:
    return CliRunner().invoke(app, [*words], env={"COLUMNS": "80"})


def test_without_arguments_the_help_is_shown_by_what_people_do() -> None:
    bare, requested = shown(), shown("--help")
    assert bare.exit_code == 2  # as click has it: nothing was asked for
    assert requested.exit_code == 0
    assert bare.output.strip() == requested.output.strip()
    headings = [line.split("─ ")[1].split(" ─")[0] for line in requested.output.splitlines() if line.startswith("╭")]
    assert headings == ["Options", *PANELS]


@pytest.mark.parametrize("name", command_names())
def test_every_command_has_two_examples_that_it_would_take(name: str) -> None:
    text = shown(name, "--help").output
    head, *lines = EPILOGS[name].split("\n\n")
    assert (head, len(lines)) == ("Examples:", 2)
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    for line in lines:
        assert line in text  # on one line of 80 columns, to be copied
        program, called, *words = shlex.split(line)
        assert (program, called) == ("midlayer", name)
        command.make_context(name, words)  # raises for a flag that it does not have, or lacks


def test_completion_can_be_installed_and_completes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--install-completion" in shown("--help").output
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    completing = {"_MIDLAYER_COMPLETE": "complete_bash", "COMP_WORDS": "midlayer swe", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="midlayer", env=completing)
    assert result.output.split() == ["sweep"]


def test_the_version_is_printed_at_once() -> None:
    code = (
        "import sys; sys.argv = ['midlayer', '--version']\nfrom midlayer_encoders.cli import main\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'transformers', 'mteb', 'numpy', 'polars'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    version = importlib.metadata.version("pytrec-eval-terrier")
    assert done.stdout.startswith(f"midlayer-encoders {__version__} (pytrec-eval-terrier {version}"), done.stderr


def test_with_verbose_it_is_what_an_issue_report_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "results").write_bytes(bytes(1234))
    monkeypatch.setenv("MTEB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_thisisasecrettoken")
    monkeypatch.setenv("HUGGING_FACE_HUB_TOKEN", "another secret")
    output = shown("--version", "--verbose")
    assert output.exit_code == 0, output.output
    assert "secret" not in output.output
    for words in (
        "transformers 5.",
        "sentence-transformers ",
        "devices: cpu",
        "Triton: ",
        "built-in model: ",
        f"mteb: {tmp_path}, 1.2 kB",
        "HF_TOKEN: set",
    ):
        assert words in output.output, words
    alone = shown("--verbose", "demo")
    assert alone.exit_code == 2
    assert "it goes with --version" in " ".join(alone.output.split())


def test_invalid_arguments_end_with_the_command_to_try(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["midlayer", "cache", "nowhere", "--dry-run"]
    for more, tried in (([], "Try: midlayer cache --help"), (["--json"], "midlayer cache --help")):
        monkeypatch.setattr(sys, "argv", [*words, *more])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2
        assert (json.loads(output[0])["see"] if more else output[-1]) == tried


def test_a_reader_that_ends_early_is_no_error() -> None:
    command = [sys.executable, "-m", "midlayer_encoders.cli", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        assert done.stderr.read() == b""
    assert done.returncode in (0, 1)
