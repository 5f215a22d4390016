"""Intervals of the gains of a sweep: of a small task, in the page and on a board, resumed, damaged, and of recipes."""

import json
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder, board
from midlayer_encoders.cli import find
from midlayer_encoders.sweeping import SweepResult, task_scoring
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep
from tests.tasks.rows import ROWS, write

Printed = Callable[[SweepResult], str]
pytestmark = MTEB
IN_MEMORY: dict[str, Any] = {"workers": 1, "baselines": False}


@pytest.fixture(scope="module")
def encoder(tiny_folder: Folder) -> LayerEncoder:
    """Return an encoder whose last block returns its input, so that layers 3 and 4 are equal."""
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    block = encoder.transformer.layers[-1]
    with torch.no_grad():
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    return encoder


@pytest.fixture(scope="module")
def twelve(encoder: LayerEncoder, tmp_path_factory: pytest.TempPathFactory) -> tuple[SweepResult, Path]:
    root = tmp_path_factory.mktemp("twelve")
    task = write(root / "near.jsonl", ROWS["STS"][:12])
    return sweep(encoder, task, out=root / "out", **IN_MEMORY), task


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Callable[[SweepResult], str]:
    def text(result: SweepResult) -> str:
        capsys.readouterr()
        find.print_sweep(result)
        return " ".join(capsys.readouterr().out.split())

    return text


def test_small_task_prints_the_interval_with_the_gain(twelve: tuple[SweepResult, Path], printed: Printed) -> None:
    result, _ = twelve
    average = result.curves.average
    assert average is not None
    gain = result.gain()
    assert average.best_layer < 3
    assert gain.low < gain.points < gain.high
    assert gain.high - gain.low > 5  # twelve pairs say little
    line = f"{gain.points:.1f} points more than the last layer ({average.last:.1f}), 95 % interval "
    assert line in printed(result)
    page = unescape(result.html()).replace("\N{NO-BREAK SPACE}", " ")
    assert line in page
    assert ("the two are not separable" in page) == (gain.low <= 0 <= gain.high)


def test_equal_layers_are_not_separable(twelve: tuple[SweepResult, Path]) -> None:
    result, _ = twelve
    gain = result.gain(3, over=4)
    assert (gain.points, gain.interval, gain.separable) == (0, (0, 0), False)
    loaded = SweepResult.load(result.folder)
    assert loaded.resamples.equals(result.resamples)
    assert loaded.gain() == result.gain()


def test_resumed_sweep_has_the_same_interval_without_scoring_again(
    twelve: tuple[SweepResult, Path], encoder: LayerEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, task = twelve
    (saved,) = (result.folder / "together").glob("*.json")

    def resumed() -> SweepResult:
        return sweep(encoder, task, out=result.folder, **IN_MEMORY)

    content = json.loads(saved.read_text())
    changed = {name: [score, *(0.5 for _ in rest)] for name, (score, *rest) in content["scores"].items()}
    saved.write_text(json.dumps(content | {"scores": changed}))
    assert resumed().resamples.equals(result.resamples)  # a changed file is computed again
    scored: list[int] = []
    original = task_scoring.resampled_scores
    monkeypatch.setattr(
        task_scoring, "resampled_scores", lambda *args, **kwargs: scored.append(1) or original(*args, **kwargs)
    )
    (result.folder / "resamples.parquet").write_bytes(b"damaged")
    again = resumed()
    assert again.resamples.equals(result.resamples)
    assert not scored
    first_version = {name: score for name, (score, *_) in content["scores"].items()}
    header = content["of"] | {"format": 1}
    saved.write_bytes(task_scoring.dump_with_checksum({"of": header, "scores": first_version}))
    assert resumed().resamples.equals(result.resamples)
    assert scored  # from the stored vectors


@pytest.mark.long
def test_results_without_resamples_say_so(
    twelve: tuple[SweepResult, Path], encoder: LayerEncoder, tmp_path: Path, printed: Printed
) -> None:
    result, task = twelve
    copy = result.save(tmp_path / "copy")
    with_interval = board(copy).html().replace("\N{NO-BREAK SPACE}", " ")
    gain = result.gain()
    assert f"(95 % interval {gain.low:+.1f} to {gain.high:+.1f}".replace("-", "−") in unescape(with_interval)
    (copy / "resamples.parquet").write_bytes(b"damaged")
    damaged = SweepResult.load(copy)  # it is set aside
    assert (copy / "resamples.parquet.broken").exists()
    assert damaged.gain().without == ("near",)
    assert ", no interval: near was not resampled." in printed(damaged)
    assert "(no interval: near was not resampled)" in unescape(board(copy).html().replace("\N{NO-BREAK SPACE}", " "))
    by_mteb = sweep(encoder, task, out=tmp_path / "mteb", layers=[2, 4], scoring="mteb", **IN_MEMORY)
    assert by_mteb.gain().without == ("near",)


@pytest.fixture(scope="module")
def recipes(tiny_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> SweepResult:
    root = tmp_path_factory.mktemp("recipes")
    tasks = [write(root / f"{name}.jsonl", ROWS[name]) for name in ("STS", "Reranking")]
    result = sweep(tiny_folder("Llama"), tasks, recipes=["plain", "echo"], layers=[1, 3], out=root / "out", **QUICK)
    assert result.parts
    return result


@pytest.mark.long
def test_recipes_are_paired_over_the_same_items(recipes: SweepResult) -> None:
    plain, echo = recipes.parts["plain"], recipes.parts["echo"]
    best = [part.best() for part in (plain, echo)]

    def samples(part: SweepResult, layer: int) -> np.ndarray:
        rows = part.resamples.filter(layer=layer).sort("dataset")["values"].to_list()
        assert len(rows) == 2
        return np.mean(rows, axis=0)

    over_best, over_last = recipes.gains()["echo"]
    for gain, layer in ((over_best, best[0]), (over_last, 3)):
        differences = 100 * (samples(echo, best[1]) - samples(plain, layer))
        assert gain.interval == pytest.approx(np.quantile(differences, [0.025, 0.975]).tolist(), abs=1e-4)
        assert gain == echo.gain(best[1], over=layer, other=plain)
    assert recipes.gains()["plain"][0].interval == (0, 0)
    assert recipes.gain() == recipes.winner.gain()
    loaded = SweepResult.load(recipes.folder)
    assert loaded.parts
    assert loaded.gains() == recipes.gains()


@pytest.mark.long
def test_recipes_print_their_intervals(recipes: SweepResult, printed: Printed) -> None:
    gain = recipes.gains()["echo"][0]
    cell = f"{gain.points:+.1f} ({gain.low:+.1f} to {gain.high:+.1f})".replace("-", "−")
    assert cell in unescape(recipes.html())
    assert cell in printed(recipes)
