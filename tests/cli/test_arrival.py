"""Every option of every command arrives at the function that the command calls."""

import ast
import functools
import importlib
import inspect
import re
import textwrap
import wave
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
import typer
from PIL import Image
from typer.testing import CliRunner

from midlayer_encoders.cli import _arguments, app
from midlayer_encoders.encoder import sentence_transformers_encoder
from midlayer_encoders.encoder.options import option_fields
from midlayer_encoders.sweeping import sweeps  # noqa: F401  # otherwise first imported while LayerEncoder is replaced
from midlayer_encoders.sweeping.sweeps import Sweep

COMMANDS: dict[str, click.Command] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OUTPUT = {"as_json", "quiet"}  # of the terminal; tests/cli/test_json.py and test_progress.py
WRITTEN = {
    ("metrics", "out"),
    ("probe", "out"),
    ("select", "out"),
    ("board", "out"),
    ("export", "precision"),  # on the card
    ("sweep", "executor"),  # test_passed_on.py
    ("sweep", "executor_option"),
    ("probe", "skip_bad"),
}
"""Options that a command uses after the call, or that need a hub or unreadable files."""
INPUTS = {"images", "audio", "skip_bad"}

CALLS: dict[str, tuple[str, list[str]]] = {
    "embed": ("extras.vectors:embed", ["MODEL", "--texts", "TEXTS", "--out", "OUT.npy"]),
    "metrics": (":measure", ["MODEL", "--texts", "TEXTS", "--out", "OUT"]),
    "sweep": ("sweeping.layer_sweep:run_sweep", ["MODEL", "--tasks", "TASK"]),
    "select": ("selection:select", ["MODEL", "--texts", "TEXTS"]),
    "compare": ("comparing:compare", ["MODEL", "TUNED", "--texts", "TEXTS"]),
    "progression": ("comparing:progression", ["MODEL", "--texts", "TEXTS"]),
    "probe": ("extras.probing:probe", ["MODEL", "--data", "TASK"]),
    "tune": ("extras.training:tune", ["MODEL", "--layer", "2", "--pairs", "TASK", "--out", "OUT"]),
    "distill": ("extras.training:distill", ["MODEL", "--layer", "2", "--texts", "TEXTS", "--out", "OUT"]),
    "export": ("extras.export:export_for", ["MODEL", "--layer", "2", "--out", "OUT"]),
    "board": ("extras.boards:board", ["OUT"]),
}
VALUES: dict[str, str] = {
    "layers": "0,1", "layer": "1", "metrics": "anisotropy", "metric_names": "anisotropy", "recipes": "plain,echo",
    "rule": "last", "token_budget": "99", "text_column": "title", "label_column": "kind", "revisions": "step1", "max_params": "10M", "tasks": "OTHER",
    "matryoshka": "8,4", "target": "vllm", "texts": "OTHER", "data": "OTHER", "test": "OTHER", "pairs": "OTHER",
    "labels": "LABELS", "out": "ANOTHER", "store": "ANOTHER", "reference": "ANOTHER",
    "images": "IMAGES", "audio": "AUDIO", "remove": "key", "model": "second", "center": "LINES",
    "executor": "processes", "executor_option": "count=7",
    "revision": "abc", "pooling": "max", "dtype": "bfloat16", "device": "cuda", "device_map": "auto",
    "prompts": "ask=q: ", "default_prompt_name": "ask", "template": "say {text}", "recipe": "echo", "tower": "text",
    "adapters": "folder", "gguf_file": "file.gguf", "tuned": "another",
    "held_out": "0.25", "store_dtype": "float16", "scoring": "mteb", "kind": "linear", "max_length": "9", "limit": "3",
    "join": "echo", "quantization": "4bit",
}  # fmt: skip
NEEDS: dict[str, list[str]] = {
    "skip_bad": ["--images", "MIXED"], "int8": ["--for", "gguf"],
    "executor_option": ["--executor", "processes"],
    "default_prompt_name": ["--prompt", "ask=q: "], "drop_empty": ["--text-column", "gaps"],
    "template_tokens": ["--template", "say {text}"], "join": ["--template", "say {text} now {read} and {text}"],
}  # fmt: skip


class ArrivedError(Exception):
    """The command has reached its function."""


