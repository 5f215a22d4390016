"""Commands with any flags and files: they end, with an exit code, or with an error of ours, and print no NaN."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from midlayer_encoders.cli import app
from midlayer_encoders.errors import MidlayerError
from tests.fuzz.files import damaged, table, write
from tests.fuzz.running import Case, check_cases, seeds
from tests.fuzz.values import text
from tests.support.tiny_folders import Folder

LINES = [f"text {number} about {word}" for number in range(5) for word in ("cats", "dogs", "trains", "ships")]
WORDS = ("0", "1", "-1", "2", "0.5", "nan", "inf", "-inf", "1e999", "9" * 30, "all", "paper", "none", "curvature", "auto", "last", "",
         "x", "a=b", "=", ",", "0,1", "cpu", "gpu", "cuda:99", "float32", "mean", "text", "image", "true", "--", "-x", "a" * 300)  # fmt: skip
# What each command needs, and flags that keep it quick.
COMMANDS: dict[str, str] = {
    "export": "MODEL --layer 1 --out OUT",
    "metrics": "MODEL --texts TEXTS --out OUT --metrics curvature --limit 3 --device cpu",
    "select": "MODEL --texts TEXTS --max-texts 16 --device cpu",
    "probe": "MODEL --data TABLE --out OUT --kind linear --device cpu",
    "compare": "MODEL OTHER --texts TEXTS --out OUT --metrics curvature --resamples 2",
    "progression": "MODEL --texts TEXTS --out OUT --metrics curvature --limit 3",
    "sweep": "no/such-model --tasks NOTASK --out OUT --metrics none --device cpu",
    "report": "OUT",
}


def cli_case(folder: Path, model: str, other_item: str) -> Case:
    """Return a case of a command of which some words are replaced, left out or added."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]

    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        name = random.choice(list(COMMANDS))
        place = folder / str(random.random())
        place.mkdir()
        values = _values(random, place, model if random.random() < 0.15 else "no/such-model", other_item)
        words = COMMANDS[name].split()
        for _ in range(random.choice([0, 1, 1, 2])):
            _change(random, words, commands[name])
        words = [name, *(str(values.get(word, word)) for word in words)]
        return " ".join(words), lambda: _check(words, place)

    return case


def _values(random: Random, place: Path, model: str, other_item: str) -> dict[str, Any]:
    suffix = random.choice([".csv", ".jsonl", ".parquet"])
    lines = LINES if random.random() < 0.7 else [text(random) for _ in range(20)]
    rows = [json.dumps({"text": line, "label": number % 2}) for number, line in enumerate(LINES)]
    good = place / "good.jsonl"
    good.write_text("\n".join(rows))
    odd = write(random, place / f"odd{suffix}", damaged(random, table(random, suffix)))
    texts = write(random, place / "texts.txt", damaged(random, "\n".join(lines).encode("utf8", "replace")))
    return {
        "MODEL": model, "OTHER": other_item, "OUT": place / "out", "TEXTS": texts, "TABLE": random.choice([good, odd]),
        "NOTASK": random.choice([odd, odd, f"{odd},{odd}", ",", "a" * 300 + ".csv"]), "FOLDER": place, "ODD": odd,
    }  # fmt: skip


def _change(random: Random, words: list[str], command: Any) -> None:
    """Replace the value of a flag, or add a flag of the command with some value."""
    options = [item for item in command.params if item.param_type_name == "option" and "--out" not in item.opts]
    inputs = [
        place for place, word in enumerate(words[:-1]) if word.startswith("--") and word not in ("--out", "--tasks")
    ]
    value = random.choice([*WORDS, "ODD", "FOLDER", "TEXTS", text(random).replace("\0", "")])
    value = "x" if value.startswith(("/", "~", ".")) else value  # nothing is read or written elsewhere
    if inputs and random.random() < 0.4:
        words[random.choice(inputs) + 1] = value
        return
    item = random.choice(options) if options else None
    words += ["--nothing"] if item is None else [item.opts[0]] if item.is_flag else [item.opts[0], value]


def _check(words: list[str], place: Path) -> None:
    try:
        result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if isinstance(result.exception, MidlayerError):
        raise result.exception
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2)
    assert result.exit_code or " nan" not in result.output


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in a folder of its own: commands write below where they are called."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
@seeds(35, 5, 200)
def test_cli(tmp_path: Path, tiny_folder: Folder, first: int, count: int) -> None:
    check_cases(cli_case(tmp_path, tiny_folder("Llama"), tiny_folder("GPTNeoX")), "cli", first, count)
