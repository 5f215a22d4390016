"""What pages say of models that were trained, tuned, probed or exported here, and the frames that say it."""

from __future__ import annotations

from itertools import pairwise

import polars as pl

from tests.docs.frames import Curve, best, last, mean_by_layer, metric, onnx, stage, table, trained
from tests.docs.stated import Claim

TRAINING, VISION, TUNING, EXPORT, METRICS = (
    f"docs/{page}.md" for page in ("training", "vision", "tuning", "export", "metrics")
)
REPLICATION = "docs/replication.md"


# --- the training record ---------------------------------------------------------------------------------------------


def _scores(run: str, step: int | None = None) -> Curve:
    return mean_by_layer(stage(run, step).filter(kind="score"))


def _gain(task: str | None, *, tuning: str, layer: int = 12) -> float:
    """Return what a fine-tuning adds to a task's score, or without a name to those of all but Banking77."""
    wanted = pl.col("dataset").str.starts_with(task) if task else ~pl.col("dataset").str.starts_with("Banking77")
    before, after = (stage(tuning, step).filter(wanted, kind="score", layer=layer)["value"] for step in (0, 256))
    return 100 * float(after.mean() - before.mean())  # type: ignore[operator]


def _change(name: str, tuning: str) -> Curve:
    before, after = (metric(stage(tuning, step), name) for step in (0, 256))
    return {layer: after[layer] - before[layer] for layer in before}


def _dip(run: str) -> list[float]:
    """Return how far prompt entropy at its lowest inner layer is below both ends, and which layer that is."""
    curve = metric(stage(run), "prompt_entropy")
    layer = min(range(1, max(curve)), key=curve.__getitem__)
    return [min(curve[0], last(curve)) - curve[layer], layer]


def _rising(curve: Curve) -> list[int]:
    return [layer for layer in curve if curve[layer] > 0]


def _tuned(name: str, tuning: str, *layers: int) -> list[float]:
    """Return a metric before and after a fine-tuning at some layers."""
    before, after = (metric(stage(tuning, step), name) for step in (0, 256))
    return [curve[layer] for layer in layers for curve in (before, after)]


def _entropy_between(tuning: str) -> list[float]:
    """Return where SimCSE raises prompt entropy: the layers at the end, the largest rise at the start, its last layer."""
    change = _change("prompt_entropy", tuning)
    early = [layer for layer in _rising(change) if layer < 6]
    late = [layer for layer in _rising(change) if layer >= 6]
    assert early == list(range(early[-1] + 1))
    assert max(change[layer] for layer in early) < 0.01
    return [late[0], late[-1], 0.01, early[0], early[-1]]


def _invariance() -> list[float]:
    """Return where supervised tuning lowers InfoNCE, as layers and by how much, and where it raises it, among blocks."""
    change = {layer: value for layer, value in _change("infonce", "supervised").items() if layer}
    fallen = [layer for layer in change if change[layer] < 0]
    late, early, up = [k for k in fallen if k > 6], [k for k in fallen if k <= 6], _rising(change)
    assert [*early, *up, *late] == list(range(1, 13))
    return [late[0], late[-1], -min(change[k] for k in early), early[0], early[-1], up[0], up[-1]]


TRAINED = [
    Claim(
        TRAINING,
        "stays {} to {} points below an earlier block",
        lambda: [
            (gaps := sorted(max(v for k, v in _scores(run).items() if k) - last(_scores(run)) for run in _RUNS))[0],
            gaps[-1],
        ],
    ),
    Claim(TRAINING, "(`first_token_share`) never passes {} at any layer", lambda: [_ceiling(_largest_share())]),
    Claim(
        TRAINING,
        "as the paper says; within a text it does so at layers {} to {}, by less than {} nats at layers {} to {}, and lowers",
        lambda: _entropy_between("simcse"),
    ),
    Claim(
        TRAINING,
        "the last layer's mean falls from {} to {} (TwitterURL {}, STSBenchmark {}, TrecQA {}, Banking77 {})",
        lambda: [
            *(last(_scores("simcse", step)) for step in (0, 256)),
            *(_gain(task, tuning="simcse") for task in ("TwitterURL", "STSBenchmark", "TrecQA", "Banking77")),
        ],
    ),
    Claim(
        TRAINING,
        "Invariance rises at layers {} to {}, a little ({} or less) at layers {} to {}, and falls at layers {} to {}",
        _invariance,
    ),
    Claim(
        TRAINING,
        "the last layer goes from {} to {}, and the best is layer {} with {}, the only run in which a middle layer beats the "
        "embeddings ({})",
        lambda: [
            *(last(_scores("supervised", step)) for step in (0, 256)),
            *reversed(best(_scores("supervised"))),
            _scores("supervised")[0],
        ],
    ),
    Claim(
        TRAINING,
        "the five other tasks gain {} points at the last layer and {} at layer 7",
        lambda: [_gain(None, tuning="supervised", layer=layer) for layer in (12, 7)],
    ),
    Claim(
        TRAINING, "training costs its embeddings {} points", lambda: [_scores("masked", 0)[0] - _scores("masked")[0]]
    ),
    Claim(
        REPLICATION,
        "dips of {} nats (causal) and {} (masked) at layer {}, {} (state-space) at layer {}",
        lambda: [_dip("causal")[0], *_dip("masked"), *_dip("ssm")],
    ),
    Claim(
        REPLICATION,
        "SimCSE: dataset entropy of the last layer {} to {} nats, InfoNCE {} to {}, higher",
        lambda: [*_tuned("dataset_entropy", "simcse", 12), *_tuned("infonce", "simcse", 12)],
    ),
    Claim(
        REPLICATION,
        "({} to {} at layer 6), higher at the last two ({} to {}); InfoNCE {} to {} at the last layer",
        lambda: [*_tuned("dataset_entropy", "supervised", 6, 12), *_tuned("infonce", "supervised", 12)],
    ),
]
_RUNS = ("causal", "masked", "ssm")


