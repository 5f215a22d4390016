"""What pages say of layers and rules, and the frames that say it."""

from __future__ import annotations

from benchmarks.intervals import mean_interval
from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import table as zoo
from midlayer_encoders.selection import RULES
from tests.docs.frames import (
    MINILM,
    SMOLLM2,
    best,
    gates,
    mean_regret,
    metric,
    outside,
    over_tasks,
    regret,
    selection_table,
    table,
)
from tests.docs.stated import Claim
from tests.docs.zoo_numbers import (
    absolute,
    authors,
    best_over_last,
    best_plain_depth,
    elsewhere_gain,
    group_gain,
    minilm,
    parameters,
    with_intervals,
)

SELECTION, REPLICATION, BENCHMARK = "docs/selection.md", "docs/replication.md", "benchmarks/selection/README.md"
METRIC_RULES = ("min-dime", "min-infonce", "min-dataset-entropy")


def _half_match(model: str) -> dict[str, dict[int, float]]:
    rows = table("selection/results/real_metrics.csv").filter(model=model, name="half_match")
    return {task: metric(rows, "half_match", dataset=task) for task in rows["dataset"].unique(maintain_order=True)}


def _ten(column: str, rule: str = "fixed-depth") -> list[float]:
    return selection_table("ten")[rule, column]


def _models_of(part: str, rule: str = "fixed-depth") -> float:
    """Return the number of models on which a rule was scored."""
    return selection_table(part)[rule, "models"][0]


def _reference_gain(model: str) -> list[float]:
    """Return the gain of a reference model's best layer over the last, its interval over tasks, and its depth in percent."""
    models = selection_table("ten-by-model")
    layer, blocks = (models[row, model][1] for row in ("best", "last"))
    return [*models["best over last, over tasks", model], 100 * layer / blocks]


def _worse(rule: str) -> list[float]:
    draws = table("selection/results/few_labels.csv").filter(rule=rule)
    return [(draws["average_over_last"] < -0.5).sum(), len(draws)]


