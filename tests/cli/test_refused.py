"""A flag that would have no effect is refused, never ignored."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midlayer_encoders import compare, progression
from midlayer_encoders.cli import app
from midlayer_encoders.errors import MidlayerError, OptionError
from tests.cli.calls import run
from tests.support.tiny_folders import TEXTS, Folder

WITHOUT_EFFECT = {
    "probe --data . --pooling last": "`pooling` has no effect with --kind attentive, which pools the tokens by itself",
    "probe --data . --truncate-dim 8": "`truncate_dim` has no effect with --kind attentive",
    "probe --data . --kind linear --keep-gb 2": "`keep_gb` has no effect with --kind linear, which reads one",
    "sweep --tasks builtin --dims 8,x": "`--dims` must be numbers separated by commas, but got '8,x'",
    "export --layer 1 --for onnx --precision int8": "`--precision` cannot be combined with --for onnx",
    "metrics --texts lines.txt --skip-bad": "`skip_bad` has no effect for texts",
    "metrics --images . --text-column text": "`text_column` has no effect for images: it applies to texts",
    "metrics --audio . --wikitext": "`wikitext` has no effect for audio: it applies to texts",
}


@pytest.mark.parametrize("arguments", WITHOUT_EFFECT)
def test_flag_without_effect_is_refused_before_the_model_is_loaded(arguments: str, tmp_path: Path) -> None:
    command, *rest = arguments.split()
    with pytest.raises(OptionError) as error:
        run(command, "no/such-model", *rest, "--out", str(tmp_path))
    assert WITHOUT_EFFECT[arguments] in str(error.value)


OUTPUT_FOLDERS = {
    "compare": "MODEL MODEL --texts texts.txt",
    "demo": "",
    "metrics": "MODEL --texts texts.txt",
    "probe": "MODEL --data texts.txt",
    "progression": "MODEL --texts texts.txt",
    "select": "MODEL --texts texts.txt",
    "sweep": "MODEL --tasks sts.csv",
    "tune": "MODEL --layer 1 --pairs sts.csv",
    "distill": "MODEL --layer 1 --texts texts.txt",
}


@pytest.mark.parametrize("command", OUTPUT_FOLDERS)
def test_results_are_not_written_into_a_folder_of_other_files(
    command: str, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("texts.txt").write_text("\n".join(TEXTS))
    Path("sts.csv").write_text("sentence1,sentence2,score\na,b,1\nc,d,0\n")
    Path("project").mkdir()
    Path("project/report.html").write_text("mine")
    arguments = [tiny_folder("Llama") if word == "MODEL" else word for word in OUTPUT_FOLDERS[command].split()]
    with pytest.raises(OptionError, match=r"`out` must be a new or empty folder, .*but project holds other files"):
        run(command, *arguments, "--out", "project")
    assert [(path.name, path.read_text()) for path in Path("project").iterdir()] == [("report.html", "mine")]


@pytest.mark.parametrize("command", ["compare a b", "progression a"])
def test_commands_whose_models_name_a_revision_have_no_revision_flag(command: str, tmp_path: Path) -> None:
    arguments = [*command.split(), "--texts", "lines.txt", "--out", str(tmp_path), "--revision", "step7"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--revision" in result.output


def test_revision_is_refused_in_python() -> None:
    with pytest.raises(OptionError, match=r"`revision` must be None, because each model .* 'step7'. Write `name@rev"):
        compare("a", "b", texts=TEXTS * 3, revision="step7")
    with pytest.raises(OptionError, match="`revision` cannot be combined with `revisions`, but got 'step7'"):
        progression("a", ["step1", "step2"], texts=TEXTS, revision="step7")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("sweep . --tasks ,", "`tasks` must be names or paths, but one of them is empty"),
        ("sweep builtin --tasks lines.txt", "'builtin' is neither. Did you mean 'built-in'?"),
        (
            "sweep . --tasks ./rows.csv",
            "Name yours with text_column=… and label_column=… (--text-column, --label-column)",
        ),
        ("sweep . --tasks ./rows.csv --text-column sentense", "but got 'sentense'. Did you mean 'sentence'?"),
        ("metrics . --texts lines.txt --metrics entropy", "Did you mean 'prompt_entropy', 'dataset_entropy' or"),
        ("metrics . --texts rows.csv", "has sentence, category"),
        ("export . --layer 1 --device gpu", "`device` must be one of cpu"),
        ("export . --layer 1 --device cuda:99", "`device` must be one of cpu"),
        ("board swept", "swept has no readable frame.parquet and sweep.json"),
    ],
)
def test_invalid_value_is_refused_before_the_model_is_loaded(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("\n".join(TEXTS))
    Path("rows.csv").write_text("sentence;category\n" + "".join(f"a, b and {n};c{n % 2}\n" for n in range(8)))
    Path("broken.parquet").write_bytes(b"PAR1")
    Path("swept").mkdir()
    Path("swept/sweep.json").write_text('{"title": ')
    Path("swept/frame.parquet").write_bytes(b"PAR1")
    command = arguments.split()
    with pytest.raises(MidlayerError) as error:
        run(*command, "--out", "out")
    assert message in str(error.value)
    assert not Path("out").exists()


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("metrics no/model --texts lines.txt --limit 0", "--limit"),
        ("compare a b --texts lines.txt --limit -1", "--limit"),
        ("progression a --texts lines.txt --limit -1", "--limit"),
        ("select no/model --texts lines.txt --max-texts 0", "--max-texts"),
        ("select no/model --texts lines.txt --seed -1", "--seed"),
        ("sweep no/model --tasks builtin --scoring all", "--scoring"),
        ("sweep no/model --tasks builtin --layers first", "--layers"),
        ("embed no/model --texts lines.txt --out v.npy --layers 6-0", "--layers"),
        ("metrics no/model --texts lines.txt --layers 0:9:0", "--layers"),
        ("probe no/model --data classes --layers 0,,2", "--layers"),
        ("metrics no/model --texts lines.txt --layers ::2", "--layers"),
    ],
)
def test_value_out_of_range_is_refused_by_the_parser(arguments: str, flag: str) -> None:
    result = CliRunner().invoke(app, arguments.split(), env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert f"Invalid value for '{flag}'" in result.output


REFUSED_EARLY = {
    "sweep built-in --tasks missing.csv": "there is no",
    "sweep built-in --tasks data.csv": "(--text-column, --label-column)",
    "sweep built-in --tasks texts.txt --out project": "holds other files",
    "select built-in --texts missing.csv": "There is no file",
    "select built-in --texts data.csv": "(--text-column, --label-column)",
    "select built-in --texts texts.txt --rule best": "`rule` must be one of",
    "select built-in --texts empty.txt": "must hold at least one text",
    "select built-in --texts texts.txt --out /proc/nope": "/proc/nope cannot be written",
    "sweep built-in --tasks tasks.csv --metrics entropyy": "Did you mean 'prompt_entropy'",
    "sweep built-in --tasks tasks.csv --precisions int9": "`precisions",
    "sweep built-in --tasks tasks.csv --out /proc/nope": "/proc/nope cannot be written",
    "sweep built-in --tasks faulty.csv": "line 2: `text` must be",
    "metrics built-in --texts empty.txt": "must hold at least one text",
    "metrics built-in --texts texts.txt --metrics entropyy": "'prompt_entropy', 'dataset_entropy' or 'matrix_entropy'",
    "metrics built-in --texts texts.txt --out /proc/nope": "/proc/nope cannot be written",
    "compare a b --texts texts.txt --metrics cka": "`metrics` must be one of",
    "compare a b --texts texts.txt --resamples 1": "`resamples` must be",
    "progression a --texts texts.txt --metrics entropyy": "Did you mean 'prompt_entropy'",
    "progression a --texts texts.txt --executor-option a=1": "`--executor-option` needs `--executor`",
    "probe built-in --data nowhere": "There is no file 'nowhere'",
    "probe built-in --data faulty.csv": "line 2: `text` must be",
    "probe built-in --data tasks.csv --epochs 0": "`epochs` must be",
    "embed built-in --texts texts.txt --out v.csv": "`out` must end in",
    "embed built-in --texts texts.txt --out v.npy --token-budget many": "`token_budget` must be",
    "embed built-in --texts empty.txt --out v.npy": "must hold at least one text",
    "export built-in --layer abc --out o": "must be a layer such as 17, -1 or 0.7, but got 'abc'",
    "export built-in --layer 3 --out project": "must be a new or empty folder",
    "export built-in --layer 3 --out /proc/nope": "/proc/nope cannot be written",
    "export built-in --layer -0.2 --out o": "must be a layer such as 17, -1 or 0.7, but got '-0.2'",
    "embed built-in --texts texts.txt --out v.npy --layers 0,1.5": "but got '0,1.5'",
    "compare . run --texts texts.txt": "'run' is the folder of a run. Pass 'run/model'",
    "compare . ./missing --texts texts.txt": "there is no './missing'",
    "metrics ./missing/model.gguf --texts texts.txt": "there is no './missing/model.gguf'",
    "metrics run --texts texts.txt": "'run' is the folder of a run. Pass 'run/model'",
    **dict.fromkeys(
        (
            "select ./missing --texts texts.txt",
            "metrics ./missing --texts texts.txt",
            "embed ./missing --texts texts.txt --out v.npy",
            "probe ./missing --data tasks.csv",
            "export ./missing --layer 3 --out o",
            "tune ./missing --layer 3 --pairs pairs.csv --out o",
            "distill ./missing --layer 3 --texts many.txt --out o",
        ),
        "there is no './missing'",
    ),
    "export built-in --layer 3 --out o --for tensorrt": "`target` must be one of",
    "export built-in --layer 3 --out o --for onnx": "onnx is not installed: pip install 'midlayer-encoders[onnx]'",
    "export built-in --layer 3 --out o --center empty.txt": "must hold at least one text",
    "tune built-in --layer abc --pairs pairs.csv --out o": "must be a layer such as 17, -1 or 0.7, but got 'abc'",
    "tune built-in --layer 3 --pairs faulty.csv --out o": "line 2: `text` must be",
    "tune built-in --layer 3 --pairs pairs.csv --out o --epochs 0": "`epochs` must be",
    "tune built-in --layer 3 --pairs pairs.csv --out project": "holds other files",
    "distill built-in --layer 3 --texts empty.txt --out o": "must",
    "distill built-in --layer 3 --texts texts.txt --out o --match all": "`match` must be one of",
}
RUN_EACH = """
import sys
from midlayer_encoders.cli import main

