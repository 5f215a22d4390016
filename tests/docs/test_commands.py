"""Every command that a page prints is run as printed, on tiny models and made-up files, or listed here with the reason why not."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.paper.command import app as paper
from midlayer_encoders.cli import app
from tests.docs.printed import Command, commands, not_run_elsewhere, pages

NOT_RUN = {
    r"make (demo|demo-vision|test|test-\w+|check|bench|docs|dist)\b": "takes minutes, or needs what a fresh machine has",
    r"(python3? -m )?pip install\b|git clone\b|uv\b|cd\b": "would change the machine",
    r"midlayer export .*--for onnx\b": "needs an engine; tests/export runs it under make test-extras FOR=engines",
    r"midlayer \w+ .*--executor\b": "needs a cluster; tests/scaling does, under make test-extras FOR=scale",
    r"python -m venv\b\b": "would change the machine",
    r"(llama-server|vllm|ollama|echo)\b": "another program",
}
"""Commands that are not run here, by how they begin, and why."""

CHEAPER = {
    "sweep": ["--workers", "1"],
    "compare": ["--resamples", "4", "--views", "2"],
    "progression": ["--views", "2"],
    "distill": ["--tasks", "none", "--checkpoints", "1", "--max-steps", "2"],
    "tune": ["--tasks", "none", "--checkpoints", "1", "--max-steps", "4"],
    "benchmarks.paper": ["--limit", "3", "--tasks", "./mine", "--layers", "0,8,15,23,30"],
}
"""Words that are added to a command so that it takes seconds."""

FIRST = {"board": "midlayer sweep MODEL --tasks ./mine --metrics none --out runs/one"}
"""What must have been run before a command with this word."""


@pytest.mark.docs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in not_run_elsewhere() if commands(page)])
def test_commands_run_as_printed(page: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.docs.desk import make_desk

    wrong = []
    for number, command in enumerate(commands(page)):
        if any(re.match(start, command.text) for start in NOT_RUN):
            continue
        if (named := re.fullmatch(r"export (\w+)=(\S+)", " ".join(command.words))) is not None:
            monkeypatch.setenv(named[1], named[2])
            continue
        monkeypatch.chdir(tmp_path)
        desk = tmp_path / str(number)
        make_desk(desk)
        monkeypatch.chdir(desk)
        for option in command.words:
            if option in FIRST:
                assert not (said := run(Command(page, command.line, FIRST[option]), models)), said
        wrong += run(command, models)
    assert not wrong, "\n".join(wrong)


def run(command: Command, models: Path) -> list[str]:
    """Return a line that says where a command stands and how it failed, or none."""
    from tests.docs.desk import here

    program, *words = here(command, models)
    is_paper = [program, *words[:2]] == ["python", "-m", "benchmarks.paper"]
    if program != "midlayer" and not is_paper:
        return [f"{command}\n  is not run: name it in NOT_RUN, with the reason."]
    application, name, words = (paper, words[1], words[2:]) if is_paper else (app, words[0], words)
    done = CliRunner().invoke(application, [*words, *CHEAPER.get(name, [])], env={"COLUMNS": "200"})
    if done.exit_code == 0:
        return []
    said = done.output.strip().splitlines()[-12:] if done.output.strip() else []
    return ["\n  ".join([f"{command}", f"exit code {done.exit_code}: {done.exception!r}", *said])]


def test_what_is_not_run_is_still_printed_somewhere() -> None:
    printed = [command.text for page in pages() for command in commands(page)]
    unused = [start for start in NOT_RUN if not any(re.match(start, text) for text in printed)]
    assert not (set(unused) - set(_MAY_COME)), unused


_MAY_COME = [start for start in NOT_RUN if start.startswith("(python3?")]


def test_commands_are_found_in_blocks_and_sentences(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(
        "Type `midlayer metrics MODEL --texts FILE`, not `midlayer metrics`, `midlayer select --recipes` or `midlayer probe … --x`.\n"
        "```sh\n# a comment\nmidlayer sweep A \\\n  --tasks B   # why\n```\n"
        "```\nmidlayer compare A B\n```\n```\nno command\n```\n"
        "````md\n```sh\nmidlayer shown\n```\n````\n"
    )
    found = [(command.line, command.words) for command in commands("page.md", tmp_path)]
    assert found == [
        (1, ["midlayer", "metrics", "MODEL", "--texts", "FILE"]),
        (4, ["midlayer", "sweep", "A", "--tasks", "B"]),
        (8, ["midlayer", "compare", "A", "B"]),
    ]
