"""What pages say of layers, recipes and rules, and the frames that say it."""

from __future__ import annotations

from tests.docs.frames import (
    MINILM,
    SMOLLM2,
    best,
    gates,
    last,
    mean_regret,
    metric,
    recipe,
    recipes,
    regret,
    selection_table,
    six_tasks,
    table,
)
from tests.docs.stated import Claim

SELECTION, RECIPES, BENCHMARK = "docs/selection.md", "docs/recipes.md", "benchmarks/selection/README.md"


def _row(name: str) -> list[float]:
    curve = recipe(name)
    return [last(curve), curve[24], *best(curve)]


def _asked() -> list[float]:
    """Of ``one-word`` at layer 28: the score, and what it gains over the last layer, depth 0.8, the best plain layer."""
    plain, score = recipe("plain"), recipe("one-word")[28]
    return [score, score - last(plain), score - plain[24], score - best(plain)[0]]


def _below_the_best(model: str, curve: dict[int, float], layer: int) -> float:
    return max(best(every)[0] for every in recipes(model).values()) - curve[layer]


def _half_match(model: str) -> dict[str, dict[int, float]]:
    rows = table("selection/results/real_metrics.csv").filter(model=model, name="half_match")
    return {task: metric(rows, "half_match", dataset=task) for task in rows["dataset"].unique(maintain_order=True)}


def _parameters(model: str) -> int:
    return table("results/tuning.csv").filter(model=model)["parameters"].max()  # type: ignore[return-value]


def _worse(rule: str) -> list[float]:
    draws = table("selection/results/few_labels.csv").filter(rule=rule)
    return [(draws["average_over_last"] < -0.5).sum(), len(draws)]


