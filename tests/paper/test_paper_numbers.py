"""The paper's experiments: their inputs, texts and curves, computed by hand from small frames."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from matplotlib.figure import Figure
from polars.testing import assert_frame_equal

from benchmarks.paper.reproduce import EXPERIMENTS, reproduce, write_experiments
from benchmarks.paper.setting import Setting
from benchmarks.paper.token_experiments import entropy_along, extreme_prompts, subblocks
from midlayer_encoders import LayerEncoder
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.metrics.measuring import measure_layers
from tests.selection.frames import frame
from tests.support.thinned import thinned
from tests.support.tiny_folders import save_tiny
from tests.sweeping.test_sweep import sentence

pytestmark = pytest.mark.slow

TEXTS = tuple(f"{sentence(n)} and {sentence(50 + n)}" for n in range(20))
SOLUTIONS = tuple(f"so {sentence(100 + n)} is {sentence(150 + n)[: 5 + n]}" for n in range(9))
PAPER = ["prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "infonce", "lidar", "dime"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("models")
    return save_tiny("Llama", root / "one"), save_tiny("Llama", root / "two", seed=1)


def load(name: str) -> LayerEncoder:
    return LayerEncoder(name, -1, device="cpu", max_length=24)


@pytest.fixture
def setting(folders: tuple[str, str], tmp_path: Path) -> Setting:
    return Setting(
        models=folders, load=load, out=tmp_path, texts=TEXTS, solutions=SOLUTIONS, limit=3, max_length=16, seed=5
    )


def extra(rows: list[tuple[Any, ...]], **columns: pl.DataType) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={**FRAME_SCHEMA, **columns}, orient="row")


def ran(name: str, setting: Setting) -> pl.DataFrame:
    return EXPERIMENTS[name].run(setting)


# --- inputs ---------------------------------------------------------------------------------------------------------


def test_metrics_by_depth_use_four_times_as_many_texts(setting: Setting) -> None:
    setting = replace(setting, limit=2)
    actual = ran("fig2", setting)
    by_hand = [measure_layers(load(model), TEXTS[:8], metrics="paper", views=4, seed=5) for model in setting.models]
    assert_frame_equal(actual, pl.concat(by_hand), rel_tol=1e-4)
    assert_frame_equal(ran("fig10", setting), actual)


def test_solutions_are_read_to_twice_the_length(setting: Setting) -> None:
    actual = ran("fig5", setting)
    by_hand = [
        entropy_along(load(model), SOLUTIONS[:6], stride=4, max_length=24, dataset="solutions")
        for model in setting.models
    ]
    assert_frame_equal(actual, pl.concat(by_hand), rel_tol=1e-4)
    assert actual["position"].max() == 24, "twice 16, but the model's own 24 at the most"


def test_prompts_and_blocks_use_a_few_texts(setting: Setting) -> None:
    prompts = [extreme_prompts(load(model), TEXTS[:3], max_length=16, seed=5) for model in setting.models]
    assert_frame_equal(ran("fig6", setting), pl.concat(prompts), rel_tol=1e-4)
    inside = [subblocks(load(model), TEXTS[:3], max_length=16) for model in setting.models]
    assert_frame_equal(ran("fig15", setting), pl.concat(inside), rel_tol=1e-4)


def test_tuned_models_are_compared_with_the_first(setting: Setting) -> None:
    actual = ran("fig13", setting)
    by_hand = pl.concat(
        measure_layers(load(model), TEXTS[:12], metrics=PAPER, views=4, seed=5) for model in setting.models
    )
    assert_frame_equal(actual, by_hand, check_row_order=False, rel_tol=1e-4)
    assert actual["model"].unique(maintain_order=True).to_list() == ["local/one", "local/two"]


def test_checkpoints_follow_the_setting(setting: Setting, folders: tuple[str, str], tmp_path: Path) -> None:
    for name, folder in zip(("step1", "step8"), folders, strict=True):
        shutil.copytree(folder, tmp_path / "run" / name)
    options = EncoderOptions(dtype="float16", device="cpu")
    run = str(tmp_path / "run")
    own_rows = replace(setting, models=(run,), revisions=("step8", "step1"), options=options, limit=1)
    actual = ran("fig4", own_rows)
    names = ["prompt_entropy", "curvature", "lidar"]
    for step, folder in zip(("step1", "step8"), folders, strict=True):
        encoder = LayerEncoder(folder, -1, device="cpu", dtype="float16", max_length=16)
        separate = measure_layers(encoder, TEXTS[:4], metrics=names, views=4, seed=5)
        keys = ["layer", "name", "value"]
        assert_frame_equal(actual.filter(revision=step).select(keys), separate.select(keys), rel_tol=1e-4)


# --- cached results -------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "models": ("two",), "texts": TEXTS[1:], "solutions": SOLUTIONS[1:],
    "revisions": ("step1", "step2"), "tasks": "other", "layers": (0, -1), "swept": (frame({"dime": [1.0, 2.0]}),),
    "limit": 4, "max_length": 17, "seed": 6,
    "options": EncoderOptions(dtype="float16"),
}  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Create an experiment that counts its runs, and return the counts."""
    runs: list[int] = []

    def run(_: Setting) -> pl.DataFrame:
        runs.append(len(runs))
        return frame({"dime": [float(len(runs))] * 3}, num_layers=2)

    quick = replace(EXPERIMENTS["fig7"], run=run, draw=EXPERIMENTS["fig10"].draw, describe=lambda _: [])
    monkeypatch.setitem(EXPERIMENTS, "fig7", quick)
    return runs


