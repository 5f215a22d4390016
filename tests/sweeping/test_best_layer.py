"""The best layer of a sweep: on average and on each task, as a number, and as an encoder."""

import copy
import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.summaries import RESAMPLES_SCHEMA
from midlayer_encoders.sweeping import SweepResult
from tests.report.made_frames import metrics_frame
from tests.report.made_runs import Scores, make_sweep
from tests.support.tiny_folders import TEXTS, Folder

PLAIN: Scores = {"STS": [0.2, 0.6, 0.5], "Own-0a1b2c3d": [0.4, 0.2, 0.3]}
ECHO: Scores = {"STS": [0.1, 0.4, 0.7], "Own-0a1b2c3d": [0.1, 0.2, 0.2]}


def with_resamples(result: SweepResult, spread: dict[str, float]) -> SweepResult:
    """Return a result whose layers differ by more, or less, in each of two resamples."""
    rows = [
        (task, layer, [value * (1 - spread[task]), value * (1 + spread[task])])
        for task, layer, value in result.scores.select("dataset", "layer", "value").iter_rows()
    ]
    return replace(result, resamples=pl.DataFrame(rows, schema=RESAMPLES_SCHEMA, orient="row"))


@pytest.fixture
def recipes(tmp_path: Path) -> SweepResult:
    plain = make_sweep(tmp_path / "recipes/plain", PLAIN)
    echo = make_sweep(tmp_path / "recipes/echo", ECHO, options={"recipe": "echo"})
    return SweepResult.of({"plain": plain, "echo": echo}, tmp_path)


def test_best_layer_of_each_task_has_score_and_gain(tmp_path: Path) -> None:
    result = with_resamples(make_sweep(tmp_path, PLAIN), {"STS": 0.5, "Own-0a1b2c3d": 0.0})
    assert result.tasks == ("STS", "Own")
    average, sts, own = result.best(), result.best("STS"), result.best(task="Own")
    assert (average, sts, own) == (1, 1, 0)
    assert [best.score for best in (average, sts, own)] == pytest.approx([40, 60, 40])
    assert [best.gain.points for best in (average, sts, own)] == pytest.approx([0, 10, 10])
    # (0.6 - 0.5) · (1 ± 0.5) in points, and the central 95 % of two values
    assert sts.gain.interval == pytest.approx((5.25, 14.75), abs=1e-4)
    assert own.gain == result.gain(0, over=2, task="Own")
    assert average.gain == result.gain()
    assert (average.layer, average.num_layers, average.recipe, average.model) == (1, 2, "plain", "m")
    assert result.best("Own-0a1b2c3d").gain == own.gain, "its name in the frame"
    with pytest.raises(OptionError, match=r"`task` must be one of 'STS', 'Own', but got 'sts'. Did you mean 'STS'"):
        result.best("sts")


def test_best_layer_is_a_number(recipes: SweepResult) -> None:
    best = recipes.best("Own")
    assert [f"{best} {best:2d}", str(best), json.dumps(best), ["a", "b"][best]] == ["0  0", "0", "0", "a"]
    assert repr(best).startswith("BestLayer(layer=0, num_layers=2, recipe='plain', score=40.0")
    for other in (pickle.loads(pickle.dumps(best)), copy.copy(best)):
        assert (other, other.recipe, other.gain.points) == (0, "plain", best.gain.points)


def test_best_recipe_differs_between_tasks_and_gains_are_over_the_plain_text(recipes: SweepResult) -> None:
    actual = {task: recipes.best(task) for task in (None, *recipes.tasks)}
    assert {task: (best.recipe, best.layer) for task, best in actual.items()} == {
        None: ("echo", 2), "STS": ("echo", 2), "Own": ("plain", 0),
    }  # fmt: skip
    # 45 and 40 for the last layer of the plain text; 70 and 50; 40 and 30
    assert [best.gain.points for best in actual.values()] == pytest.approx([5, 20, 10])
    assert recipes.best().gain == recipes.gains()["echo"][1]
    assert recipes.best("Own-0a1b2c3d") == 0
    with pytest.raises(OptionError, match="`task` must be one of 'STS', 'Own', but got 'MIRACL'"):
        recipes.best("MIRACL")
    only_echo = SweepResult.of({"echo": recipes.parts["echo"]}, recipes.folder)
    assert only_echo.best("Own").gain.points == 0, "over its own last layer"


def test_task_that_failed_under_a_recipe_is_scored_under_the_others(recipes: SweepResult, tmp_path: Path) -> None:
    plain = make_sweep(tmp_path / "other", {"STS": PLAIN["STS"]})
    result = SweepResult.of({"plain": plain, "echo": recipes.parts["echo"]}, tmp_path)
    assert set(result.tasks) == {"STS", "Own"}
    best = result.best("Own")
    assert (best.recipe, best.layer, best.gain.points) == ("echo", 1, 0)


def test_scores_and_pandas_frame_have_the_rows_of_the_frame(recipes: SweepResult, tmp_path: Path) -> None:
    part = make_sweep(tmp_path / "metrics", PLAIN)
    both = replace(part, frame=pl.concat([part.frame, metrics_frame(2, names=["lidar"], model="m")]))
    assert both.scores.equals(part.frame)
    for result in (both, recipes):
        assert pl.from_pandas(result.to_pandas()).equals(result.frame)


@pytest.mark.long
def test_encoder_has_the_layer_and_options_of_the_sweep(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")
    name = f"local/{Path(folder).name}"
    center = tmp_path / "center.txt"
    center.write_text("\n".join(f"a text of {number} words" for number in range(20)))
    scores: Scores = {"A": [0.1, 0.2, 0.5, 0.3, 0.2], "B": [0.1, 0.6, 0.2, 0.3, 0.2]}
    swept = {"options": {"norm": "none", "pooling": "last"}, "vectors": {"center": str(center), "normalize": True}}
    result = make_sweep(tmp_path / "out", scores, model=name, **swept)
    result = replace(result, notes=replace(result.notes, model=folder))
    options = {"norm": "none", "pooling": "last", "center": center.read_text().split("\n"), "normalize": True}
    for task, layer in (("A", 2), ("B", 1)):
        expected = LayerEncoder(folder, layer, device="cpu", **options)
        for encoder in (
            result.encoder(task, device="cpu"),
            LayerEncoder(folder, result.best(task), device="cpu"),
            LayerEncoder(folder, device="cpu", **result.best(task).keywords),
        ):
            assert encoder.spec == expected.spec
    np.testing.assert_array_equal(encoder.encode(TEXTS), expected.encode(TEXTS))
    half = result.encoder("A", device="cpu", dtype="bfloat16", truncate_dim=4)
    assert (str(half.dtype), half.encode(TEXTS).shape[1]) == ("torch.bfloat16", 4)
    with pytest.raises(OptionError, match="`pooling` must be 'last', for which the layer was chosen, but got 'mean'"):
        result.encoder(pooling="mean")
    with pytest.raises(OptionError, match=r"`layer` must be chosen for .*, but it was chosen for Llama.*keywords"):
        LayerEncoder(tiny_folder("BERT"), result.best(), device="cpu")
    in_memory = replace(result, frame=result.frame.with_columns(model=pl.lit("module/Stack")))
    with pytest.raises(OptionError, match=r"chosen for module/Stack, a module in memory: LayerEncoder.from_module"):
        in_memory.encoder(device="cpu")
