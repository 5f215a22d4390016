"""Write the page of the zoo, ``benchmarks/zoo/README.md``, from the results that ``benchmarks.zoo.run`` wrote.

python -m benchmarks.zoo.table
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from benchmarks.zoo import rules
from midlayer_encoders.models.anatomy import resolve_layer

FOLDER = Path(__file__).parent
CAUSAL = ("SmolLM2-135M", "Gemma-3-270M", "TinyStories-15M")
EMBEDDING = ("all-MiniLM-L6-v2", "gte-small", "paraphrase-MiniLM-L3")
DEPTH = 0.95
LONG = ("SmolLM2-135M", "Gemma-3-270M", "all-MiniLM-L6-v2", "gte-small")
LENGTH_TASKS = {"Banking77": "", "Emotion": "", "Author": "long"}
LENGTHS = (1, 3, 10, 30, 100)
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


def gain(model: str) -> str:
    """Return the interval of word-echo's gain over the best plain layer, if it was resampled."""
    path = FOLDER / "results" / f"{model}-choices.csv"
    if not path.is_file():
        return "not resampled"
    row = pl.read_csv(path).filter(choice=f"word-echo at {DEPTH}").row(0, named=True)
    return f"{row['gain']:+.1f} ({row['gain_low']:.1f} to {row['gain_high']:.1f})"


def causal_rows() -> list[str]:
    """Return the table of the causal models."""
    lines = [
        "| model | plain, last layer | plain, best layer | `one-word`, `echo` at 0.95 | `word-echo` at 0.95 "
        "| over the best plain layer | best single recipe and layer | `word-echo`, last layer |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in CAUSAL:
        scores = means(model)
        last = max(layer for _, layer in scores)
        layer = resolve_layer(DEPTH, last)
        single = sorted({recipe for recipe, _ in scores if not recipe.startswith("word-echo")})
        cells = [
            f"{model} ({last} blocks)",
            f"{scores['plain', last]:.1f}",
            best(scores, "plain"),
            f"{scores['one-word', layer]:.1f}, {scores['echo', layer]:.1f}",
            f"**{scores['word-echo', layer]:.1f}** (at {layer})",
            gain(model),
            best(scores, *single),
            f"{scores['word-echo', last]:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
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


def long_rows() -> list[str]:
    """Return the table of long documents, with the gains over the best plain layer."""
    columns = {
        "plain, last layer": "plain, last layer",
        "best single recipe and layer": "best single recipe and layer",
        "`word-echo` at 0.95": "word-echo at 0.95",
        "`echo` at 0.95": "echo at 0.95",
        "`one-word` at 0.95": "one-word at 0.95",
    }
    lines = ["| model | plain, best layer | " + " | ".join(columns) + " |", "|---" * (len(columns) + 2) + "|"]
    for model in LONG:
        rows = pl.read_csv(FOLDER / "results" / "long" / f"{model}-choices.csv")
        of = {row["choice"]: row for row in rows.iter_rows(named=True)}
        base = of["plain, best layer"]
        cells = [f"{base['score']:.1f} ({base['low']:.1f} to {base['high']:.1f}), at {base['layer']}"]
        for choice in columns.values():
            row = of.get(choice)
            name = f", `{row['recipe']}` at {row['layer']}" if row and choice.startswith("best") else ""
            gain = row and f"{row['gain']:+.1f} ({row['gain_low']:.1f} to {row['gain_high']:.1f}){name}"
            cells.append(gain if row and (row["recipe"], row["layer"]) != (base["recipe"], base["layer"]) else "")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return lines


def length_rows() -> list[str]:
    """Return the table of word-echo's scores on classifications by the length of its vectors."""
    lines = [
        "| times as long | " + " | ".join(f"{model}, {task}" for model in CAUSAL[:2] for task in LENGTH_TASKS) + " |"
    ]
    lines.append("|---" * (1 + 2 * len(LENGTH_TASKS)) + "|")
    for times in LENGTHS:
        cells = []
        for model in CAUSAL[:2]:
            for task, folder in LENGTH_TASKS.items():
                rows = pl.read_csv(FOLDER / "results" / folder / f"{model}-lengths.csv")
                name = f"word-echo, {times} times as long"
                cells.append(f"{rows.filter(variant=name, task=f'{task}Classification')['score'].item():.1f}")
        lines.append(f"| {times} | " + " | ".join(cells) + " |")
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
            "Mean of the main scores x 100 on six real tasks at full size (Banking77, Emotion, STSBenchmark, "
            "StackOverflow titles,",
            "TrecQA reranking, TwitterURLCorpus), every layer under every recipe, NVIDIA H200, float32. "
            "`python -m benchmarks.zoo.weights`",
            "fetches, converts and verifies the models, `python -m benchmarks.zoo.run` sweeps them, and `python -m "
            "benchmarks.zoo.table`",
            "writes this page from the files in `results`. `word-echo` was measured with two spans, before the first copy was added",
            "and vectors were scaled or centered.",
            "",
            "## Causal models",
            "",
            *causal_rows(),
            "",
            "Intervals of 95 % are over resampled examples, the same for both choices. SmolLM2-135M is the Instruct model "
            "in 4 bits,",
            "Gemma-3-270M the base model in 4 bits. TinyStories-15M knows only the words of stories for small children.",
            "",
            "## Other ways to read a causal model",
            "",
            f"At {DEPTH} of the depth (`python -m benchmarks.zoo.variants`; `results/*-variants.csv` has three other "
            "depths):",
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
            "Among the recipes and the layers from half of the depth on, a rule takes the pair with the highest "
            "alignment on 400",
            "texts of the task, or the highest sum of the ranks of alignment and uniformity (`python -m "
            "benchmarks.zoo.rules`). No rule",
            "reaches the fixed choice, so `select` does not use one.",
            "",
            *rule_rows(),
            "",
            "## Long documents",
            "",
            "Three tasks of texts of 300 to 600 words (`python -m benchmarks.zoo.long_documents`): the author of a passage "
            "from a novel",
            "(315 test texts of eight authors, from other novels than in training), passages of WikiText-2 by their article "
            "(546 passages),",
            "and the passage that follows another one (503 queries, 21 candidates). Gains over the best plain layer, with "
            "intervals of 95 %:",
            "",
            *long_rows(),
            "",
            "On long documents no recipe is significantly above the best plain layer. all-MiniLM-L6-v2 reads 256 tokens of a text and "
            "gte-small 512, the other two all of it.",
            "",
            "## The length of the vectors",
            "",
            "Two spans of length 1 add up to less than two; vectors of a plain layer have a length of 28 to 52 on these "
            "models. The logistic",
            "regression of mteb penalizes large weights, so short vectors are fitted less closely. Accuracy x 100 of the "
            "same vectors, made",
            "longer (`python -m benchmarks.zoo.variants --part lengths`):",
            "",
            *length_rows(),
            "",
            "## Embedding models",
            "",
            *embedding_rows(),
            "",
            "`word-echo` is refused for them: their tokens see later ones.",
            "",
            "m3e-small, a Chinese embedding model with 4 blocks whose license forbids commercial use, has an accuracy x 100 of",
            f"{chinese_words()}, on 600 Chinese reviews (`python -m",
            "benchmarks.zoo.chinese_reviews`). No causal model was measured on another language than English.",
            "",
        ]
    )


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page(), encoding="utf8")
