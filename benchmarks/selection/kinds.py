"""How often is a language model called an embedding model, by how many texts of which kind?

    python -m benchmarks.selection.kinds measure NAME=FOLDER …    # built-in and built-in-minilm if none is named
    python -m benchmarks.selection.kinds table                    # writes its part of README.md

Each collection is read once, at most 300 texts of 64 tokens; draws of 16 to 100 of them are judged by half match: by its values alone,
as in 0.3, and on nearly all resampled texts, as now where a model's files say nothing. Writes ``results/kinds.csv``.
"""

from __future__ import annotations

import argparse
import json

import polars as pl
import torch

from benchmarks.selection.gate import HERE
from benchmarks.selection.real import DATA
from benchmarks.selection.run import write_part
from benchmarks.zoo.weights import open_model
from midlayer_encoders.metrics.label_accuracy import equal_steps
from midlayer_encoders.metrics.sample_metrics import LEAST_TOKENS, half_match_by_text
from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.selection.kind import detect_kind, is_embedding_model, judge_half_match, read_halves
from midlayer_encoders.tasks.docstrings import TEXTS
from midlayer_encoders.tasks.text_lists import wikitext_paragraphs

RESULT = HERE / "results" / "kinds.csv"
COUNTS = (16, 24, 32, 50, 100)
DRAWS = 20
POOL = 300
FILES = {
    "sentences (STSBenchmark)": ("tasks/STSBenchmark/test.jsonl", "sentence1"),
    "bank questions (Banking77)": ("tasks/Banking77Classification/test.jsonl", "text"),
    "first-person posts (Emotion)": ("tasks/EmotionClassification/test.jsonl", "text"),
    "post titles (StackOverflow)": ("tasks/StackOverflowTitlesClustering/test.jsonl", "sentences"),
    "headlines (TwitterURL)": ("tasks/TwitterURLCorpus/test.jsonl", "sentence1"),
    "reading questions (XQuAD)": ("tasks/XQuAD-en/queries.jsonl", "text"),
    "word problems (GSM8K)": ("corpora/gsm8k_test.jsonl", "question"),
}


def collections() -> dict[str, list[str]]:
    """Return the texts of each collection, evenly spaced."""
    found = {}
    for name, (file, key) in FILES.items():
        found[name] = [json.loads(line)[key] for line in (DATA / file).open(encoding="utf8")]
    found["docstrings"] = [entry[5] for entry in json.loads(TEXTS.read_text(encoding="utf8"))["entries"]]
    lines = (DATA / "corpora" / "wikitext2_raw_test.txt").read_text(encoding="utf8").splitlines()
    found["paragraphs (WikiText)"] = wikitext_paragraphs(lines, lambda line: len(line.split()))
    distinct = {name: list(dict.fromkeys(texts)) for name, texts in found.items()}
    return {name: [texts[place] for place in equal_steps(len(texts), POOL)] for name, texts in distinct.items()}


def measure(models: dict[str, str]) -> None:
    """Write how often each model is called an embedding model."""
    rows = [] if not RESULT.is_file() else pl.read_csv(RESULT).filter(~pl.col("model").is_in(list(models))).rows()
    for model, folder in models.items():
        source = open_model(folder, max_length=64, device="cpu", dtype="float32")
        kind = detect_kind(source)
        for collection, texts in collections().items():
            lengths = count_tokens(source, texts)
            texts = [text for text, length in zip(texts, lengths, strict=True) if length >= LEAST_TOKENS]
            halves = torch.stack(read_halves(source, texts))  # (L + 1, 2, N, D)
            for count in COUNTS:
                values, intervals = 0, 0
                for draw in range(DRAWS):
                    drawn = torch.randperm(len(texts), generator=torch.Generator().manual_seed(draw))[:count]
                    ranks = torch.stack([half_match_by_text(*layer.double()) for layer in halves[:, :, drawn]])
                    values += int(is_embedding_model(ranks.mean(dim=1)))
                    intervals += judge_half_match(ranks, seed=draw)[0]
                rows.append((model, kind.name, kind.evidence, collection, len(texts), count, DRAWS, values, intervals))
            print(model, collection, *rows[-1][-2:], flush=True)
        names = ["model", "kind", "evidence", "collection", "pool", "texts", "draws", "by_values", "by_interval"]
        pl.DataFrame(rows, schema=names, orient="row").write_csv(RESULT)


def table() -> list[str]:
    """Return a row for each model and number of texts: the share of draws, over all collections and in the worst."""
    lines = [
        "| model | by its files | texts | draws | by values (0.3) | worst collection | by interval | worst collection |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (model, kind, count), part in pl.read_csv(RESULT).group_by("model", "kind", "texts", maintain_order=True):
        cells = []
        for column in ("by_values", "by_interval"):
            worst = part.sort(column, descending=kind != "tuned", maintain_order=True).row(0, named=True)
            cells += [f"{part[column].sum()}", f"{worst[column]} of {worst['draws']}, {worst['collection']}"]
        lines.append(f"| {model} | {kind} | {count} | {part['draws'].sum()} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["measure", "table"])
    parser.add_argument("models", nargs="*", metavar="NAME=FOLDER")
    given = parser.parse_args()
    default = ["SmolLM2-135M-Instruct, 4 bits=built-in", "all-MiniLM-L6-v2=built-in-minilm"]
    if given.what == "measure":
        measure(dict(model.split("=", 1) for model in given.models or default))
    else:
        write_part("kinds", table())


if __name__ == "__main__":
    main()
