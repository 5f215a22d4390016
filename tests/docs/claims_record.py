"""What the page of the training record says, and the frames that say it."""

from __future__ import annotations

import json
from functools import cache
from statistics import fmean

import numpy as np

from benchmarks.pretraining.findings import (
    EVENTS,
    RAW,
    THIRDS,
    Event,
    crossing,
    event,
    lowering,
    mean_by_layer,
    moved,
    overtaking,
    regrets,
    settled_at,
    valley,
    winners,
)
from benchmarks.pretraining.record import RESULTS, TOKENS, Run, known, read_run, seeds
from benchmarks.pretraining.tables import RUNS
from tests.docs.stated import Claim

PAGE, REPLICATION = "docs/training.md", "docs/replication.md"


def _all() -> list[Run]:
    return [*seeds(), *known(*RUNS)]


def _ends(values: list[float]) -> list[float]:
    return [min(values), max(values)]


def _takes(run: Run) -> float:
    """Return what the first token takes from the entropy of raw states, at the layer where that is most."""
    return float(lowering(run).values[-1].max())


def _event(what: str) -> list[Event]:
    (name,) = (name for name in EVENTS if name.startswith(what))
    return [event(EVENTS[name](run)) for run in seeds()]


def _depth(run: Run, name: str = RAW, texts: str = "probe") -> float:
    return valley(run.metric(name, texts).values[-1]).depth


def _highest(run: Run, name: str) -> float:
    return float(np.nanmax(run.metric(name).values[-1]))


def _over_last(run: Run) -> float:
    end = winners(run)[-1]
    return end.best - end.last


@cache
def _regrets() -> list[dict[str, dict[int, tuple[int, float]]]]:
    return [regrets(run) for run in seeds()]


def _lost(rule: str) -> float:
    return fmean(list(one[rule].values())[-1][1] for one in _regrets())


def _since(run: Run) -> float:
    step = overtaking(run)[0]
    assert step is not None
    return step * TOKENS / 1e6


def _thirds(by_layer: dict[int, float]) -> list[float]:
    """Return the mean over each third of the layers."""
    return [fmean(by_layer[layer] for layer in third if layer in by_layer) for third in THIRDS.values()]


def _settling(name: str) -> list[float]:
    return _thirds(mean_by_layer([settled_at(run, name) for run in seeds()]))


def _ways(name: str, since: int) -> list[float]:
    """Return how far each third of the layers moves after a step, in percent of the metric's range."""
    return [100 * way for way in _thirds(mean_by_layer([moved(run, name, since) for run in seeds()]))]


def _first_to_settle() -> list[float]:
    """Return nothing but that the metrics which the page names are in the order that it says."""
    for name in ("dime", "infonce", "dataset_entropy", "effective_rank"):
        assert _settling(name)[0] == min(_settling(name)), name
    for name in ("prompt_entropy", RAW, "curvature", "cka"):
        assert _settling(name)[2] == min(_settling(name)), name
    return []


def _nothing_beats_the_embeddings() -> list[float]:
    assert all(winners(run)[-1].first > winners(run)[-1].best for run in known("masked", "mamba2"))
    return []


def _dimension(run: Run, since: int) -> int:
    """Return the one dimension of the largest states of layers 2 to 12 after some steps, all of them the first token's."""
    token, dimension = run.metric("largest_token"), run.metric("largest_dimension")
    later = [place for place, step in enumerate(token.steps) if step >= since]
    assert not token.values[later, 2:].any()
    (found,) = set(dimension.values[later, 2:].flatten().tolist())
    return int(found)


def _mean_rate(run: Run) -> np.ndarray:
    return np.nanmean(run.metric("attention_sink_rate").values, axis=1)


def _all_heads(run: Run) -> float:
    """Return the tokens at which half of the heads of all blocks attend that do so in the end, in millions."""
    rate = _mean_rate(run)
    return crossing(run.metric("attention_sink_rate").steps, rate, rate[-1] / 2) / 1e6


def _halves(name: str) -> list[float]:
    """Return when the sink rate and the largest state of a run have half of their final size, in millions of tokens."""
    every = [event(read(read_run(name))) for what, read in EVENTS.items() if what.startswith(("heads", "largest"))]
    return _ends([one.half / 1e6 for one in every])


def _at(run: Run, name: str, layer: int) -> float:
    return float(run.metric(name).values[-1][layer])


