"""What pages say of models that were cut, tuned, exported or measured, and the frames that say it."""

from __future__ import annotations

from itertools import pairwise

import polars as pl

from tests.docs.frames import Curve, last, metric, onnx, table
from tests.docs.stated import Claim

TUNING, EXPORT, METRICS = (f"docs/{page}.md" for page in ("tuning", "export", "metrics"))


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


def _largest_spreads() -> list[float]:
    """Return the largest standard deviation over seeds, of tuned cuts and of cuts of the tuned model."""
    rows = table("results/tuning.csv").drop_nulls("seed").group_by("model", "task", "layer", "when")
    spreads = rows.agg(pl.col("score").std())
    return [float(spreads.filter(when=when)["score"].max()) for when in ("after", "cut after")]  # type: ignore[arg-type]


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


CLAIMS = [
    *(
        Claim(
            TUNING,
            f"| {layer} | " + "{} % | {} | {} | {} | {} | {} | {} | {} |",
            lambda layer=layer: _tuning_row(layer),
        )
        for layer in range(2, 6)
    ),
    Claim(TUNING, "| 6, full | {} % | {} | {} | {} | | {} | {} | |", lambda: _tuning_row(6)),
    Claim(TUNING, "is {} to {} points above the full model tuned", _cut_first),
    Claim(
        TUNING,
        "untuned, that layer is {} and {} points above layer 5",
        lambda: [_tuning(task, 6, "before") - _tuning(task, 5, "before") for task in ("Banking77", "STSBenchmark")],
    ),
    Claim(TUNING, "standard deviation at most {} if a cut model was tuned, at most {} if the full", _largest_spreads),
    Claim(TUNING, "costs {} points on Banking77 and {} on STSBenchmark against the full", lambda: _costs(5)),
    Claim(TUNING, "layer 3, twice as fast, costs {} and {}.", lambda: _costs(3)),
    *(
        Claim(
            TUNING,
            f"| {layer} | " + "{} % | {} | {} | {} | {} | {} | {} |",
            lambda layer=layer: _language_model_row(layer),
        )
        for layer in (6, 12, 18, 24)
    ),
    Claim(TUNING, "| 30, full | {} % | {} | {} | | {} | {} | |", lambda: _language_model_row(30)),
    Claim(
        TUNING,
        "is {} points above the full model tuned in the same way on Banking77 and {} above on STSBenchmark (standard deviation 0.2 or less); at "
        "layer 12, half the parameters, it is {} points below and {} above",
        lambda: [abs(_over_whole(task, layer)) for layer in (24, 12) for task in ("Banking77", "STSB")],
    ),
    Claim(TUNING, "for SmolLM2 {} to {} points (layers 6 to 24)", _language_model_cut_first),
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
        "`curvature` falls from {} to {} rad, most at block 12. It rises at {} of {} blocks, by at most {}",
        _curvature,
    ),
]


def _share_until(layer: int) -> float:
    """Return the twentieth below the lowest share of the first token from layer 12 to this one; past it the share is lower."""
    share = _wikitext("first_token_share")
    lowest = min(share[k] for k in range(12, layer + 1))
    assert share[layer + 1] < lowest
    return lowest * 20 // 1 / 20
