"""Small realistic data of each type, and writers of the three formats."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

Rows = Sequence[Mapping[str, Any]]

_SUBJECTS = ["river", "engine", "poem", "market"]
_WORDS = [
    "sleep",
    "turn",
    "grow",
    "break",
    "sing",
    "wait",
    "stone",
    "cloud",
    "flame",
    "paper",
    "glass",
    "north",
    "under",
    "never",
    "slow",
    "deep",
    "bright",
    "old",
]
_random = random.Random(0)
# Twelve sentences about each subject, of different lengths, so that no cosines tie.
SENTENCES = [
    " ".join([_SUBJECTS[number // 12], *_random.choices(_WORDS, k=_random.randint(6, 14))]) for number in range(48)
]

ROWS: dict[str, list[dict[str, Any]]] = {
    "Classification": [{"text": text, "label": _SUBJECTS[number // 12]} for number, text in enumerate(SENTENCES)],
    "Clustering": [{"sentences": text, "labels": number // 12} for number, text in enumerate(SENTENCES)],
    "PairClassification": [
        {"sentence1": SENTENCES[n], "sentence2": SENTENCES[(n * 7 + 1) % 48], "labels": int(n % 3 == 0)}
        for n in range(48)
    ],
    "Reranking": [
        {
            "query": SENTENCES[n],
            "positive": [SENTENCES[(n + 1) % 48]],
            "negative": [SENTENCES[(n + 6 * k) % 48] for k in range(1, 6)],
        }
        for n in range(20)
    ],
    "Retrieval": [
        {"query": f"about {SENTENCES[n]}", "positive": [SENTENCES[n], SENTENCES[(n + 1) % 48]][: 1 + n % 2]}
        for n in range(24)
    ],
    "STS": [
        {"sentence1": SENTENCES[n], "sentence2": SENTENCES[(n * 5 + 2) % 48], "score": float(n % 6)} for n in range(48)
    ],
}


def write(path: Path, rows: Rows) -> Path:
    """Write ``rows`` in the format of the suffix, with lists as JSON in CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".csv":
        cells = [{k: json.dumps(v) if isinstance(v, list) else v for k, v in row.items()} for row in rows]
        pl.DataFrame(cells).write_csv(path)
    else:
        pl.DataFrame(list(rows)).write_parquet(path)
    return path