def _asked_blocks(run: Run) -> list[float]:
    """Return what asking for one word adds to the best block, at each stage."""
    asked, plain = (run.scores(recipe).values[:, 1:] for recipe in ("one-word", "plain"))
    return list(np.nanmax(asked, axis=1) - np.nanmax(plain, axis=1))


def _gaps(run: Run, since: int) -> list[float]:
    return [one.best - one.last for one in winners(run) if one.step >= since]


def _layer_6() -> list[float]:
    return _ends([float(row[6] - row[12]) for row in (run.scores().values[-1] for run in _all())])


def _ssm() -> list[float]:
    one = read_run("mamba2").metric(RAW)
    later = one.values[[place for place, step in enumerate(one.steps) if step >= 128]]
    assert (later[-1] > later[0])[1:].all()
    return [*(float(one.values[-1][layer]) for layer in (0, 1, 3, 12)), float(one.values[:, 12].min())]


def _repeated() -> list[float]:
    """Return the number of losses and of values that a repeated base has, all of them as the base does."""
    base, again = read_run("base"), read_run("base-again")
    assert again.told["losses"] == base.told["losses"]
    keys = ["revision", "layer", "kind", "dataset", "name"]
    same = base.frame.join(again.frame, on=[*keys, "value"], how="inner", nulls_equal=True)
    assert len(same) == len(again.frame.unique(keys)) == len(again.frame)
    return [len(again.told["losses"]), len(same)]


def _state_first() -> list[float]:
    """Return when the largest state has half of its final size, which in every seed is before all others do."""
    halves = [[one.half for one in _event(what)] for what in ("largest", "first", "heads", "what")]
    assert all(state == min(state, *others) for state, *others in zip(*halves, strict=True))
    return [half / 1e6 for half in _ends(halves[0])]


def _over_embeddings(run: Run) -> list[float]:
    return [one.best - one.first for one in winners(run)]


def _place(run: Run, step: int) -> int:
    return run.metric(RAW).steps.index(step)


def _long_goes_on() -> list[float]:
    run = read_run("long")
    places = [_place(run, step) for step in (2048, 4096, 9216)]
    state = np.nanmax(run.metric("largest_state").values, axis=1)
    top = int(state.argmax())
    return [
        *(step * TOKENS / 1e6 for step in (2048, 4096, 9216)),
        *(float(np.nanmax(run.metric("first_token_share").values[place])) for place in places),
        *(float(_mean_rate(run)[place]) for place in places),
        *(valley(run.metric(RAW).values[place]).depth for place in places),
        float(state[top]),
        run.metric(RAW).steps[top] * TOKENS / 1e6,
        float(state[-1]),
    ]


def _long_best() -> list[float]:
    """Return the best layer and the tokens from which on it is that of the lowest entropy at the end; four others are near."""
    run = read_run("long")
    scores = run.scores()
    best = scores.values.argmax(axis=1)
    since = max(place for place, layer in enumerate(best) if layer != best[-1]) + 1
    assert best[-1] == valley(run.metric(RAW).values[-1]).layer
    near = scores.values[-1] > scores.values[-1].max() - 0.5
    assert near[0]
    assert near.sum() == 1 + 4
    return [int(best[-1]), scores.steps[since] * TOKENS / 1e6]


def _steps_of(run: Run, places: list[int]) -> list[float]:
    """Return by how much the mean loss of 64 steps is above that of the 64 before them."""
    losses = np.array(run.told["losses"])
    return [float(losses[place : place + 64].mean() - losses[place - 64 : place].mean()) for place in places]


def _seam() -> list[float]:
    run = read_run("long")
    losses, place = np.array(run.told["losses"]), run.told["sessions"][0]["to"]
    usual = np.std(_steps_of(run, list(range(1000, len(losses) - 64))))
    return [float(losses[place - 64 : place].mean()), float(losses[place : place + 64].mean()), float(usual)]


def _epochs() -> list[float]:
    """Return how far the loss falls where a new epoch begins, and the tokens seen there."""
    run = read_run("long")
    more = json.loads((RESULTS / "more_manifest.json").read_text())["totals"]["tokens"]
    starts = [number * (40_836_518 + more) for number in (1, 2, 3, 4)]
    return [
        *_ends([-step for step in _steps_of(run, [round(start / TOKENS) for start in starts])]),
        *(start / 1e6 for start in starts),
    ]