sys.modules["onnx"] = None  # as if it were not installed
sys.modules.setdefault("onnxruntime", sys)
for command in sys.argv[1:]:
    sys.argv = ["midlayer", *command.split()]
    try:
        main()
    except SystemExit as end:
        heavy = {"torch", "transformers", "mteb"} & sys.modules.keys()
        print(command, end.code in (1, 2), sorted(heavy), sep="|")
    print("next command", file=sys.stderr)
"""


@pytest.mark.long
def test_invalid_data_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("message;topic\na long text;x\na longer text;y\n")
    (tmp_path / "texts.txt").write_text("a text\nanother text\n")
    (tmp_path / "many.txt").write_text("".join(f"text {number}\n" for number in range(200)))
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "tasks.csv").write_text(
        "text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(40))
    )
    (tmp_path / "faulty.csv").write_text("text,label\n,x\nb,x\nc,y\n")
    (tmp_path / "pairs.csv").write_text("anchor,positive\n" + "".join(f"a {number},b\n" for number in range(40)))
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "modules.json").write_text("[]")
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "report.html").write_text("mine")
    run = [sys.executable, "-c", RUN_EACH, *REFUSED_EARLY]
    result = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == [f"{command}|True|[]" for command in REFUSED_EARLY]
    for errors, message in zip(result.stderr.split("next command\n"), REFUSED_EARLY.values(), strict=False):
        assert message in " ".join(errors.replace("│", " ").split())
