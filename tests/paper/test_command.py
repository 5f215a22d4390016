"""``python -m benchmarks.paper``: its options, examples and errors."""

import ast
import inspect
import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks.paper import reproduce
from benchmarks.paper.command import app
from benchmarks.paper.reproduce import Outcome
from benchmarks.paper.setting import TENTHS, Setting
from midlayer_encoders.cli import main
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.tasks.tables import Columns
from tests.cli.test_data_flags import FLAG, messages
from tests.report.made_frames import scores_frame
from tests.support.tiny_folders import Folder

COMMAND = typer.main.get_command(app)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> list[Setting]:
    """Return the settings of the experiments without running them: the cheapest takes a minute with all options."""
    result: list[Setting] = []
    monkeypatch.setattr(
        reproduce, "reproduce", lambda names, setting: result.append(setting) or [Outcome(names[0], "done")]
    )
    monkeypatch.setattr(reproduce, "write_experiments", lambda outcomes, setting: setting.out / "report.html")
    return result


def test_every_option_is_in_the_setting(settings: list[Setting], tiny_folder: Folder, tmp_path: Path) -> None:
    long, short = " ".join(["word"] * 20), " ".join(["word"] * 19)
    (tmp_path / "texts.txt").write_text(f" = Title = \n{long}\n{short}\n{long} more\n")
    (tmp_path / "gsm.jsonl").write_text('{"question": "q", "answer": "first"}\n{"question": "q", "answer": "second"}\n')
    sweep_frames = [scores_frame(4, model=name) for name in ("a", "b")]
    sweep_frames[0].write_parquet(tmp_path / "a.parquet")
    sweep_frames[1].write_csv(tmp_path / "b.csv")
    task = tmp_path / "task.jsonl"
    task.write_text("".join(f'{{"title": "text {n}", "kind": "{n % 2}"}}\n' for n in range(24)))
    folder, flags = tiny_folder("Llama"), ["--model", tiny_folder("Llama"), "--model", "another"]
    flags += ["--texts", str(tmp_path / "texts.txt"), "--solutions", str(tmp_path / "gsm.jsonl"), "--limit", "3"]
    flags += ["--revisions", "step1,step5", "--tasks", str(task), "--layers", "0,0.5"]
    flags += ["--swept", str(tmp_path / "a.parquet"), "--swept", str(tmp_path / "b.csv"), "--max-length", "20"]
    flags += ["--text-column", "title", "--label-column", "kind", "--drop-empty"]
    flags += ["--dtype", "float64", "--device", "cpu", "--seed", "5", "--out", str(tmp_path / "o")]
    run("fig6", *flags)
    (result,) = settings
    assert (result.models, result.out) == ((folder, "another"), tmp_path / "o")
    assert (result.texts, result.solutions) == ((long, f"{long} more"), ("first", "second"))
    assert (result.revisions, result.tasks, result.layers) == (("step1", "step5"), str(task), (0, 0.5))
    assert (result.limit, result.max_length, result.seed) == (3, 20, 5)
    assert result.columns == Columns("title", "kind", drop_empty=True)
    assert all(frame.equals(sweep_frame) for frame, sweep_frame in zip(result.swept, sweep_frames, strict=True))
    encoder = result.load(folder)
    assert (encoder.spec.dtype, encoder.layer, encoder.max_seq_length, encoder.source) == ("float64", 4, 40, folder)
    run("fig7")
    plain = settings[1]
    assert (plain.models, plain.texts, plain.solutions, plain.swept) == ((), (), (), ())
    assert (plain.layers, plain.tasks, plain.revisions) == (TENTHS, "builtin", ())
    assert (plain.limit, plain.max_length, plain.seed) == (8, 64, 0)
    run("fig7", "--layers", "all")
    assert settings[2].layers == "all"
    with pytest.raises(OptionError, match="`--max-length` must be a whole number, 8 or more, but got 7"):
        run("fig7", "--max-length", "7")


def test_examples_of_the_help_are_valid() -> None:
    head, *lines = (COMMAND.epilog or "").split("\n\n")
    assert (head, len(lines)) == ("Examples:", 2)
    for line in lines:
        program, option, module, *arguments = shlex.split(line)
        assert (program, option, module) == ("python", "-m", "benchmarks.paper")
        COMMAND.make_context(module, arguments)  # raises for an unknown or missing flag


def test_messages_name_flags_that_exist() -> None:
    flags = {flag for option in COMMAND.params for flag in option.opts}
    texts = [
        text
        for path in Path(inspect.getfile(reproduce)).parent.glob("*.py")
        for text in messages(ast.parse(path.read_text()))
    ]
    assert {"--model", "--texts"} <= {flag for text in texts for flag in FLAG.findall(text)} <= flags


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fig1", "--swept", "broken.parquet", "--out", "out"], "broken.parquet must be a frame of results"),
        (["fig7", "--out", "project"], "`out` must be a new or empty folder, or hold an earlier run"),
        (["fig1", "--model", "m", "--tasks", "./own.csv"], "(--text-column, --label-column)"),
    ],
)
def test_invalid_argument_is_refused_before_a_model_is_loaded(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.parquet").write_bytes(b"PAR1")
    Path("own.csv").write_text("message;topic\n" + "".join(f"a text {n};kind {n % 2}\n" for n in range(24)))
    Path("project").mkdir()
    Path("project/report.html").write_text("mine")
    with pytest.raises(MidlayerError) as error:
        run(*arguments)
    assert message in str(error.value)
    assert not Path("out").exists()
    assert [(path.name, path.read_text()) for path in Path("project").iterdir()] == [("report.html", "mine")]


def test_main_of_an_application_prints_its_error_and_says_that_it_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", "fig77", "--json"])
    with pytest.raises(SystemExit) as ended:
        main(app, resumes=True)
    assert ended.value.code == 2
    assert "Did you mean 'fig7'" in json.loads(capsys.readouterr().err)["error"]

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["benchmarks.paper", "fig7"])
    monkeypatch.setattr(reproduce, "resolve_experiments", interrupted)
    with pytest.raises(SystemExit) as ended:
        main(app, resumes=True)
    assert ended.value.code == 130
    assert "Stopped. The same command continues from there." in capsys.readouterr().err


@pytest.mark.long
def test_module_prints_its_result_as_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.paper", "fig7", "--json", "--out", str(tmp_path / "out")]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert process.returncode == 0, process.stderr
    result = json.loads(process.stdout)
    assert [(item["name"], item["status"]) for item in result["experiments"]] == [("fig7", "done")]
    assert Path(result["report"]).is_file()
