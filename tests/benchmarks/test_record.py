"""The numbers of the training record, from frames made here whose answers are known."""

import math
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest

from benchmarks.pages import part_of, write_part
from benchmarks.pretraining.findings import (
    Valley,
    crossing,
    event,
    gained,
    leads,
    lowering,
    mean_by_layer,
    moved,
    overtaking,
    regrets,
    settled_at,
    valley,
    winners,
)
from benchmarks.pretraining.record import TOKENS, Run
from benchmarks.pretraining.tables import needed
from midlayer_encoders.frame.schema import FRAME_SCHEMA

TASKS = ("a", "b", "c", "d", "e", "f")
STEPS = (0, 4, 16, 64)


def rows(kind: str, dataset: str, name: str, value: Callable[[int, int], float]) -> list[tuple[object, ...]]:
    return [
        ("m", f"step{step}", layer, layer / 4, kind, dataset, name, value(step, layer))
        for step in STEPS
        for layer in range(5)
    ]


def run(*output: list[tuple[object, ...]]) -> Run:
    frame = pl.DataFrame([row for sample in output for row in sample], schema=FRAME_SCHEMA, orient="row")
    return Run("m", frame, {"steps": 64, "held_out": {"0": 9.0, "64": 3.0}})


def scored(value: Callable[[int, int], float]) -> Run:
    """Return a run whose six tasks all score the same, plain; asked for one word they score half."""
    plain = [rows("score", task, "accuracy", value) for task in TASKS]
    options = [
        rows("score", f"{task} one-word", "accuracy", lambda step, layer: value(step, layer) / 2) for task in TASKS
    ]
    return run(*plain, *options)


def test_a_valley_lies_below_both_ends() -> None:
    assert valley([4.0, 3.0, 2.5, 3.5]) == Valley(2, 2.5, 1.0)
    assert valley([1.0, 3.0, 4.0, 5.0]).depth < 0


def test_a_level_is_crossed_for_good_and_between_looks() -> None:
    assert crossing([0, 1, 4, 16], [0.0, 3.0, 1.0, 3.0], 2.0) == pytest.approx(8 * TOKENS)
    assert crossing([0, 1, 4], [5.0, 5.0, 5.0], 2.0) == 0
    assert math.isinf(crossing([0, 1, 4], [5.0, 5.0, 1.0], 2.0))


def test_an_event_is_read_at_the_layer_where_it_ends_strongest() -> None:
    process = run(
        rows("metric", "probe", "first_token_share", lambda step, layer: (layer == 3) * step / 64 + 0.01 * (layer == 1))
    )
    actual = event(process.metric("first_token_share"))
    assert (actual.layer, actual.final) == (3, 1.0)
    # Between steps 16 (0.25) and 64 (1.0) a third of the way is half of it: a third of the way in the logarithm, too.
    assert actual.half == pytest.approx(TOKENS * 16 * 4 ** (1 / 3))


def test_the_first_token_lowers_the_entropy_by_what_it_has_more_without_it() -> None:
    with_it = rows("metric", "probe", "prompt_entropy_raw", lambda _, layer: 4.0 - layer)
    without = rows("metric", "probe-later", "prompt_entropy_raw", lambda *_: 4.0)
    assert lowering(run(with_it, without)).values[-1].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_scores_are_means_of_the_six_tasks_and_recipes_stay_apart() -> None:
    item = scored(lambda step, layer: 0.1 * layer + step / 1000)
    assert item.scores().values[-1].tolist() == pytest.approx([6.4, 16.4, 26.4, 36.4, 46.4])
    assert item.scores("one-word").values[-1].tolist() == pytest.approx([3.2, 8.2, 13.2, 18.2, 23.2])
    fewer = Run("m", item.frame.filter(pl.col("dataset") != "c"), {})
    with pytest.raises(LookupError, match="5 tasks"):
        fewer.scores()


def test_a_middle_layer_overtakes_when_it_wins_until_the_end() -> None:
    #                 layer: 0    1    2    3    4
    curves = {
        0: (0.5, 0.9, 0.1, 0.1, 0.3),
        4: (0.5, 0.4, 0.4, 0.4, 0.3),
        16: (0.5, 0.4, 0.6, 0.4, 0.3),
        64: (0.5, 0.4, 0.4, 0.7, 0.8),
    }
    item = scored(lambda step, layer: curves[step][layer])
    assert [(actual.layer, round(actual.best)) for actual in winners(item)] == [(1, 90), (1, 40), (2, 60), (3, 70)]
    assert overtaking(item) == (16, None)


