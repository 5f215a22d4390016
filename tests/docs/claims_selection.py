"""What pages say of layers, recipes and rules, and the frames that say it."""

from __future__ import annotations

from benchmarks.zoo import table as zoo
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


def _zoo(number: int) -> list[float]:
    """Of a causal model: plain at the last and its best layer; at 0.95 `one-word`, `echo`, `word-echo`; best pair, last."""
    scores = zoo.means(zoo.CAUSAL[number])
    num_layers = max(layer for _, layer in scores)
    layer = zoo.resolve_layer(zoo.DEPTH, num_layers)
    best_plain = max(score for (name, _), score in scores.items() if name == "plain")
    best_pair = max(score for (name, _), score in scores.items() if not name.startswith("word-echo"))
    named = [scores[name, layer] for name in ("one-word", "echo", "word-echo")]
    return [scores["plain", num_layers], best_plain, *named, best_pair, scores["word-echo", num_layers]]


def _gain(number: int) -> list[float]:
    """Of a causal model: the gain of `word-echo` at 0.95 over the best plain layer, and its interval."""
    rows = table(f"zoo/results/{zoo.CAUSAL[number]}-choices.csv").filter(choice="word-echo at 0.95")
    return [rows[name].item() for name in ("gain", "gain_low", "gain_high")]


def _variant(name: str, number: int) -> float:
    """Return the score of a variant at 0.95 of the depth of a causal model."""
    model = zoo.CAUSAL[number]
    layer = zoo.resolve_layer(zoo.DEPTH, max(layer for _, layer in zoo.means(model)))
    return table(f"zoo/results/{model}-variants.csv").filter(variant=name, layer=layer)["score"].mean()  # type: ignore[return-value]


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
        "the last layer scores {}, the best layer {}, and the answer of `midlayer select` without labels, "
        "[a prompt](docs/recipes.md) at 0.95 of the depth, {}: {} points over the best layer (95 % interval {} to {})",
        lambda: [*_zoo(0)[:2], _zoo(0)[4], *_gain(0)],
    ),
    Claim(
        "README.md",
        "Gemma-3-270M: {}, {} and {} ({} to {} over the best layer)",
        lambda: [*_zoo(1)[:2], _zoo(1)[4], *_gain(1)[1:]],
    ),
    Claim("README.md", "the prompt loses {} points", lambda: [-_gain(2)[0]]),
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
        "on none of {} measurements of [untrained models](../benchmarks/selection/README.md#the-gate)",
        lambda: [len(gates().filter(kind="untrained", now=False))],
    ),
    Claim(
        SELECTION,
        "`fixed-depth` is {} points below the best layer on average, the last layer {}; on the {} transformers with 12 "
        "blocks or more, {} and {}",
        lambda: [
            *(selection_table("ten")[rule][0] for rule in ("auto", "last")),
            7,
            *(selection_table("seven")[rule][0] for rule in ("auto", "last")),
        ],
    ),
    Claim(
        SELECTION,
        "a depth of 0.8 is {} points below the best layer; on all-MiniLM-L6-v2 it would lose {}",
        lambda: [regret("fixed-depth", SMOLLM2), regret("fixed-depth", MINILM)],
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
            last(recipe("plain", "minilm")),
            _zoo(0)[1],
            round(_parameters(SMOLLM2) / _parameters(MINILM)),
        ],
    ),
    Claim(
        SELECTION,
        "`word-echo` closes {} % of the gap",
        lambda: [100 * (_zoo(0)[4] - _zoo(0)[1]) / (last(recipe("plain", "minilm")) - _zoo(0)[1])],
    ),
    *(
        Claim(
            SELECTION,
            f"| {model} | {{}} | {{}} | {{}} | {{}} |",
            lambda number=number: [_zoo(number)[place] for place in (0, 1, 4, 5)],
        )
        for number, model in enumerate(zoo.CAUSAL)
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
    *(
        Claim(RECIPES, f"| {label} | {{}} | {{}} | {{}} |", lambda place=place: [_zoo(k)[place] for k in range(3)])
        for place, label in enumerate(
            (
                "plain text, last layer",
                "",
                "`one-word` at 0.95 of the depth",
                "`echo` at 0.95",
                "",
                "best single recipe and layer, chosen with labels",
                "`word-echo`, last layer",
            )
        )
        if label
    ),
    Claim(
        RECIPES,
        "| plain text, best layer | {} at 6 of 30 | {} at 13 of 18 | {} at 1 of 6 |",
        lambda: [_zoo(k)[1] for k in range(3)],
    ),
    Claim(
        RECIPES,
        "| `word-echo` at 0.95, nothing chosen | **{}** | **{}** | {} |",
        lambda: [_zoo(k)[4] for k in range(3)],
    ),
    Claim(
        RECIPES,
        "| over the best plain layer | +{} [{} to {}] | +{} [{} to {}] | −{} [−{} to −{}] |",
        lambda: [*_gain(0), *_gain(1), *(-value for value in _gain(2))],
    ),
    Claim(
        RECIPES,
        "(path, trust_remote_code=True)` | {} | {} | {} |",
        lambda: [_zoo(k)[4] for k in range(3)],
    ),
    Claim(
        RECIPES, "`SentenceTransformer(path)` | {} | {} | {} |", lambda: [_variant("stock folder", k) for k in range(3)]
    ),
    Claim(
        RECIPES,
        "scores {} on SmolLM2 and {} on Gemma at the same depth",
        lambda: [_variant("Token Prepending up to 0.15", k) for k in range(2)],
    ),
    Claim(
        RECIPES,
        "all-MiniLM-L6-v2 {}. Embedding models do not benefit: MiniLM scores {} with `one-word`",
        lambda: [last(recipe("plain", "minilm")), last(recipe("one-word", "minilm"))],
    ),
    Claim(
        RECIPES,
        "depth 0.8 alone {}, the best single layer {}; with `one-word`",
        lambda: [recipe("plain")[24], best(recipe("plain"))[0]],
    ),
    # --- CHANGELOG.md ------------------------------------------------------------------------------------------------
    Claim(
        "CHANGELOG.md",
        "`summarize` scores {}, {} and {} and `instruction` {}, {} and {}, where `word-echo` scores {}, {} and {}",
        lambda: [
            zoo.means(model)[name, layer]
            for name in ("summarize", "instruction", "word-echo")
            for model, layer in zip(zoo.CAUSAL, (29, 17, 6), strict=True)
        ],
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
