"""What pages say of models that were trained or probed here, and the frames that say it."""

from __future__ import annotations

import polars as pl

from benchmarks.intervals import mean_interval
from benchmarks.pretraining import first
from midlayer_encoders.frame.steps import step_of
from tests.docs.frames import Curve, best, last, mean_by_layer, metric, stage, table, trained
from tests.docs.stated import Claim

FIRST, VISION = (f"docs/{page}.md" for page in ("training_first", "vision"))
REPLICATION = "docs/replication.md"


# --- the first training record --------------------------------------------------------------------------------------


def _scores(run: str, step: int | None = None) -> Curve:
    return mean_by_layer(stage(run, step).filter(kind="score"))


def _gain(tuning: str, *, without: str = "none") -> tuple[float, float, float]:
    """Return what a fine-tuning adds to the last layer's mean score, and the interval over the tasks."""
    wanted = ~pl.col("dataset").str.starts_with(without)
    before, after = (
        stage(tuning, step).filter(wanted, kind="score", layer=12).sort("dataset")["value"] for step in (0, 256)
    )
    return mean_interval((100 * (after - before)).to_list())


def _no_better_block() -> list[float]:
    """Check that no block's gain over the last, and the embeddings' over the best block in ssm alone, exclude zero."""
    for run in (*_RUNS, "simcse", "supervised"):
        scores = first.last_stage(run)
        block = max(map(str, range(1, 13)), key=lambda layer: scores[layer].mean())  # type: ignore[arg-type, return-value]
        assert mean_interval((scores[block] - scores["12"]).to_list())[1] <= 0
        assert (mean_interval((scores[block] - scores["0"]).to_list())[2] < 0) == (run == "ssm")
    for run in _RUNS:
        assert all(best(_scores(run, step_of(revision)))[1] == 0 for revision in _scored(run))
    return []


def _scored(run: str) -> list[str]:
    return trained(run).filter(kind="score")["revision"].unique().to_list()


def _change(name: str, tuning: str) -> Curve:
    before, after = (metric(stage(tuning, step), name) for step in (0, 256))
    return {layer: after[layer] - before[layer] for layer in before}


def _rising(curve: Curve) -> list[int]:
    return [layer for layer in curve if curve[layer] > 0]


def _earlier_tunings() -> list[float]:
    """Return dataset entropy before and after supervised tuning at layer 6, one of those where it falls."""
    change = _change("dataset_entropy", "supervised")
    assert [layer for layer in change if layer and change[layer] < 0] == list(range(2, 11))
    assert _rising(_change("infonce", "simcse")) in ([], [0])
    return [metric(stage("supervised", step), "dataset_entropy")[6] for step in (0, 256)]


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
    Claim(FIRST, "and no earlier block is separable from it", lambda: _no_better_block()),
    Claim(FIRST, "(`first_token_share`) never exceeds {} at any layer", lambda: [_ceiling(_largest_share())]),
    Claim(
        FIRST,
        "as in the paper. Within a text, it raises entropy at layers {} to {} and by less than {} nats at layers {} to {}, and lowers",
        lambda: _entropy_between("simcse"),
    ),
    Claim(
        FIRST,
        "the last layer's mean changes by {} points (95 % interval over the six tasks {} to {})",
        lambda: _gain("simcse"),
    ),
    Claim(
        FIRST,
        "Invariance rises at layers {} to {}, a little ({} or less) at layers {} to {}, and falls at layers {} to {}",
        _invariance,
    ),
    Claim(
        FIRST,
        "The last layer's mean changes by {} points ({} to {}), and by {} ({} to {}) without Banking77",
        lambda: [*_gain("supervised"), *_gain("supervised", without="Banking77")],
    ),
    Claim(
        REPLICATION,
        "supervised tuning lowered dataset entropy at layers 2 to 10 ({} to {} at layer 6), and SimCSE raised invariance at every block",
        _earlier_tunings,
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
    return metric(table("results/vision/metrics.csv"), metric_name, model=f"vit-12x192-{trunk}")


def _probe(trunk: str, kind: str = "attentive") -> Curve:
    rows = table("results/vision/probes.csv").filter(model=f"vit-12x192-{trunk}", probe=kind)
    return dict(rows.select("layer", 100 * pl.col("accuracy")).iter_rows())


def _gains(trunk: str) -> list[float]:
    row = table("results/vision/gains.csv").filter(model=f"vit-12x192-{trunk}", probe="attentive").row(0, named=True)
    return [row["best_layer"], *(100 * row[name] for name in ("gain", "low", "high"))]


def _probe_row(trunk: str) -> list[float]:
    curve = _probe(trunk)
    return [*(curve[layer] for layer in (0, 3, 6, 9, 10, 11, 12)), *_gains(trunk)]


def _no_gain() -> list[float]:
    """Check that no layer that linear and k-NN probes choose gains."""
    assert table("results/vision/gains.csv").filter(pl.col("probe") != "attentive")["gain"].max() == 0
    return []


def _insignificant() -> list[float]:
    """Check that attentive probes are best at layers 10 or 11, gain nothing significant, and the autoregressive trunk not most."""
    trunks = ("supervised", "masked", "autoregressive", "autoregressive-causal", "distilled")
    assert {best(_probe(trunk))[1] for trunk in trunks} == {10, 11}
    assert all(low <= 0 for _, _, low, _ in map(_gains, trunks))
    assert max(trunks, key=lambda trunk: _gains(trunk)[1]) != "autoregressive"
    return []


def _settles(trunk: str) -> dict[int, int]:
    """Return the step from which each layer stays within 0.2 of its last dataset entropy."""
    frame = table("results/vision/training.csv").filter(model=f"vit-12x192-{trunk}", name="dataset_entropy")
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
    return [256, steps[0], steps[12]]


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
    Claim(VISION, "rises to layers 10 or 11. None of the gains of the selected layers is significant", _insignificant),
    Claim(VISION, "no layer selected on the validation images gains over the last", _no_gain),
    Claim(
        VISION,
        "climbs from {} to {} at layer {} and ends at {}",
        lambda: [(curve := _image("dataset_entropy", "autoregressive"))[0], *best(curve), last(curve)],
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
        "dataset entropy {} at layer {} and {} at the last, InfoNCE lowest at layer {} ({} against {} at the last)",
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
    Claim(VISION, "all layers settle by step {}, except layer 0 ({}) and the last ({});", _masked_settles),
    Claim(
        REPLICATION,
        "best at layer {}, {} points ({} to {}) over the last, as are the masked and distilled models",
        lambda: _gains("autoregressive"),
    ),
]


CLAIMS = [*TRAINED, *IMAGES]