def arrival(command: str, flags: list[str], patch: pytest.MonkeyPatch) -> str:
    """Return the arguments with which a command calls its function, and its encoder's, as text."""
    module, _, name = CALLS[command][0].partition(":")
    calls: list[str] = []

    def load(model: str, *arguments: Any, **options: Any) -> Any:
        calls.append(f"{model} {arguments} {options}")
        tokenizer = lambda line, **_: {"input_ids": line}  # noqa: E731
        return SimpleNamespace(
            media=["text"],
            tokenizer=tokenizer,
            parameters=lambda: [],
            options=SimpleNamespace(),
            check_one_stack=lambda _: None,
            model_card_data=SimpleNamespace(),
        )

    def call(*arguments: Any, **keywords: Any) -> None:
        keywords.pop("progress", None)
        keywords.pop("report", None)
        for request in (argument for argument in arguments if isinstance(argument, Sweep)):
            arguments, keywords = (request.model,), vars(request.change(model=None, progress=None))
        values = [value for value in (*arguments, *keywords.items()) if not isinstance(value, SimpleNamespace)]
        calls.append(re.sub(r" at 0x[0-9a-f]+", "", repr(values)))
        raise ArrivedError

    patch.setattr(importlib.import_module(f"midlayer_encoders.{module}".rstrip(".")), name, call)
    patch.setattr(_arguments, "load_model", load)
    patch.setattr(sentence_transformers_encoder, "LayerEncoder", load)
    patch.setattr("midlayer_encoders.models.hub.check_model", lambda *_, **__: None)
    result = CliRunner().invoke(app, [command, *flags])
    status = "ARRIVED" if isinstance(result.exception, ArrivedError) else f"{result.exception} {result.output}"
    return "\n".join([*calls, status])


@pytest.fixture
def fill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], list[str]]:
    """Return a function that replaces the names of files by their paths."""
    monkeypatch.chdir(tmp_path)
    rows = [
        f'{{"text": "{word} {number}", "title": "{number} {word}", "label": "{word}", "kind": {number % 2}}}\n'
        for word in "ab"
        for number in range(9)
    ]
    gaps = [" " if number < 2 else f"gap {number}" for number in range(len(rows))]
    rows = [row.replace("}", f', "gaps": "{gap}"}}') for row, gap in zip(rows, gaps, strict=True)]
    (tmp_path / "some.jsonl").write_text("".join(rows))
    (tmp_path / "other.jsonl").write_text("".join(rows[:-2]))
    (tmp_path / "labels.txt").write_text("x\ny\n" * 9)
    (tmp_path / "lines.txt").write_text("".join(f"a b c d e f g h {n}\n" for n in range(16)))
    for kind in ("images", "mixed", "audio"):
        (tmp_path / kind).mkdir()
    for kind in ("images", "mixed"):
        Image.new("RGB", (4, 4)).save(tmp_path / kind / "a.png")
    (tmp_path / "mixed" / "broken.png").write_bytes(b"")
    with wave.open(str(tmp_path / "audio" / "a.wav"), "wb") as file:
        file.setparams((1, 2, 16000, 0, "NONE", ""))
        file.writeframes(bytes(64))
    for name in ("out", "another"):
        (tmp_path / name).mkdir()
    paths = {
        "TEXTS": "some.jsonl",
        "TASK": "some.jsonl",
        "OTHER": "other.jsonl",
        "LABELS": "labels.txt",
        "LINES": "lines.txt",
        "MIXED": "mixed",
        "OUT": "out/new",
    }
    paths |= {"OUT.npy": "new.npy", "ANOTHER": "another", "IMAGES": "images", "AUDIO": "audio"}
    return lambda words: [paths.get(word, word) for word in words]


def value_of(command: str, option: click.Parameter) -> list[str]:
    """Return the words of a value that is not the default."""
    name = str(option.name)
    if getattr(option, "is_flag", False):
        return []
    if name == "norm":
        return ["final" if option.default == "none" else "none"]
    if command == "embed" and name == "out":
        return ["other.npy"]
    return [VALUES.get(name, "7")]


@pytest.mark.parametrize("command", CALLS)
def test_every_option_changes_the_call(
    command: str, fill: Callable[[list[str]], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, base = CALLS[command]
    arrive = functools.cache(lambda *words: arrival(command, fill(list(words)), monkeypatch))
    lost = []
    for option in COMMANDS[command].params:
        name = str(option.name)
        if option.param_type_name == "argument" or name in OUTPUT or (command, name) in WRITTEN:
            continue
        if name in option_fields() and command != "embed" and name != "dtype":  # all commands share these
            continue
        needs = NEEDS.get(name, [])
        start = _without(base, [*option.opts, *needs[:1], *(["--texts"] if name in INPUTS else [])])
        before = arrive(*(base if option.opts[0] in base else start), *needs)
        after = arrive(*start, *needs, option.opts[0], *value_of(command, option))
        if before == after or not (before + after).count("ARRIVED"):
            lost.append((option.opts[0], before))
    assert not lost


def _without(words: list[str], flags: list[str]) -> list[str]:
    """Return words without flags and their values."""
    left = list(words)
    for flag in flags:
        if flag in left:
            position = left.index(flag)
            del left[position : position + 2]
    return left


@pytest.mark.parametrize("command", COMMANDS)
def test_every_parameter_of_a_command_is_read(command: str) -> None:
    function: Any = inspect.unwrap(COMMANDS[command].callback)  # type: ignore[arg-type]
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    body = ast.Module(tree.body[0].body, [])  # type: ignore[attr-defined]
    read = {node.id for node in ast.walk(body) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    assert set(inspect.signature(function).parameters) <= read


def test_every_command_has_a_call_or_one_output() -> None:
    assert COMMANDS.keys() - CALLS.keys() == {"demo"}
