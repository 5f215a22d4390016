"""What pages say of models that were cut, tuned, exported or measured, and the frames that say it."""

from itertools import pairwise

import polars as pl

from tests.docs.frames import Curve, last, metric, onnx, table


def tuned_score(task: str, layer: int, when: str, model: str = "all-MiniLM-L6-v2") -> float:
    rows = table("results/tuning.csv").filter(pl.col("task").str.starts_with(task), model=model, layer=layer, when=when)
    return float(rows["score"].mean())  # type: ignore[arg-type]


def language_model_row(layer: int) -> list[float]:
    """Of SmolLM2: the share of its parameters, then each task before, tuned, and cut after the whole was tuned."""
    sizes = table("results/tuning.csv").filter(model="SmolLM2-135M", when="before", task="STSBenchmark")
    share = dict(sizes.select("layer", "parameters").iter_rows())
    when = ("before", "after") if layer == 30 else ("before", "after", "cut after")
    scores = [tuned_score(task, layer, one, "SmolLM2-135M") for task in ("Banking77", "STSB") for one in when]
    return [100 * share[layer] / share[30], *scores]


def over_whole(task: str, layer: int) -> float:
    return tuned_score(task, layer, "after", "SmolLM2-135M") - tuned_score(task, 30, "after", "SmolLM2-135M")


def language_model_cut_first() -> list[float]:
    gains = [
        tuned_score(task, layer, "after", "SmolLM2-135M") - tuned_score(task, layer, "cut after", "SmolLM2-135M")
        for task in ("Banking77", "STSB")
        for layer in (6, 12, 18, 24)
    ]
    return [min(gains), max(gains)]


def tuning_row(layer: int) -> list[float]:
    rows = table("results/tuning.csv").filter(model="all-MiniLM-L6-v2")
    sizes = dict(rows.drop_nulls("parameters").select("layer", "parameters").unique().iter_rows())
    speed = rows.filter(layer=layer, when="speed")["texts_per_second"].item()
    whens = ("before", "after", "cut after") if layer < 6 else ("before", "after")
    scores = [tuned_score(task, layer, when) for task in ("Banking77", "STSBenchmark") for when in whens]
    return [100 * sizes[layer] / sizes[6], speed, *scores]


def cut_first() -> list[float]:
    """Return the smallest and largest gain of tuning what was cut over cutting what was tuned."""
    pairs = [(task, layer) for task in ("Banking77", "STSBenchmark") for layer in range(2, 6)]
    gains = [tuned_score(task, layer, "after") - tuned_score(task, layer, "cut after") for task, layer in pairs]
    return [min(gains), max(gains)]


def largest_spreads() -> list[float]:
    """Return the largest standard deviation over seeds, of tuned cuts and of cuts of the tuned model."""
    rows = table("results/tuning.csv").drop_nulls("seed").group_by("model", "task", "layer", "when")
    spreads = rows.agg(pl.col("score").std())
    return [float(spreads.filter(when=when)["score"].max()) for when in ("after", "cut after")]  # type: ignore[arg-type]


def cost_of_cut(layer: int) -> list[float]:
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


def onnx_row(layer: int) -> list[float]:
    row = onnx()[f"layer {layer}"]
    names = ("torch_ms", "model_ms", "model_int8_ms", "openvino_ms", "openvino_default_ms", "model_mb", "model_int8_mb")
    return [*(row[name] for name in names), row["int8_cosine"]]


def wikitext(name: str) -> Curve:
    return metric(table("results/smollm2_wikitext.csv"), name)


def curvature_steps() -> list[float]:
    curve = wikitext("curvature")
    steps = {layer: curve[layer] - curve[before] for before, layer in pairwise(curve)}
    assert min(steps, key=steps.__getitem__) == 12
    return [curve[0], last(curve), sum(step > 0 for step in steps.values()), len(steps), max(steps.values())]


def share_until(layer: int) -> float:
    """Return the twentieth below the lowest share of the first token from layer 12 to this one; past it the share is lower."""
    share = wikitext("first_token_share")
    lowest = min(share[k] for k in range(12, layer + 1))
    assert share[layer + 1] < lowest
    return lowest * 20 // 1 / 20