def said(setting: Setting) -> tuple[str, str]:
    (outcome,) = reproduce(["fig7"], setting)
    return outcome.status, f"run {pl.read_parquet(setting.out / 'fig7.parquet')['value'][0]:g}"


@pytest.mark.parametrize("changed", thinned(CHANGES, 4))
def test_experiment_is_repeated_after_a_setting_changed(changed: str, setting: Setting, counted: list[int]) -> None:
    assert [said(setting), said(setting)] == [("done", "run 1"), ("kept", "run 1")]
    other_item = replace(setting, **{changed: CHANGES[changed]})
    assert [said(other_item), said(other_item)] == [("done", "run 2"), ("kept", "run 2")]
    assert [said(setting), len(counted)] == [("done", "run 3"), 3], "one frame is kept, and it was of the other"
    transformed = replace(setting, out=setting.out / "elsewhere", workers=2, options=EncoderOptions(device="cuda"))
    assert transformed.digest == setting.digest, "what changes no number"


def test_experiment_is_repeated_after_files_changed(setting: Setting, counted: list[int], tmp_path: Path) -> None:
    task, run = tmp_path / "task.jsonl", tmp_path / "run"
    task.write_text("{}")
    (run / "step1").mkdir(parents=True)
    (run / "step1" / "weights").write_text("1")
    (run / "config.json").write_text("{}")
    own_rows = replace(setting, out=tmp_path / "out", models=(str(run),), tasks=f"builtin,{task}", revisions=("step1",))
    for number, path in enumerate((task, run / "config.json", run / "step1" / "weights"), 1):
        assert [said(own_rows), said(own_rows)] == [("done", f"run {number}"), ("kept", f"run {number}")]
        path.write_text("changed")
    assert said(own_rows) == ("done", "run 4")


def test_results_of_another_setting_are_not_on_the_page(setting: Setting, counted: list[int]) -> None:
    said(setting)
    other_item = replace(setting, seed=6)
    assert "fig7" not in write_experiments([], other_item).read_text(encoding="utf8")
    assert "fig7" in write_experiments([], setting).read_text(encoding="utf8")
    assert len(counted) == 1


def test_marker_without_its_figure_is_not_a_complete_run(
    setting: Setting, counted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    said(setting)

    def killed(_: Figure, *args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Figure, "savefig", killed)
        with pytest.raises(KeyboardInterrupt):
            said(replace(setting, seed=6))
    assert said(setting) == ("done", "run 3"), "the frame of the other was half way in its place"


def test_shared_metrics_and_correlations_follow_the_setting(setting: Setting) -> None:
    swept = frame({"dime": [1.0, 4.0, 2.0, 8.0, 5.0]}, {"A": [0.1, 0.2, 0.4, 0.3, 0.5]}, num_layers=4)
    item = replace(setting, models=(), swept=(swept,))
    assert_frame_equal(ran("fig3", item), correlate(swept))
    other_item = swept.with_columns(value=pl.col("value").reverse())
    assert_frame_equal(ran("fig8", replace(item, swept=(other_item,))), correlate(other_item))
    assert_frame_equal(ran("fig8", replace(item, seed=1)), correlate(swept))
    assert_frame_equal(ran("fig9", item), ran("fig3", item))
    assert len(list((setting.out / "correlations").iterdir())) == 3
    few = replace(setting, limit=1)
    first = few.metrics(setting.models[0])
    assert_frame_equal(few.metrics(setting.models[0]), first, check_exact=True)
    assert set(few.metrics(setting.models[1])["model"]) == {"local/two"}
    other_item = replace(few, seed=6).metrics(setting.models[0])
    assert_frame_equal(other_item, measure_layers(load(setting.models[0]), TEXTS[:4], views=4, seed=6), rel_tol=1e-4)