def _largest_share() -> float:
    return max(trained(run).filter(name="first_token_share")["value"].max() for run in _RUNS)  # type: ignore[type-var]


def _ceiling(number: float) -> float:
    """Return the next thousandth."""
    return -(-number * 1000 // 1) / 1000


# --- images ----------------------------------------------------------------------------------------------------------


def _image(metric_name: str, trunk: str) -> Curve:
    return metric(table("vision/results/metrics.csv"), metric_name, model=f"vit-12x192-{trunk}")


def _probe(trunk: str, kind: str = "attentive") -> Curve:
    rows = table("vision/results/probes.csv").filter(model=f"vit-12x192-{trunk}", probe=kind)
    return dict(rows.select("layer", 100 * pl.col("accuracy")).iter_rows())


def _gains(trunk: str) -> list[float]:
    row = table("vision/results/gains.csv").filter(model=f"vit-12x192-{trunk}", probe="attentive").row(0, named=True)
    return [row["best_layer"], *(100 * row[name] for name in ("gain", "low", "high"))]


def _probe_row(trunk: str) -> list[float]:
    curve = _probe(trunk)
    return [*(curve[layer] for layer in (0, 3, 6, 9, 10, 11, 12)), *_gains(trunk)]


def _no_gain() -> list[float]:
    """Return the autoregressive trunk under linear and k-NN probes; no chosen layer gains there."""
    others = table("vision/results/gains.csv").filter(pl.col("probe") != "attentive")
    assert others["gain"].max() == 0
    assert [best(_probe("masked", kind))[1] for kind in ("linear", "knn")] == [12, 12]
    assert best(_probe("distilled", "linear"))[1] == 12
    mine = [_probe("autoregressive", kind) for kind in ("linear", "knn")]
    return [
        *(last(curve) for curve in mine),
        *(best(curve)[0] for curve in mine),
        *(last(_probe("masked", kind)) for kind in ("linear", "knn")),
        last(_probe("distilled", "linear")),
    ]


def _drops() -> list[float]:
    """Return the smallest and the largest loss from the best layer to the last, and what the autoregressive choice gains."""
    trunks = ("supervised", "masked", "autoregressive", "autoregressive-causal", "distilled")
    lost = [best(_probe(trunk))[0] - last(_probe(trunk)) for trunk in trunks]
    assert {best(_probe(trunk))[1] for trunk in trunks} == {10, 11}
    return [min(lost), max(lost), _gains("autoregressive")[1]]


def _settles(trunk: str) -> dict[int, int]:
    """Return the step from which each layer stays within 0.2 of its last dataset entropy."""
    frame = table("vision/results/training.csv").filter(model=f"vit-12x192-{trunk}", name="dataset_entropy")
    frame = frame.with_columns(step=pl.col("revision").str.strip_prefix("step").cast(pl.Int64)).sort("step")
    found = {}
    for (layer,), part in frame.group_by("layer", maintain_order=True):
        final = part["value"][-1]
        away = part.filter((pl.col("value") - final).abs() > 0.2)["step"].max()
        found[layer] = part.filter(pl.col("step") > (-1 if away is None else away))["step"].min()
    return found  # type: ignore[return-value]


def _autoregressive_settles() -> list[int]:
    steps = _settles("autoregressive")
    assert {steps[layer] for layer in range(2, 8)} == {128, 256}
    assert {steps[layer] for layer in (10, 11, 12)} == {2048}
    return [128, 256, 2048, steps[0]]


def _masked_settles() -> list[int]:
    steps = _settles("masked")
    assert max(steps[layer] for layer in range(1, 12)) <= 256
    return [steps[0], steps[12], 256]


IMAGES = [
    *(
        Claim(VISION, f"| {name} | " + "{} | " * 7 + "{} | {} ({} to {}) |", lambda trunk=trunk: _probe_row(trunk))
        for name, trunk in (
            ("masked", "masked"),
            ("autoregressive", "autoregressive"),
            ("autoregressive, causal mask", "autoregressive-causal"),
            ("distilled", "distilled"),
            ("untrained", "untrained"),
        )
    ),
    Claim(VISION, "| supervised | " + "{} | " * 7 + "{} | {} |", lambda: _probe_row("supervised")[:9]),
    Claim(VISION, "rises to layers 10 or 11 and loses {} to {} points at the last.", lambda: _drops()[:2]),
    Claim(VISION, "the autoregressive one ({}) is neither alone nor the largest", lambda: _drops()[2:]),
    Claim(
        VISION,
        "is at {} and {} at its last layer and at {} and {} at its best, the masked trunk is best at its last under both ({}, "
        "{}), the distilled one under linear probes ({})",
        _no_gain,
    ),
    Claim(
        VISION,
        "climbs from {} to {} at layer {} and ends at {}",
        lambda: [
            (curve := _image("dataset_entropy", "autoregressive"))[0],
            *best(curve),
            last(curve),
        ],
    ),
    Claim(
        VISION,
        "With the causal mask: {} and {}, {} to {}",
        lambda: [
            best(curve := _image("dataset_entropy", "autoregressive-causal"))[0],
            last(curve),
            min(flat := [v for k, v in _image("prompt_entropy", "autoregressive-causal").items() if k >= 4]),
            max(flat),
        ],
    ),
    Claim(
        VISION,
        "dataset entropy {} at layer {} and {} at the last, InfoNCE least at layer {} ({} against {} at the last)",
        lambda: [
            *best(curve := _image("dataset_entropy", "supervised")),
            last(curve),
            min(loss := _image("infonce", "supervised"), key=loss.__getitem__),
            min(loss.values()),
            last(loss),
        ],
    ),
    Claim(
        VISION,
        "within 0.2 of their last dataset entropy from step {} or {} on, layers 10 to 12 from {} on; layer 0, the patches "
        "themselves, only from {} on",
        _autoregressive_settles,
    ),
    Claim(VISION, "all but layer 0 ({}) and the last ({}) do by {};", _masked_settles),
    Claim(
        REPLICATION,
        "best at layer {}, {} points ({} to {}) over the last, masked and distilled ones likewise",
        lambda: _gains("autoregressive"),
    ),
]


# --- tuning, export, metrics -----------------------------------------------------------------------------------------


def _tuning(task: str, layer: int, when: str, model: str = "all-MiniLM-L6-v2") -> float:
    rows = table("results/tuning.csv").filter(pl.col("task").str.starts_with(task), model=model, layer=layer, when=when)
    return float(rows["score"].mean())  # type: ignore[arg-type]


def _language_model_row(layer: int) -> list[float]:
    """Of SmolLM2: the share of its parameters, then each task before, tuned, and cut after the whole was tuned."""
    sizes = table("results/tuning.csv").filter(model="SmolLM2-135M", when="before", task="STSBenchmark")
    share = dict(sizes.select("layer", "parameters").iter_rows())
    when = ("before", "after") if layer == 30 else ("before", "after", "cut after")
    scores = [_tuning(task, layer, one, "SmolLM2-135M") for task in ("Banking77", "STSB") for one in when]
    return [100 * share[layer] / share[30], *scores]


def _over_whole(task: str, layer: int) -> float:
    return _tuning(task, layer, "after", "SmolLM2-135M") - _tuning(task, 30, "after", "SmolLM2-135M")


def _language_model_cut_first() -> list[float]:
    gains = [
        _tuning(task, layer, "after", "SmolLM2-135M") - _tuning(task, layer, "cut after", "SmolLM2-135M")
        for task in ("Banking77", "STSB")
        for layer in (6, 12, 18, 24)
    ]
    return [min(gains), max(gains)]


def _tuning_row(layer: int) -> list[float]:
    rows = table("results/tuning.csv").filter(model="all-MiniLM-L6-v2")
    sizes = dict(rows.drop_nulls("parameters").select("layer", "parameters").unique().iter_rows())
    speed = rows.filter(layer=layer, when="speed")["texts_per_second"].item()
    whens = ("before", "after", "cut after") if layer < 6 else ("before", "after")
    scores = [_tuning(task, layer, when) for task in ("Banking77", "STSBenchmark") for when in whens]
    return [100 * sizes[layer] / sizes[6], speed, *scores]


def _cut_first() -> list[float]:
    """Return the smallest and largest gain of tuning what was cut over cutting what was tuned."""
    pairs = [(task, layer) for task in ("Banking77", "STSBenchmark") for layer in range(2, 6)]
    gains = [_tuning(task, layer, "after") - _tuning(task, layer, "cut after") for task, layer in pairs]
    return [min(gains), max(gains)]


def _costs(layer: int) -> list[float]:
    """Return what a cut that is tuned is below the whole model tuned alike, over the seeds that both have."""
    found = []
    for task in ("Banking77", "STSBenchmark"):
        rows = table("results/tuning.csv").filter(
            pl.col("task").str.starts_with(task), model="all-MiniLM-L6-v2", when="after"
        )
        cut, whole = (dict(rows.filter(layer=k).select("seed", "score").iter_rows()) for k in (layer, 6))
        both = cut.keys() & whole.keys()
        found.append(sum(whole[seed] - cut[seed] for seed in both) / len(both))
    return found


def _onnx_row(layer: int) -> list[float]:
    row = onnx()[f"layer {layer}"]
    names = ("torch_ms", "model_ms", "model_int8_ms", "openvino_ms", "openvino_default_ms", "model_mb", "model_int8_mb")
    return [*(row[name] for name in names), row["int8_cosine"]]


def _wikitext(name: str) -> Curve:
    return metric(table("results/smollm2_wikitext.csv"), name)


def _curvature() -> list[float]:
    curve = _wikitext("curvature")
    steps = {layer: curve[layer] - curve[before] for before, layer in pairwise(curve)}
    assert min(steps, key=steps.__getitem__) == 12
    return [curve[0], last(curve), sum(step > 0 for step in steps.values()), len(steps), max(steps.values())]


CUT = [
    *(
        Claim(
            TUNING,
            f"| {layer} | " + "{} % | {} | {} | {} | {} | {} | {} | {} |",
            lambda layer=layer: _tuning_row(layer),
        )
        for layer in range(2, 6)
    ),
    Claim(TUNING, "| 6, whole | {} % | {} | {} | {} | | {} | {} | |", lambda: _tuning_row(6)),
    Claim(TUNING, "is {} to {} points above the whole model tuned", _cut_first),
    Claim(TUNING, "costs {} points on Banking77 and {} on STSBenchmark against the whole", lambda: _costs(5)),
    Claim(TUNING, "layer 3, twice as fast, costs {} and {}.", lambda: _costs(3)),
    *(
        Claim(
            TUNING,
            f"| {layer} | " + "{} % | {} | {} | {} | {} | {} | {} |",
            lambda layer=layer: _language_model_row(layer),
        )
        for layer in (6, 12, 18, 24)
    ),
    Claim(TUNING, "| 30, whole | {} % | {} | {} | | {} | {} | |", lambda: _language_model_row(30)),
    Claim(
        TUNING,
        "is {} points above the whole model tuned alike on Banking77 and {} above on STSBenchmark (one seed); at layer 12, half the "
        "parameters, it is {} points below and {} above",
        lambda: [abs(_over_whole(task, layer)) for layer in (24, 12) for task in ("Banking77", "STSB")],
    ),
    Claim(TUNING, "and of SmolLM2 {} to {} points (layers 6 to 24)", _language_model_cut_first),
    *(
        Claim(EXPORT, f"| {layer} | " + "{} | " * 5 + "{} MB | {} MB | {} |", lambda layer=layer: _onnx_row(layer))
        for layer in (3, 6)
    ),
    Claim(
        METRICS,
        "{} nats at layer 11, {} at layer 12, then a slow climb to {} at layer 29",
        lambda: [_wikitext("prompt_entropy")[layer] for layer in (11, 12, 29)],
    ),
    Claim(
        METRICS,
        "goes from {} at layer 11 to {} at layer 12 and stays above {} until layer 28",
        lambda: [_wikitext("first_token_share")[11], _wikitext("first_token_share")[12], _share_until(28)],
    ),
    Claim(
        METRICS,
        "`curvature` falls from {} to {} rad, most at the same block, though not at every one: at {} of {} it rises, by {} at "
        "the most",
        _curvature,
    ),
]


def _share_until(layer: int) -> float:
    """Return the twentieth below the lowest share of the first token from layer 12 to this one; past it the share is lower."""
    share = _wikitext("first_token_share")
    lowest = min(share[k] for k in range(12, layer + 1))
    assert share[layer + 1] < lowest
    return lowest * 20 // 1 / 20


CLAIMS = [*TRAINED, *IMAGES, *CUT]