def test_gains_are_those_of_the_best_middle_layer_and_of_a_layer_on_each_task() -> None:
    def value(task: int) -> Callable[[int, int], float]:
        return lambda step, layer: (0.5, 0.4, 0.6 + task / 100, 0.4, 0.3)[layer] + step / 1000

    process = run(*(rows("score", task, "accuracy", value(number)) for number, task in enumerate(TASKS)))
    assert leads(process, over=4) == pytest.approx([30, 31, 32, 33, 34, 35])
    assert leads(process, over=0, stage=0) == pytest.approx([10, 11, 12, 13, 14, 15])
    assert gained(process, 2) == pytest.approx([6.4] * 6)


def test_a_rule_loses_what_its_layer_lacks_and_takes_the_last_where_it_cannot_choose() -> None:
    item = scored(lambda _, layer: (0.3, 0.4, 0.8, 0.5, 0.2)[layer])
    entropy = rows("metric", "probe", "prompt_entropy", lambda step, layer: 1.0 + layer * (step > 0))
    raw = rows("metric", "probe", "prompt_entropy_raw", lambda _, layer: (4.0, 3.0, 1.0, 2.0, 4.0)[layer])
    actual = regrets(Run("m", pl.concat([item.frame, run(entropy, raw).frame]), {}))
    assert actual["last"][64] == (4, pytest.approx(60.0))
    assert actual["min-prompt-entropy"][64] == (0, pytest.approx(50.0))
    assert actual["valley-midpoint"][64] == (4, pytest.approx(60.0))  # lowest at the first layer, so no valley
    assert actual["valley-midpoint (raw)"][64] == (3, pytest.approx(30.0))
    assert "few-labels" not in actual


def test_a_way_is_summed_over_looks_and_counts_from_a_step() -> None:
    process = run(rows("metric", "probe", "dime", lambda step, layer: layer * {0: 9.0, 4: 0.0, 16: 1.0, 64: 0.5}[step]))
    assert moved(process, "dime", since=4) == pytest.approx({layer: 1.5 * layer / 36 for layer in range(5)})


def test_layers_settle_within_a_tenth_of_the_range_and_are_averaged_over_runs() -> None:
    late = run(rows("metric", "probe", "dime", lambda step, layer: layer * {0: 9.0, 4: 0.0, 16: 1.0, 64: 0.5}[step]))
    soon = run(rows("metric", "probe", "dime", lambda step, layer: layer * {0: 9.0, 4: 0.5, 16: 0.5, 64: 0.5}[step]))
    actual = [settled_at(item, "dime") for item in (late, soon)]
    assert actual == [{0: 0, 1: 4, 2: 4, 3: 4, 4: 4}] * 2
    far = run(rows("metric", "probe", "dime", lambda step, layer: layer * {0: 9.0, 4: 0.0, 16: 1.0, 64: 5.0}[step]))
    assert settled_at(far, "dime")[4] == 64
    assert mean_by_layer([{0: 1.0, 1: 4.0}, {0: 3.0, 1: 4.0}]) == {0: 2.0, 1: 4.0}


def test_the_paper_s_entropy_falls_only_when_the_first_token_is_nearly_all() -> None:
    raw, paper = (list(map(float, line.split("|")[2:-1])) for line in needed((0.01, 0.5, 0.99)).splitlines()[2:])
    assert raw[0] - raw[1] > 1
    assert abs(paper[0] - paper[1]) < 0.05
    assert paper[0] - paper[2] > 1


def test_a_part_of_a_page_is_written_between_its_comments(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("head\n<!-- one -->\nold\n<!-- /one -->\ntail\n", encoding="utf8")
    write_part(page, "one", "new\n")
    assert page.read_text(encoding="utf8") == "head\n<!-- one -->\nnew\n<!-- /one -->\ntail\n"
    assert part_of(page, "one") == "new\n"
    with pytest.raises(LookupError, match="no place for 'two'"):
        write_part(page, "two", "")
