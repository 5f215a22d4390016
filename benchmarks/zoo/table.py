"""Write the page of the zoo, ``benchmarks/zoo/README.md``, from the results that ``benchmarks.zoo.run`` wrote.

python -m benchmarks.zoo.table
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from benchmarks.zoo import rival_tables as rivals
from benchmarks.zoo import rules
from benchmarks.zoo.rivals import OWN_PROMPT
from midlayer_encoders.models.anatomy import resolve_layer

FOLDER = Path(__file__).parent
CAUSAL = rivals.MODELS
EMBEDDING = ("all-MiniLM-L6-v2", "gte-small", "paraphrase-MiniLM-L3")
DEPTH = rivals.DEPTH
REMOVED = ("summarize", "instruction")  # recipes that the results hold, and that have no name any more


def means(model: str) -> dict[tuple[str, int], float]:
    """Return the mean score over tasks of each recipe and layer of a model."""
    scores = pl.read_csv(FOLDER / "results" / f"{model}.csv")
    rows = scores.group_by("recipe", "layer").agg(pl.col("score").mean()).iter_rows()
    return {(recipe, layer): score for recipe, layer, score in rows}


def best(scores: dict[tuple[str, int], float], *recipes: str) -> str:
    """Return the highest score of recipes, with its recipe and layer."""
    places = [place for place in scores if place[0] in recipes]
    place = max(places, key=scores.__getitem__)
    name = (
        ""
        if len(recipes) == 1
        else f"`{place[0]}`{', since removed,' if place[0].partition('+')[0] in REMOVED else ''} "
    )
    return f"{scores[place]:.1f} ({name}at {place[1]})"


def with_interval(values: tuple[float, float, float]) -> str:
    """Return a gain with its interval."""
    gain, low, high = values
    return f"{gain:+.1f} ({low:.1f} to {high:.1f})"


def rival_rows(model: str) -> list[str]:
    """Return the table of the methods on a model: scores, and gains over the best plain layer."""
    groups, of = rivals.groups(model), rivals.results(model)
    by_group = {name: rivals.rival_settings(model, tasks) for name, tasks in groups.items()}
    first = next(iter(groups))
    lines = ["| | " + " | ".join(groups) + " | tokens of a short text |", "|---" * (len(groups) + 2) + "|"]
    for method in by_group[first]:
        cells = []
        for name, tasks in groups.items():
            settings = by_group[name][method]
            gain = "" if method.endswith("best layer") else ", " + with_interval(of.gain(tasks, settings))
            cells.append(f"{of.mean(tasks, settings):.1f}{gain}")
        name = METHOD_NAMES.get(method, method)
        shown = f"**`{name}` at {DEPTH}**" if method == rivals.DEFAULT else name
        tokens = of.tokens(groups[first], by_group[first][method])
        lines.append(f"| {shown} | " + " | ".join(cells) + f" | {tokens:.0f} |")
    return lines


METHOD_NAMES = {
    "plain": "plain, layer from other tasks",
    "one-word": "`one-word`, likewise",
    "echo": "`echo`, likewise",
    f"{rivals.DEFAULT}, depth and weight from other models": f"`{rivals.DEFAULT}`, depth and weight from other models",
}
COST_TASKS = {"EmotionClassification": "short", "LongAuthorClassification": "1,300 to 1,600 words"}


def cost_rows() -> list[str]:
    """Return the table of tokens and milliseconds of each method."""
    rows = pl.read_csv(rivals.FOLDER / "milliseconds.csv")
    methods = dict.fromkeys(map(rivals.method_of, rows["variant"]))
    methods.pop("word-echo")
    names = [f"{unit}, {length}" for length in COST_TASKS.values() for unit in ("tokens", "ms")]
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for method in methods:
        cells = []
        for task in COST_TASKS:
            of = rows.filter(pl.col("variant").map_elements(rivals.method_of, pl.String) == method, task=task)
            row = of.sort("milliseconds").row(0, named=True)
            cells += [f"{row['tokens']:,.0f}", f"{row['milliseconds']:.2f}"]
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return lines


def language_rows() -> list[str]:
    """Return the table of other languages, with gains over the best plain layer."""
    lines = ["| | | plain, best layer | `word-echo` | `word-echo+center` | the same, prompt in the language |"]
    lines.append("|---" * 6 + "|")
    for model in CAUSAL[:2]:
        of = rivals.results(model)
        for language, tasks in rivals.groups(model, rivals.LANGUAGES).items():
            base = of.best(tasks, "plain")
            cells = [f"{of.mean(tasks, base):.1f}"]
            for variant in ("word-echo", rivals.DEFAULT, OWN_PROMPT):
                setting = of.at(variant)
                is_there = None not in of.rows(tasks, setting)
                gain = with_interval(of.gain(tasks, setting)) if is_there else ""
                cells.append(f"{of.mean(tasks, setting):.1f}, {gain}" if is_there else "")
            lines.append(f"| {model} | {language} | " + " | ".join(cells) + " |")
    return lines


def depth_rows() -> list[str]:
    """Return the table of depths and weights of the default, in and out of the tasks that it was chosen on."""
    settings = [(rivals.DEFAULT, depth) for depth in rivals.DEPTHS]
    settings += [(f"{rivals.DEFAULT}, {weight}", DEPTH) for weight in ("no first copy", "half", "always 1")]
    columns = [(model, group) for model in CAUSAL[:2] for group in rivals.groups(model)]
    lines = [
        "| | " + " | ".join(f"{model}, {group}" for model, group in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for variant, depth in settings:
        cells = []
        for model, group in columns:
            of = rivals.results(model)
            cells.append(f"{of.mean(rivals.GROUPS[group], of.at(variant, depth)):.1f}")
        name = f"at {depth}" if variant == rivals.DEFAULT else variant.partition(", ")[2]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


HIERARCHICAL = {
    "Hierarchical Token Prepending, the best of four settings": ("Hierarchical", False),
    "Hierarchical Token Prepending, mean of the plain text, the best of four settings": ("Hierarchical", True),
}


def variants(model: str) -> dict[str, float]:
    """Return the mean score over tasks of other ways to read a model, at the depth of the default."""
    layer = resolve_layer(DEPTH, max(layer for _, layer in means(model)))
    tables = [pl.read_csv(FOLDER / "results" / f"{model}-{part}.csv") for part in ("variants", "prepending")]
    rows = pl.concat(tables).filter(layer=layer).group_by("variant", maintain_order=True).agg(pl.col("score").mean())
    found = dict(rows.iter_rows())
    scores = {name: score for name, score in found.items() if not name.startswith("Hierarchical")}
    for name, (start, mean) in HIERARCHICAL.items():
        settings = [found[one] for one in found if one.startswith(start) and one.endswith("mean") == mean]
        scores |= {name: max(settings)} if settings else {}
    return scores


def variant_rows() -> list[str]:
    """Return the table of other ways to read a causal model, at the depth of the default."""
    tables = {model: variants(model) for model in CAUSAL}
    lines = ["| | " + " | ".join(CAUSAL) + " |", "|---" * (len(CAUSAL) + 1) + "|"]
    for variant in sorted(tables[CAUSAL[0]], key=lambda variant: -sum(tables[model][variant] for model in CAUSAL[:2])):
        cells = [f"{tables[model][variant]:.1f}" if variant in tables[model] else "" for model in CAUSAL]
        name = f"**{variant}**" if variant == "word-echo" else variant
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def rule_rows() -> list[str]:
    """Return the table of rules that choose recipe and layer for each task without labels."""
    models = CAUSAL[:2]
    found = rules.table(FOLDER / "results", list(models))
    lines = ["| | " + " | ".join(models) + " |", "|---" * (len(models) + 1) + "|"]
    for rule in dict.fromkeys(found["rule"]):
        scores = [found.filter(model=model, rule=rule)["score"].item() for model in models]
        lines.append(f"| {rule} | " + " | ".join(f"{score:.1f}" for score in scores) + " |")
    return lines


def embedding_rows() -> list[str]:
    """Return the table of the embedding models."""
    lines = ["| model | plain, last layer | plain, best layer | best other recipe and layer |", "|---|---|---|---|"]
    for model in EMBEDDING:
        scores = means(model)
        last = max(layer for _, layer in scores)
        others = sorted({recipe for recipe, _ in scores} - {"plain"})
        cells = [
            f"{model} ({last} blocks)",
            f"{scores['plain', last]:.1f}",
            best(scores, "plain"),
            best(scores, *others),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def long_words(model: str) -> str:
    """Return what an embedding model scores at its best layer on long texts."""
    rows = pl.read_csv(FOLDER / "results" / "long" / f"{model}-choices.csv")
    best = rows.filter(choice="plain, best layer").row(0, named=True)
    return f"{model} scores {best['score']:.1f} ({best['low']:.1f} to {best['high']:.1f}) at layer {best['layer']}"


def chinese_words() -> str:
    """Return the sentence on the Chinese model."""
    rows = pl.read_csv(FOLDER / "results" / "chinese" / "m3e-small-choices.csv")
    last, best = (rows.filter(choice=f"plain, {name} layer").row(0, named=True) for name in ("last", "best"))
    where = "its last layer, which is its best" if best["layer"] == last["layer"] else f"layer {best['layer']}"
    return f"{best['score']:.1f} ({best['low']:.1f} to {best['high']:.1f}) at {where}"


def page() -> str:
    """Return the page."""
    return "\n".join(
        [
            "# Recipes on real models",
            "",
            "Mean of the main scores x 100 on an NVIDIA H200. `python -m benchmarks.zoo.weights` fetches, converts and verifies the",
            "models, `python -m benchmarks.zoo.rivals TASKS --models … --out RUNS --device cuda --dtype bfloat16` reads and scores,",
            "`python -m benchmarks.zoo.rival_tables RUNS` packs the scores into `results/rivals`, and `python -m benchmarks.zoo.table`",
            "writes this page.",
            "",
            "## Methods without training, at equal tokens",
            "",
            "Scores, and gains over the best plain layer with 95 % intervals over resampled examples, the same for both. The best plain",
            "layer is chosen with the labels of the tasks themselves, centered or not; of every other method, layer, setting and",
            "centering are the best ones on the other English tasks. `word-echo+center` has no choice: it is at "
            f"{DEPTH} of the depth. As",
            "that depth was chosen on the short tasks, the last row repeats it with depth and weight of the first copy that are best",
            "on the other ones of SmolLM2 and Gemma and on other tasks.",
            "",
            "- *short*: Banking77, Emotion, STSBenchmark, StackOverflow titles, TrecQA reranking, TwitterURLCorpus at full size;",
            "- *passages*: XQuAD, 1,190 questions and 240 passages of 124 words; *joined passages*: three of an article together;",
            "- *300 to 600 words*: who wrote a passage of a novel, the article of a passage of WikiText-2, and the passage that follows;",
            "- *1,300 to 1,600 words*: who wrote a passage of a novel.",
            "",
            *(
                line
                for model in CAUSAL
                for line in (f"### {model} ({rivals.results(model).num_layers} blocks)", "", *rival_rows(model), "")
            ),
            "SmolLM2-135M is the Instruct model in 4 bits, Gemma-3-270M the base model in 4 bits. TinyStories-15M knows only the words",
            "of stories for small children and reads 256 tokens. MetaEOL (eight prompts, arXiv 2402.18458), Contrastive Prompting",
            "(2505.12831), KV-Embedding (2601.01046), AlignedWVA (2602.01572) and Token Prepending (2412.11556) are our",
            "implementations; `rivals.py` says how each one reads a text.",
            "",
            "No method wins everywhere. On SmolLM2's short texts AlignedWVA has the highest score, at half of the tokens of",
            "`word-echo+center`; on passages and on everything of Gemma it is below. On 300 to 600 words no method is significantly above",
            "the best plain layer, whatever the depth and the weight of the first copy (below). On the authors of long passages every",
            "prompt is far below it at the settings that other tasks choose.",
            "",
            "## What they cost",
            "",
            "SmolLM2-135M alone on the GPU, one layer, bfloat16, for a text, the fastest setting of each method. On short texts most of the",
            "time is tokenization and launches, and methods differ less than their repetitions:",
            "",
            *cost_rows(),
            "",
            "## Depth of the default, and the weight of the first copy",
            "",
            "By default the weight of the first copy grows with the text, to 1 at 128 tokens:",
            "",
            *depth_rows(),
            "",
            "## Other languages",
            "",
            f"At {DEPTH} of the depth, with gains over the best plain layer. Pairs are STSBenchmark, passages XQuAD. Gemma-3-270M knows",
            "German and French, SmolLM2-135M hardly. The prompt is English, in the last column German, French or Chinese (`rivals.py`);",
            "German questions and English passages get the same one.",
            "",
            *language_rows(),
            "",
            "## Other ways to read a causal model",
            "",
            f"On the six short tasks in float32, at {DEPTH} of the depth (`python -m benchmarks.zoo.variants`; `results/*-variants.csv` has three",
            "other depths). `word-echo` pooled two spans here, without the first copy, as long as two unit vectors:",
            "",
            *variant_rows(),
            "",
            "*Side by side* concatenates the two spans, *1:2* and *2:1* weight the first and the second, *knowledge* and",
            "*step-by-step* are the prompts of Zhang et al. 2024. Token Prepending (Fu et al. 2024) is our implementation "
            "with `one-word`:",
            "a token before the text takes the state of the last token after each block up to that depth. In its "
            "hierarchical form",
            "(Ding et al. 2025), two or four tokens take the states at the ends of as many parts of the text, up to 0.25 of "
            "the depth or",
            "everywhere; texts are short here, its authors built it for long ones. *Stock folder* is what",
            "`save_pretrained(path, stock=True)` writes. What the attention of a block adds to the states "
            "(`results/*-attention.csv`,",
            "the nearest to value aggregation, arXiv 2602.01572) scores at most 57.5 on Gemma-3-270M, with `one-word` at "
            "layer 16.",
            "",
            "## Rules that choose for each task",
            "",
            "With two spans as above. Among the recipes and the layers from half of the depth on, a rule takes the pair with",
            "the highest alignment on 400 texts of the task, or the highest sum of the ranks of alignment and uniformity (`python -m "
            "benchmarks.zoo.rules`). No rule",
            "reaches the fixed choice, so `select` does not use one.",
            "",
            *rule_rows(),
            "",
            "## Embedding models",
            "",
            *embedding_rows(),
            "",
            "`word-echo` is refused for them: their tokens see later ones. On texts of 300 to 600 words, "
            f"{long_words('all-MiniLM-L6-v2')},",
            f"which reads 256 tokens of a text, and {long_words('gte-small')}, which reads 512.",
            "",
            "m3e-small, a Chinese embedding model with 4 blocks whose license forbids commercial use, has an accuracy x 100 of",
            f"{chinese_words()}, on 600 Chinese reviews (`python -m",
            "benchmarks.zoo.chinese_reviews`).",
            "",
        ]
    )


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf8")