CLAIMS = [
    Claim(
        "README.md",
        "the last layer scores {}, the best layer {}, and the best layer with the [one-word prompt](docs/recipes.md) {}",
        lambda: [last(recipe("plain")), best(recipe("plain"))[0], best(recipe("one-word"))[0]],
    ),
    Claim(
        "README.md",
        "all-MiniLM-L6-v2 ({}M parameters) scores {}",
        lambda: [_parameters("all-MiniLM-L6-v2") / 1e6, last(recipes("minilm")["plain"])],
    ),
    Claim(
        "README.md",
        "it is {} points below the best layer on average, the last layer {}",
        lambda: [selection_table("ten")[rule][0] for rule in ("auto", "last")],
    ),
    # --- docs/selection.md -------------------------------------------------------------------------------------------
    Claim(
        SELECTION,
        "this scores {} on average: {} more than the last layer with plain text, {} more than plain text at a relative "
        "depth of 0.8, {} more than the best layer with plain text, and {} below the best of {} recipes at all {} layers",
        lambda: [*_asked(), _below_the_best("smollm2", recipe("one-word"), 28), len(recipes("smollm2")), 31],
    ),
    Claim(
        SELECTION,
        "its last layer, {} below its best; `one-word` would cost it {} points there",
        lambda: [
            _below_the_best("minilm", recipe("plain", "minilm"), 6),
            last(recipe("plain", "minilm")) - last(recipe("one-word", "minilm")),
        ],
    ),
    Claim(
        SELECTION,
        "on none of {} measurements of [untrained models](../benchmarks/selection/README.md#the-gate), of which {} passed",
        lambda: [len(gates().filter(kind="untrained", now=False)), len(gates().filter(kind="untrained", was=True))],
    ),
    Claim(
        SELECTION,
        "`auto` (without texts) is {} points below the best layer on average, the last layer {}; on the {} transformers with "
        "12 blocks or more, {} and {}",
        lambda: [
            *(selection_table("ten")[rule][0] for rule in ("auto", "last")),
            7,
            *(selection_table("seven")[rule][0] for rule in ("auto", "last")),
        ],
    ),
    Claim(
        SELECTION,
        "which are not in those tables, `auto` is {} and {} points below the best layer; depth 0.8 "
        "alone would lose {} points on MiniLM",
        lambda: [regret("fixed-depth", SMOLLM2), regret("last", MINILM), regret("fixed-depth", MINILM)],
    ),
    Claim(
        SELECTION,
        "[docs/training_first.md](training_first.md), it is {} to {} below: {} of them are best at layer 0",
        lambda: [
            min(
                _of_trained := [
                    regret("fixed-depth", run) for run in ("causal", "masked", "simcse", "ssm", "supervised")
                ]
            ),
            max(_of_trained),
            4,
        ],
    ),
    Claim(
        SELECTION,
        "`min-infonce` is {} points below the best layer on average, `min-prompt-entropy` and the four metrics together {}, "
        "a depth of 0.8 {}, `auto` {}; but on the paper's models `min-infonce` costs {}, a fixed depth {}",
        lambda: [
            *(mean_regret(rule) for rule in ("min-infonce", "min-prompt-entropy", "fixed-depth")),
            selection_table("outside")["auto"][0],
            *(selection_table("ten")[rule][0] for rule in ("min-infonce", "fixed-depth")),
        ],
    ),
    Claim(
        SELECTION,
        "the last layer of all-MiniLM-L6-v2 scores {}, the best of SmolLM2-135M {}, with {} times the parameters",
        lambda: [
            last(six_tasks(MINILM)),
            best(six_tasks(SMOLLM2))[0],
            round(_parameters(SMOLLM2) / _parameters(MINILM)),
        ],
    ),
    # --- benchmarks/selection/README.md ------------------------------------------------------------------------------
    Claim(BENCHMARK, "| last | 7 of 7 | {} | 10.03 |", lambda: [mean_regret("last")]),
    Claim(
        BENCHMARK, "| fixed-depth | 7 of 7 | {} | {} | {} | {} |\n| min-dime | 7 of 7 | {} |", lambda: _outside_rows()
    ),
    Claim(BENCHMARK, "| min-infonce | 7 of 7 | {} |", lambda: [mean_regret("min-infonce")]),
    Claim(BENCHMARK, "| min-prompt-entropy | 7 of 7 | {} |", lambda: [mean_regret("min-prompt-entropy")]),
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
    # --- docs/recipes.md ---------------------------------------------------------------------------------------------
    Claim(RECIPES, "| plain text, mean of its tokens | {} | {} | {} at {} |", lambda: _row("plain")),
    Claim(RECIPES, "| `one-word` | {} | {} | {} at {} |", lambda: _row("one-word")),
    Claim(RECIPES, "| `one-word+filter` | {} | {} | {} at {} |", lambda: _row("one-word+filter")),
    Claim(RECIPES, "| `echo` | {} | {} | {} at {} |", lambda: _row("echo")),
    Claim(
        RECIPES,
        "Over the last layer with plain text: best layer {} points, prompt {}, both {}",
        lambda: [
            best(recipe("plain"))[0] - last(recipe("plain")),
            last(recipe("one-word")) - last(recipe("plain")),
            best(recipe("one-word"))[0] - last(recipe("plain")),
        ],
    ),
    Claim(
        RECIPES,
        "the last token of a plain text loses {} points, the template with the mean gains {}",
        lambda: [
            best(recipe("plain"))[0] - best(recipe("plain+last"))[0],
            best(recipe("one-word+mean"))[0] - best(recipe("plain"))[0],
        ],
    ),
    Claim(
        RECIPES,
        "The prompt gains {} points over the best plain layer",
        lambda: [best(recipe("one-word"))[0] - best(recipe("plain"))[0]],
    ),
    Claim(
        RECIPES,
        "all-MiniLM-L6-v2 scores {} with plain text and {} with `one-word`",
        lambda: [last(recipe("plain", "minilm")), last(recipe("one-word", "minilm"))],
    ),
    Claim(
        RECIPES,
        "depth 0.8 alone {}, the best single layer {}; with `one-word`",
        lambda: [recipe("plain")[24], best(recipe("plain"))[0]],
    ),
    # --- docs/replication.md -----------------------------------------------------------------------------------------
    Claim(
        "docs/replication.md",
        "SmolLM2 {} at {} % of the depth ({} against {})",
        lambda: [
            best(six_tasks(SMOLLM2))[0] - last(six_tasks(SMOLLM2)),
            100 * best(six_tasks(SMOLLM2))[1] / 30,
            best(six_tasks(SMOLLM2))[0],
            last(six_tasks(SMOLLM2)),
        ],
    ),
    Claim(
        "docs/replication.md",
        "SmolLM2: {}, {}, {}, {}, {}, {} | **in part**",
        lambda: [
            best(six_tasks(SMOLLM2))[0],
            *(
                best(six_tasks(SMOLLM2))[0] - regret(rule, SMOLLM2)
                for rule in ("last", "min-dime", "min-infonce", "min-dataset-entropy", "fixed-depth")
            ),
        ],
    ),
    Claim(
        "docs/replication.md",
        "on MiniLM, it is {} points worse than the last layer, which min-InfoNCE selects",
        lambda: [regret("fixed-depth", MINILM) + regret("min-infonce", MINILM)],
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


def _outside_rows() -> list[float]:
    gains = [regret("last", model) - regret("fixed-depth", model) for model in _models()]
    worst = max(regret("fixed-depth", model) for model in _models())
    return [mean_regret("fixed-depth"), worst, sum(gains) / 7, min(gains), mean_regret("min-dime")]


def _models() -> list[str]:
    from tests.docs.frames import outside

    return list(outside())