CLAIMS = [
    Claim(SELECTION, "of SmolLM2-135M: {} points ({} to {}, resampled examples)", lambda: group_gain(0, rivals.LONG)),
    Claim(
        SELECTION,
        "the best plain layer scores {}, the default {}, and on passages of 1,300 to 1,600 words {} against {}.",
        lambda: authors("AuthorClassification", "LongAuthorClassification"),
    ),
    Claim(
        SELECTION,
        "With depth and weights from the other models and other tasks, the gains are {} ({} to {}), {} ({} to {}) and {} ({} "
        "to {}).",
        lambda: [number for k in range(3) for number in elsewhere_gain(k)],
    ),
    Claim(
        SELECTION,
        "the default gains {} points on Gemma-3-270M ({} to {}) and {} ({} to {}). SmolLM2-135M hardly knows these languages and "
        "loses {} ({} to {}) and {} ({} to {}), but gains {} on German passages ({} to {}) and {} with German questions and "
        "English passages ({} to {}).",
        lambda: [
            *(number for group in ("German pairs", "French pairs") for number in group_gain(1, group)),
            *(number for group in ("German pairs", "French pairs") for number in absolute(group_gain(0, group))),
            *(number for group in ("German passages", rivals.CROSS) for number in group_gain(0, group)),
        ],
    ),
    Claim(
        SELECTION,
        "it scores {} instead of {} there.",
        lambda: [
            (of := rivals.results(zoo.CAUSAL[0])).mean(rivals.LANGUAGES[rivals.CROSS], of.at("word-echo")),
            of.mean(rivals.LANGUAGES[rivals.CROSS], of.default),
        ],
    ),
    Claim(
        "README.md",
        "a relative depth of 0.8 scores {} points more than the last layer on average over {} public models (95 % interval "
        "{} to {}), and {} less than the best one ({} to {})",
        lambda: [(gain := _ten("gain over last"))[0], _models_of("ten"), *gain[1:], *_ten("mean regret")],
    ),
    # --- docs/selection.md -------------------------------------------------------------------------------------------
    Claim(
        SELECTION,
        "on none of {} measurements of [untrained models](../benchmarks/selection/README.md#the-gate)",
        lambda: [len(gates().filter(kind="untrained", now=False))],
    ),
    Claim(
        SELECTION,
        "On {} models of the paper's tables, `fixed-depth` scores {} points more than the last layer ({} to {}) and {} less "
        "than the best one ({} to {}); on the seven transformers with 12 blocks or more, {} more ({} to {}) and {} less ({} "
        "to {})",
        lambda: [
            _models_of("ten"),
            *(
                number
                for part in ("ten", "seven")
                for column in ("gain over last", "mean regret")
                for number in selection_table(part)["fixed-depth", column]
            ),
        ],
    ),
    Claim(
        SELECTION,
        "On {} models outside those tables (SmolLM2-135M, all-MiniLM-L6-v2 and the five of "
        "[docs/training_first.md](training_first.md)), a depth of 0.8 is as good as the last layer ({}, {} to {}) and {} "
        "points below the best one ({} to {}); `auto`, which keeps the last layer of MiniLM, is {} below ({} to {}); {} of "
        "the seven are best at layer 0",
        lambda: [
            _models_of("outside"),
            *selection_table("outside")["fixed-depth", "gain over last"],
            *selection_table("outside")["fixed-depth", "mean regret"],
            *selection_table("outside")["auto", "mean regret"],
            sum(best(scores)[1] == 0 for scores, _ in outside().values()),
        ],
    ),
    Claim(
        SELECTION,
        "On {} of its models they score {} to {} points less, significantly so `min-infonce` ({}, {} to {}), which scores "
        "the most on the seven other models ({}, {} to {})",
        lambda: _rules_of_the_paper(),
    ),
    Claim(
        SELECTION,
        "the last layer of all-MiniLM-L6-v2 scores {} ({} to {}, resampled examples), with a sixth of the parameters",
        lambda: minilm() if round(parameters(SMOLLM2) / parameters(MINILM)) == 6 else [],
    ),
    Claim(
        SELECTION,
        "of {} draws of 30 to 200 labels on two models, the layer with the highest accuracy is more than 0.5 points below "
        "the last in {}, `auto`'s in {}",
        lambda: [_worse("few-labels")[1], _worse("few-labels")[0], _worse("auto")[0]],
    ),
    Claim(
        SELECTION,
        "by {} points (95 % interval over tasks {} to {}) and that of MiniLM's last layer by {} ({} to {})",
        lambda: [
            *over_tasks("smollm2", [("plain+center", 6), ("plain", 6)]),
            *over_tasks("minilm", [("plain+center", 6), ("plain", 6)]),
        ],
    ),
    *(
        Claim(
            SELECTION,
            f"| {model}{', two of the tasks' * (number == 1)} | " + "{} ({} to {}) | " * 4,
            lambda number=number: with_intervals(number),
        )
        for number, model in enumerate(zoo.CAUSAL)
    ),
    # --- benchmarks/selection/README.md ------------------------------------------------------------------------------
    Claim(BENCHMARK, "| last | 7 of 7 | {} (1.93 to 8.00) | 10.03 |", lambda: [mean_regret("last")]),
    Claim(
        BENCHMARK,
        "| fixed-depth | 7 of 7 | {} ({} to {}) | {} | {} ({} to {}) | {} | +0.00 |\n| min-dime | 7 of 7 | {} (",
        lambda: _outside_rows(),
    ),
    Claim(BENCHMARK, "| min-infonce | 7 of 7 | {} (", lambda: [mean_regret("min-infonce")]),
    Claim(BENCHMARK, "| min-prompt-entropy | 7 of 7 | {} (", lambda: [mean_regret("min-prompt-entropy")]),
    Claim(
        BENCHMARK,
        "half match is by far the highest at the last layer of MiniLM ({} to {} on six corpora); on SmolLM2 it is highest at "
        "layer 29 of 30 on {} of the six (on Emotion at layer {})",
        lambda: [
            min(ends := [curve[6] for curve in _half_match(MINILM).values()]),
            max(ends),
            sum(best(curve)[1] == 29 for curve in _half_match(SMOLLM2).values()),
            best(_half_match(SMOLLM2)["EmotionClassification"])[1],
        ],
    ),
    Claim(BENCHMARK, "{} of {} draws of `auto` are more than 0.5 points below", lambda: _worse("auto")),
    Claim(BENCHMARK, "by 0.97), and {} of {} of `few-labels`", lambda: _worse("few-labels")),
    Claim(BENCHMARK, "untrained models ({} of {} below)", lambda: [gates().filter(kind="untrained")["was"].sum(), 150]),
    # --- docs/replication.md -----------------------------------------------------------------------------------------
    Claim(
        REPLICATION,
        "SmolLM2 {} ({} to {}) at {} % of the depth, Gemma-3-270M {} ({} to {}) at {} %, TinyStories-15M {} ({} to {}) at {} %",
        lambda: [number for model in range(3) for number in (*best_over_last(model), best_plain_depth(model))],
    ),
    Claim(
        REPLICATION,
        "Pythia-410M {} ({} to {}) at {} %, Mamba-370M {} ({} to {}) at {} %, LLM2Vec-unsup-8B {} ({} to {}) at {} %",
        lambda: [
            number
            for model in ("Pythia-410m", "mamba-370m", "LLM2Vec-mntp-unsup-simcse-8B")
            for number in _reference_gain(model)
        ],
    ),
    Claim(
        REPLICATION,
        "Five models of the reference: min-DiME {} ({} to {}), min-InfoNCE {} ({} to {}), min-dataset-entropy {} ({} to {}); "
        "a fixed depth of 0.8, on {}: {} ({} to {}). Seven others: {} ({} to {}), {} ({} to {}), {} ({} to {}); {} ({} to {})",
        lambda: [
            *(number for rule in METRIC_RULES for number in _ten("gain over last", rule)),
            _models_of("ten"),
            *_ten("gain over last"),
            *(
                number
                for rule in (*METRIC_RULES, "fixed-depth")
                for number in selection_table("outside")[rule, "gain over last"]
            ),
        ],
    ),
    # --- docs/metrics.md ---------------------------------------------------------------------------------------------
    Claim(
        "docs/metrics.md",
        "layers {} and {} are above every other on all {} corpora (WikiText: {} to 30)",
        lambda: [*_above_the_others(_half_match(SMOLLM2)), 24],
    ),
]


