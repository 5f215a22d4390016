"""What the page of the training record says of the long run and of the base that was repeated, and the frames that say it."""

import json

import numpy as np

from benchmarks.pretraining.findings import RAW, valley
from benchmarks.pretraining.record import RESULTS, TOKENS, read_run
from tests.docs.record_numbers import depth, over_last, share

NOVELS = 40_836_518  # tokens, that corpus.py prints
SHOWN = (2048, 4096, 9216)  # steps


def repeated_values() -> list[float]:
    """Return the number of losses and of values that a repeated base has, all of them as the base does."""
    base, again = read_run("base"), read_run("base-again")
    assert again.told["losses"] == base.told["losses"]
    keys = ["revision", "layer", "kind", "dataset", "name"]
    same = base.frame.join(again.frame, on=[*keys, "value"], how="inner", nulls_equal=True)
    assert len(same) == len(again.frame.unique(keys)) == len(again.frame)
    return [len(again.told["losses"]), len(same)]


def training_seconds() -> list[float]:
    told = read_run("base-again").told
    return [told["seconds"], told["seconds"] - sum(told[f"{kind}_seconds"] for kind in ("look", "aside", "stage"))]


def highest_by_step(name: str) -> dict[int, float]:
    """Return a metric's highest layer by step."""
    one = read_run("long").metric(name)
    return dict(zip(one.steps, np.nanmax(one.values, axis=1).tolist(), strict=True))


def sink_rate_by_step() -> dict[int, float]:
    one = read_run("long").metric("attention_sink_rate")
    return dict(zip(one.steps, np.nanmean(one.values, axis=1).tolist(), strict=True))


def depth_by_step(texts: str = "probe") -> dict[int, float]:
    one = read_run("long").metric(RAW, texts)
    return {step: valley(row).depth for step, row in zip(one.steps, one.values, strict=True)}


def goes_on() -> list[float]:
    share, state = highest_by_step("first_token_share"), highest_by_step("largest_state")
    top = max(state, key=state.__getitem__)
    courses = [[one[step] for step in SHOWN] for one in (share, sink_rate_by_step(), depth_by_step())]
    assert all(course == sorted(course) for course in courses)
    return [
        *(step * TOKENS / 1e6 for step in SHOWN),
        *(value for course in courses for value in course),
        *(state[top], top * TOKENS / 1e6, state[SHOWN[-1]]),
    ]


def without_first_token() -> list[float]:
    """Return since when there is a valley, and its depths without the first token at 134M tokens and at the end."""
    whole, left = depth_by_step(), depth_by_step("probe-later")
    none = [step for step in whole if whole[step] <= 0]
    since = min(step for step in whole if step > none[-1])
    assert all(max(left[step], 0) < whole[step] / 2 for step in whole if step >= since)
    assert left[1024] < 0
    return [since * TOKENS / 1e6, left[2048], left[9216]]


def beside_the_base() -> list[float]:
    """Return the share of other text in percent; at 134M tokens the valley is about half and the sink twice the base's."""
    base = read_run("base")
    sink = float(np.nanmean(base.metric("attention_sink_rate").values[-1]))
    assert 0.4 < depth_by_step()[2048] / valley(base.metric(RAW).values[-1]).depth < 0.6
    assert 1.8 < sink_rate_by_step()[2048] / sink < 2.2
    more = manifest()["totals"]["tokens"]
    return [100 * more / (more + NOVELS)]


def manifest() -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = json.loads((RESULTS / "more_manifest.json").read_text())
    return found


def best_layers() -> list[float]:
    """Return the best layers and since when; each is within one of the layer of lowest entropy, and four others are near."""
    run = read_run("long")
    scores, entropy = run.scores(), run.metric(RAW)
    best = {step: int(row.argmax()) for step, row in zip(scores.steps, scores.values, strict=True)}
    lowest = {step: valley(row).layer for step, row in zip(entropy.steps, entropy.values, strict=True)}
    assert all(abs(layer - lowest[step]) <= 1 for step, layer in best.items())
    near = scores.values[-1] > scores.values[-1].max() - 0.5
    assert near[0]
    assert near.sum() == 1 + 4
    before, after = dict.fromkeys(best.values())
    return [before, after, min(step for step, layer in best.items() if layer == after) * TOKENS / 1e6]


def loss_steps(places: list[int]) -> list[float]:
    """Return by how much the mean loss of 64 steps is above that of the 64 before them."""
    losses = np.array(read_run("long").told["losses"])
    return [float(losses[place : place + 64].mean() - losses[place - 64 : place].mean()) for place in places]


def epochs() -> list[int]:
    return [number * (NOVELS + manifest()["totals"]["tokens"]) for number in (1, 2, 3, 4)]


def seam() -> list[float]:
    told = read_run("long").told
    losses, place = np.array(told["losses"]), told["sessions"][0]["to"]
    starts = [round(tokens / TOKENS) for tokens in epochs()]
    inside = [step for step in range(1000, len(losses) - 64) if min(abs(step - start) for start in starts) > 64]
    return [
        float(losses[place - 64 : place].mean()),
        float(losses[place : place + 64].mean()),
        float(np.std(loss_steps(inside))),
    ]


def steps_down() -> list[float]:
    """Return how far the loss falls where a new epoch begins, and the tokens seen there."""
    falls = [-step for step in loss_steps([round(tokens / TOKENS) for tokens in epochs()])]
    return [min(falls), max(falls), *(tokens / 1e6 for tokens in epochs())]


def once_more() -> list[float]:
    """Return the losses that a run in one command shares with the paused one, up to the pause, and how others differ."""
    run, again = read_run("long"), read_run("long-again")
    paused = run.told["sessions"][0]["to"]
    assert len(again.told["sessions"]) == 1
    losses, others = np.array(run.told["losses"]), np.array(again.told["losses"])
    assert (losses[:paused] == others[:paused]).all()
    return [paused, float(np.abs(losses - others).max()), share(again), depth(again)]


def rounding() -> list[float]:
    """Return by how much scores of the two runs differ at the end: at a layer at most, and in the lead over the last."""
    both = [read_run(name) for name in ("long", "long-again")]
    first, second = (run.scores().values[-1] for run in both)
    return [float(np.abs(first - second).max()), abs(over_last(both[0]) - over_last(both[1]))]