CLAIMS = [
    Claim(
        "README.md",
        "A language model of {}M parameters",
        lambda: [read_run("base").told["parameters"] / 1e6],
    ),
    Claim(
        "README.md",
        "takes {} to {} nats from the entropy (three seeds), and middle layers darken. Without it (right) it takes {}",
        lambda: [*_ends([_takes(run) for run in seeds()]), _takes(read_run("no-bos"))],
    ),
    Claim(
        "README.md",
        "by {} to {} points with `[BOS]`, by {} without",
        lambda: [*_ends([_over_last(run) for run in seeds()]), _over_last(read_run("no-bos"))],
    ),
    Claim(
        PAGE,
        "it takes {} nats from the entropy of raw states, against {} to {} in the base (three seeds), {} with GPTNeoX blocks and {} at a peak",
        lambda: [
            _takes(read_run("no-bos")),
            *_ends([_takes(run) for run in seeds()]),
            *(_takes(read_run(name)) for name in ("gpt-neox", "low-rate")),
        ],
    ),
    Claim(
        PAGE,
        "half of its final size at {} to {}M tokens, the sink rate at {} to {}M; in GPTNeoX blocks both are half grown at {} to {}M",
        lambda: [
            *(end / 1e6 for what in ("largest", "heads") for end in _ends([one.half for one in _event(what)])),
            *_halves("gpt-neox"),
        ],
    ),
    Claim(
        PAGE,
        "in seeds 0 and 2 the valley is {} and {} nats deep with it, {} and {} without; in seed 1, where it takes most at layer {}, it adds nothing to the depth ({} without, {} with)",
        lambda: [
            *(_depth(run, texts=texts) for texts in ("probe", "probe-later") for run in seeds()[::2]),
            int(lowering(seeds()[1]).values[-1].argmax()),
            *(_depth(seeds()[1], texts=texts) for texts in ("probe-later", "probe")),
        ],
    ),
    Claim(
        PAGE,
        "without `[BOS]` ({} nats) and under the masked objective ({}) too",
        lambda: [_depth(read_run(name), texts="probe-later") for name in ("no-bos", "masked")],
    ),
    Claim(
        PAGE,
        "in the base it has {} to {} %",
        lambda: [100 * end for end in _ends([_highest(run, "first_token_share") for run in seeds()])],
    ),
    Claim(
        PAGE,
        "beats the last by {} to {} points in every run (layer 6 alone by {} to {}); without `[BOS]` by {}, at layer {}",
        lambda: [
            *_ends([_over_last(run) for run in _all()]),
            *_layer_6(),
            _over_last(run := read_run("no-bos")),
            winners(run)[-1].layer,
        ],
    ),
    Claim(
        PAGE,
        "After {}M tokens the first token has {} of the squared norm, {} of all heads attend to it, and the valley is {} nats deep, {} without",
        lambda: [
            (run := read_run("long")).told["tokens"] / 1e6,
            _highest(run, "first_token_share"),
            float(_mean_rate(run)[-1]),
            _depth(run),
            _depth(run, texts="probe-later"),
        ],
    ),
    Claim(PAGE, "In the long run it shrinks, from {} to {} points", lambda: _ends(_gaps(read_run("long"), 512))[::-1]),
    Claim(
        PAGE,
        "in three minutes ({} s on one H200, {} of them training, and",
        lambda: [
            (told := read_run("base-again").told)["seconds"],
            told["seconds"] - sum(told[f"{k}_seconds"] for k in ("look", "aside", "stage")),
        ],
    ),
    Claim(PAGE, "it gave all {} losses and all {} values that the record has", _repeated),
    Claim(PAGE, "the base: {} s", lambda: [read_run("base").told["seconds"]]),
    Claim(PAGE, "the state comes first (half at {} to {}M)", _state_first),
    Claim(PAGE, "(half of the heads of all blocks: {} to {}M)", lambda: _ends([_all_heads(run) for run in seeds()])),
    Claim(
        PAGE,
        "over blocks 2 and 3 ({}, then {}), in seed 2 in block 2 alone ({}, then {})",
        lambda: [
            *(_at(seeds()[0], "largest_state", layer) for layer in (2, 3)),
            *(_at(seeds()[2], "largest_state", layer) for layer in (1, 2)),
        ],
    ),
    Claim(
        PAGE,
        "From {}M tokens on the largest state of every layer from 2 to 12 is the first token's, in one dimension of 512: {} in seed 0, {} in seed 1, {} in seed 2",
        lambda: [362 * TOKENS / 1e6, *(_dimension(run, since=362) for run in seeds())],
    ),
    Claim(
        PAGE,
        "has it in {} too, the long run, which reads other text, in {}",
        lambda: [_dimension(read_run("one-added"), since=362), int(_at(read_run("long"), "largest_dimension", 3))],
    ),
    Claim(
        PAGE,
        "the state takes {} to {} times the tokens, the share {} to {} times",
        lambda: [
            end for what in ("largest", "first") for end in _ends([one.nine_tenths / one.tenth for one in _event(what)])
        ],
    ),
    Claim(PAGE, "of size in all seeds ({} to {})", lambda: _ends([one.final for one in _event("largest")])),
    Claim(
        PAGE,
        "the share differs more ({} at layer {}, {} at layer {}, {} at layer {})",
        lambda: [number for one in _event("first") for number in (one.final, one.layer)],
    ),
    Claim(PAGE, "(seed 0 has {} at layer 7)", lambda: [_at(seeds()[0], "first_token_share", 7)]),
    Claim(PAGE, "The valley is {}, {} and {} nats deep", lambda: [_depth(run) for run in seeds()]),
    Claim(
        PAGE,
        "more heads ({} in one block, {} of all; the base {} to {} of all)",
        lambda: [
            _highest(read_run("gpt-neox"), "attention_sink_rate"),
            float(_mean_rate(read_run("gpt-neox"))[-1]),
            *_ends([float(_mean_rate(run)[-1]) for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "a long first token ({}) but hardly a sink ({} of all heads), and no valley: the largest value of any state is {} (the base has {} to {})",
        lambda: [
            _highest(run := read_run("low-rate"), "first_token_share"),
            float(_mean_rate(run)[-1]),
            _highest(run, "largest_state"),
            *_ends([_highest(run, "largest_state") for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "base's valley is {} to {} nats deep, at layer 1",
        lambda: _ends([_depth(run, "prompt_entropy") for run in seeds()]),
    ),
    Claim(
        PAGE,
        "no sink (share {}, no head above 0.3), and yet the deepest valley of raw states at {}M tokens, {} nats at layer {}",
        lambda: [
            _highest(read_run("masked"), "first_token_share"),
            2000 * TOKENS / 1e6,
            max(_depth(run) for run in _all() if run.steps == 2000),
            valley(read_run("masked").metric(RAW).values[-1]).layer,
        ],
    ),
    Claim(
        PAGE,
        "Of it {} nats are left once the final norm has rescaled the tokens, and {} when tokens are centered",
        lambda: [_depth(read_run("masked"), texts="probe-normed"), _depth(read_run("masked"), "prompt_entropy")],
    ),
    Claim(
        PAGE,
        "{} nats at the embeddings, {} at layer 1, {} at layer 3 and {} at the last. It collapses at 2M tokens ({} at the last layer)",
        _ssm,
    ),
    Claim(
        PAGE,
        "and all of seed 1's ({} nats, at layer 1 instead of {})",
        lambda: [_depth(seeds()[1], texts="probe-later"), valley(seeds()[1].metric(RAW).values[-1]).layer],
    ),
    Claim(
        PAGE,
        "{} of the heads of its strongest block ({} to {} in the base), {} of all heads, give the first token more than 0.3, and it takes {} nats",
        lambda: [
            _highest(run := read_run("one-added"), "attention_sink_rate"),
            *_ends([_highest(run, "attention_sink_rate") for run in seeds()]),
            float(_mean_rate(run)[-1]),
            _takes(run),
        ],
    ),
    Claim(
        PAGE,
        "{} to {} points in the base, and {} to {} in the run without `[BOS]` at the same stages",
        lambda: [*_ends([gap for run in seeds() for gap in _gaps(run, 512)]), *_ends(_gaps(read_run("no-bos"), 512))],
    ),
    Claim(
        PAGE,
        "from {}M (seed 1), {}M (seed 0) or {}M tokens (seed 2) on, by {} to {} points at the end; without `[BOS]` by {}",
        lambda: [
            *(_since(seeds()[number]) for number in (1, 0, 2)),
            *_ends([_over_embeddings(run)[-1] for run in seeds()]),
            _over_embeddings(read_run("no-bos"))[-1],
        ],
    ),
    Claim(
        PAGE,
        "(by {} to {} points) and costs {} to {} from 8M tokens on, {} to {} at the end",
        lambda: [
            *_ends([_asked_blocks(run)[0] for run in seeds()]),
            *_ends([-gain for run in seeds() for gain in _asked_blocks(run)[1:]]),
            *_ends([-_asked_blocks(run)[-1] for run in seeds()]),
        ],
    ),
    Claim(
        PAGE,
        "at {}, {} and {}M tokens the first token has {}, {} and {} of the squared norm of its strongest layer, {}, {} and {} of all heads give it more than 0.3 of their attention, and the valley is {}, {} and {} nats deep. The largest state turns back: {} at {}M tokens, {} at the end",
        _long_goes_on,
    ),
    Claim(
        PAGE,
        "without it the valley is {} nats deep, at layer {}, and what it takes grows from {} nats at {}M tokens to {}",
        lambda: [
            (left := valley((run := read_run("long")).metric(RAW, "probe-later").values[-1])).depth,
            left.layer,
            float(lowering(run).values[_place(run, 2048)].max()),
            2048 * TOKENS / 1e6,
            _takes(run),
        ],
    ),
    Claim(PAGE, "The paper's metric still shows {} nats", lambda: [_depth(read_run("long"), "prompt_entropy")]),
    Claim(
        PAGE,
        "from the first scored stage on ({}M tokens), by {} points at most and {} at the end, and ahead of the last by {} points at {}M and {} at the end",
        lambda: [
            _since(run := read_run("long")),
            max(_over_embeddings(run)),
            _over_embeddings(run)[-1],
            (most := max(winners(run), key=lambda one: one.best - one.last)).best - most.last,
            most.step * TOKENS / 1e6,
            _over_last(run),
        ],
    ),
    Claim(PAGE, "The best layer of the mean is {} from {}M on, where the entropy is lowest", _long_best),
    Claim(
        PAGE,
        "of the 64 steps before the pause is {} nats, of the 64 after it {}; elsewhere such means differ by {}",
        _seam,
    ),
    Claim(PAGE, "by {} to {} nats, are at {}, {}, {} and {}M tokens, where a new epoch begins", _epochs),
    Claim(PAGE, "of the sink (no `[BOS]`: {} points)", lambda: [_over_last(read_run("no-bos"))]),
    Claim(PAGE, "has the largest ({})", lambda: [max(map(_over_last, _all()))]),
    Claim(PAGE, "no block beats the embeddings", _nothing_beats_the_embeddings),
    Claim(
        PAGE,
        "they do in DiME, InfoNCE, dataset entropy and effective rank; in both prompt entropies, curvature and CKA",
        _first_to_settle,
    ),
    Claim(PAGE, "({} % of the range against {} and {})", lambda: [(ways := _ways(RAW, since=16))[1], ways[0], ways[2]]),
    Claim(PAGE, "layers 1 to 4 move most there ({}, {} and {} %)", lambda: _ways(RAW, since=128)),
    Claim(
        PAGE,
        "lose {} to {} points at the end; the package's `auto`, which takes a depth of 0.8 where nothing says otherwise, {}, the last layer {}",
        lambda: [
            *_ends([_lost(f"min-{name}") for name in ("dime", "dataset-entropy", "prompt-entropy")]),
            _lost("auto"),
            _lost("last"),
        ],
    ),
    Claim(PAGE, "Reading raw states it would cost {}", lambda: [_lost("valley-midpoint (raw)")]),
    Claim(
        REPLICATION,
        "a valley of {} to {} nats at layers {} and {} (three seeds; {} after 604M tokens, most of it the first token's), and a masked one of {} at layer {}, Mamba2 none",
        lambda: [
            *_ends([_depth(run) for run in seeds()]),
            *_ends([valley(run.metric(RAW).values[-1]).layer for run in seeds()]),
            _depth(read_run("long")),
            (masked := valley(read_run("masked").metric(RAW).values[-1])).depth,
            masked.layer,
        ],
    ),
    Claim(
        REPLICATION,
        "they are {} to {}, {} and none, at layer 1",
        lambda: [
            *_ends([_depth(run, "prompt_entropy") for run in seeds()]),
            _depth(read_run("masked"), "prompt_entropy"),
        ],
    ),
    Claim(REPLICATION, "in the {} [own runs]", lambda: [_lowest_blocks()]),
]


def _lowest_blocks() -> int:
    """Return the number of runs, in each of which dataset entropy has its lowest block at layer 1 or 2."""
    assert {1 + int(run.metric("dataset_entropy").values[-1][1:].argmin()) for run in _all()} == {1, 2}
    return len(_all())