def _above_the_others(curves: dict[str, dict[int, float]]) -> list[int]:
    """Return the layers that are the two highest on every corpus, and how many corpora there are."""
    tops = [set(sorted(curve, key=curve.__getitem__)[-2:]) for curve in curves.values()]
    wiki = curves["wikitext"]
    assert min(wiki[layer] for layer in range(24, 31)) > max(wiki[layer] for layer in range(24))
    return [*sorted(set.intersection(*tops)), len(curves)]


def _rules_of_the_paper() -> list[float]:
    """Check that no rule's gain over a fixed depth is above zero with its interval, and return what the page says."""
    rules = [rule for rule in RULES if rule.startswith(("min-", "valley"))]
    on = {
        part: {rule: selection_table(part)[rule, "gain over fixed-depth"] for rule in rules}
        for part in ("ten", "outside")
    }
    (models,) = {_models_of("ten", rule) for rule in rules}
    gains = [gain for part in on.values() for gain in part.values() if len(gain) == 3]
    assert all(low <= 0 for _, low, _ in gains)
    assert [rule for rule in rules if on["ten"][rule][2] < 0] == ["min-infonce"]
    assert max(rules, key=lambda rule: on["outside"][rule][0]) == "min-infonce"
    losses = sorted(-gain[0] for gain in on["ten"].values())
    return [models, losses[0], losses[-1], *on["ten"]["min-infonce"], *on["outside"]["min-infonce"]]


def _outside_rows() -> list[float]:
    gains = [regret("last", model) - regret("fixed-depth", model) for model in outside()]
    costs = [regret("fixed-depth", model) for model in outside()]
    return [*mean_interval(costs), max(costs), *mean_interval(gains), min(gains), mean_regret("min-dime")]
