"""What pages say of models that were trained or probed here, and the frames that say it."""

import polars as pl

from benchmarks.intervals import mean_interval
from benchmarks.pretraining import first
from midlayer_encoders.frame.steps import step_of
from tests.docs.frames import Curve, best, mean_by_layer, metric, stage, table, trained

# --- the first training record --------------------------------------------------------------------------------------


def mean_scores(run: str, step: int | None = None) -> Curve:
    return mean_by_layer(stage(run, step).filter(kind="score"))


def tuning_gain(tuning: str, *, without: str = "none") -> tuple[float, float, float]:
    """Return what a fine-tuning adds to the last layer's mean score, and the interval over the tasks."""
    wanted = ~pl.col("dataset").str.starts_with(without)
    before, after = (
        stage(tuning, step).filter(wanted, kind="score", layer=12).sort("dataset")["value"] for step in (0, 256)
    )
    return mean_interval((100 * (after - before)).to_list())


def no_better_block() -> list[float]:
    """Check that no block's gain over the last, and the embeddings' over the best block in ssm alone, exclude zero."""
    for run in (*_RUNS, "simcse", "supervised"):
        scores = first.last_stage(run)
        block = max(map(str, range(1, 13)), key=lambda layer: scores[layer].mean())  # type: ignore[arg-type, return-value]
        assert mean_interval((scores[block] - scores["12"]).to_list())[1] <= 0
        assert (mean_interval((scores[block] - scores["0"]).to_list())[2] < 0) == (run == "ssm")
    for run in _RUNS:
        assert all(best(mean_scores(run, step_of(revision)))[1] == 0 for revision in scored(run))
    return []


def scored(run: str) -> list[str]:
    return trained(run).filter(kind="score")["revision"].unique().to_list()


def metric_change(name: str, tuning: str) -> Curve:
    before, after = (metric(stage(tuning, step), name) for step in (0, 256))
    return {layer: after[layer] - before[layer] for layer in before}


def rising(curve: Curve) -> list[int]:
    return [layer for layer in curve if curve[layer] > 0]


def earlier_tunings() -> list[float]:
    """Return dataset entropy before and after supervised tuning at layer 6, one of those where it falls."""
    change = metric_change("dataset_entropy", "supervised")
    assert [layer for layer in change if layer and change[layer] < 0] == list(range(2, 11))
    assert rising(metric_change("infonce", "simcse")) in ([], [0])
    return [metric(stage("supervised", step), "dataset_entropy")[6] for step in (0, 256)]


def entropy_between(tuning: str) -> list[float]:
    """Return where SimCSE raises prompt entropy: the layers at the end, the largest rise at the start, its last layer."""
    change = metric_change("prompt_entropy", tuning)
    early = [layer for layer in rising(change) if layer < 6]
    late = [layer for layer in rising(change) if layer >= 6]
    assert early == list(range(early[-1] + 1))
    assert max(change[layer] for layer in early) < 0.01
    return [late[0], late[-1], 0.01, early[0], early[-1]]


def invariance_change() -> list[float]:
    """Return where supervised tuning lowers InfoNCE, as layers and by how much, and where it raises it, among blocks."""
    change = {layer: value for layer, value in metric_change("infonce", "supervised").items() if layer}
    fallen = [layer for layer in change if change[layer] < 0]
    late, early, up = [k for k in fallen if k > 6], [k for k in fallen if k <= 6], rising(change)
    assert [*early, *up, *late] == list(range(1, 13))
    return [late[0], late[-1], -min(change[k] for k in early), early[0], early[-1], up[0], up[-1]]


_RUNS = ("causal", "masked", "ssm")


def largest_share() -> float:
    return max(trained(run).filter(name="first_token_share")["value"].max() for run in _RUNS)  # type: ignore[type-var]


def ceiling(number: float) -> float:
    """Return the next thousandth."""
    return -(-number * 1000 // 1) / 1000


# --- images ----------------------------------------------------------------------------------------------------------


def image(metric_name: str, trunk: str) -> Curve:
    return metric(table("results/vision/metrics.csv"), metric_name, model=f"vit-12x192-{trunk}")


def probe_curve(trunk: str, kind: str = "attentive") -> Curve:
    rows = table("results/vision/probes.csv").filter(model=f"vit-12x192-{trunk}", probe=kind)
    return dict(rows.select("layer", 100 * pl.col("accuracy")).iter_rows())


def probe_gains(trunk: str) -> list[float]:
    row = table("results/vision/gains.csv").filter(model=f"vit-12x192-{trunk}", probe="attentive").row(0, named=True)
    return [row["best_layer"], *(100 * row[name] for name in ("gain", "low", "high"))]


def probe_row(trunk: str) -> list[float]:
    curve = probe_curve(trunk)
    return [*(curve[layer] for layer in (0, 3, 6, 9, 10, 11, 12)), *probe_gains(trunk)]


def no_gain() -> list[float]:
    """Check that no layer that linear and k-NN probes choose gains."""
    assert table("results/vision/gains.csv").filter(pl.col("probe") != "attentive")["gain"].max() == 0
    return []


def insignificant() -> list[float]:
    """Check that attentive probes are best at layers 10 or 11, gain nothing significant, and the autoregressive trunk not most."""
    trunks = ("supervised", "masked", "autoregressive", "autoregressive-causal", "distilled")
    assert {best(probe_curve(trunk))[1] for trunk in trunks} == {10, 11}
    assert all(low <= 0 for _, _, low, _ in map(probe_gains, trunks))
    assert max(trunks, key=lambda trunk: probe_gains(trunk)[1]) != "autoregressive"
    return []


def settles(trunk: str) -> dict[int, int]:
    """Return the step from which each layer stays within 0.2 of its last dataset entropy."""
    frame = table("results/vision/training.csv").filter(model=f"vit-12x192-{trunk}", name="dataset_entropy")
    frame = frame.with_columns(step=pl.col("revision").str.strip_prefix("step").cast(pl.Int64)).sort("step")
    found = {}
    for (layer,), part in frame.group_by("layer", maintain_order=True):
        final = part["value"][-1]
        away = part.filter((pl.col("value") - final).abs() > 0.2)["step"].max()
        found[layer] = part.filter(pl.col("step") > (-1 if away is None else away))["step"].min()
    return found  # type: ignore[return-value]


def autoregressive_settles() -> list[int]:
    steps = settles("autoregressive")
    assert {steps[layer] for layer in range(2, 8)} == {128, 256}
    assert {steps[layer] for layer in (10, 11, 12)} == {2048}
    return [128, 256, 2048, steps[0]]


def masked_settles() -> list[int]:
    steps = settles("masked")
    assert max(steps[layer] for layer in range(1, 12)) <= 256
    return [256, steps[0], steps[12]]
