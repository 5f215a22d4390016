"""Flags that name columns: every command that reads tables has them, and the advice of errors works."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import midlayer_encoders
from midlayer_encoders.cli import app

PACKAGE = Path(midlayer_encoders.__file__).parent
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FLAGS = {
    name: {flag for option in command.params for flag in [*option.opts, *option.secondary_opts]}
    for name, command in COMMANDS.items()
}
FLAG = re.compile(r"(?<![\w/-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
#: Flags of other programs that messages and command lines name.
FOREIGN = {
    "--array",
    "--format",
    "--jobs",
    "--me",
    "--merge",
    "--no-deps",
    "--noheader",
    "--ntasks-per-node",
    "--runner",
}


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the strings of a module that are not docstrings and not declarations of flags."""
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) or (isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Option")):
            skipped |= set(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.value


def commands_of(function: ast.AST) -> list[str]:
    """Return the name of the command that a function is registered as."""
    names = []
    for decorator in getattr(function, "decorator_list", ()):
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "command":
            keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
            names.append(keywords.get("name", function.name))  # type: ignore[attr-defined]
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_messages_of_a_module_name_flags_that_exist(path: Path) -> None:
    tree = ast.parse(path.read_text())
    everywhere = set().union(*FLAGS.values())
    for text in messages(tree):
        assert set(FLAG.findall(text)) <= everywhere | FOREIGN, text
    for function in ast.walk(tree):
        for name in commands_of(function):
            for text in messages(function):
                assert set(FLAG.findall(text)) <= FLAGS[name], (name, text)


READERS = {
    "sweep": "MODEL --tasks DATA --out out",
    "select": "MODEL --texts DATA",
    "metrics": "MODEL --texts DATA --out out",
    "compare": "MODEL other --texts DATA --out out",
    "progression": "MODEL --texts DATA --out out",
    "embed": "MODEL --texts DATA --out vectors.npy",
    "probe": "MODEL --data DATA --out out",
    "tune": "MODEL --layer 1 --pairs DATA --out out",
    "tune --tasks": "MODEL --layer 1 --pairs pairs.csv --tasks DATA --out out",
    "distill": "MODEL --layer 1 --texts texts.txt --tasks DATA --out out",
    "distill --texts": "MODEL --layer 1 --texts DATA --out out",
}
ROWS = "".join(f"a text of some length {number};kind {number % 2}\n" for number in range(24))


def answer(*words: str) -> str:
    """Return the error of a command whose model is an empty folder: about its data, or about the model."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code != 0
    return f"{result.output} {result.exception}"


@pytest.mark.parametrize("place", ["./tickets.csv", "./tickets"])
@pytest.mark.parametrize("case", READERS)
def test_table_of_other_columns_is_read_with_the_flags_that_the_error_names(
    case: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("tickets", "no-model", "other"):
        Path(folder).mkdir()
    for path in ("tickets.csv", "tickets/tickets.csv"):
        Path(path).write_text("message;topic\n;kind 1\n" + ROWS)
    Path("pairs.csv").write_text("anchor,positive\na,b\nc,d\ne,f\ng,h\n")
    Path("texts.txt").write_text("".join(f"text {number}\n" for number in range(24)))
    command = [case.split()[0], *READERS[case].replace("DATA", place).replace("MODEL", "./no-model").split()]
    if place == "./tickets" and case in ("probe", "tune"):
        pytest.skip("reads folders in another way")
    first = answer(*command)
    assert "--text-column" in first
    columns = {"--text-column": "message"} | ({} if case == "distill --texts" else {"--label-column": "topic"})
    advice = [word for flag, name in columns.items() if flag in FLAGS[command[0]] for word in (flag, name)]
    second = answer(*command, *advice)
    assert "line 2: `message` must be a string that is not empty" in second
    assert "--drop-empty" in second
    third = answer(*command, *advice, "--drop-empty")
    assert re.search("no-model|checkpoints in it", third)
    assert "must be a string" not in third
