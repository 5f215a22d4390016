"""Write three tasks of long texts, 300 to 600 words each, from two corpora.

    python -m benchmarks.zoo.long_documents CORPORA runs/long        # fiction_en.txt.xz and wikitext2_raw_test.txt
    python -m benchmarks.zoo.run runs/long --models … --max-length 2048 --out benchmarks/zoo/results/long

- ``AuthorClassification``: who wrote a passage of a novel; the novels of test are not those of train.
- ``ArticleClustering``: passages of WikiText-2 by their article.
- ``NextPassageReranking``: the passage that follows another one, among others of the same article and of its neighbors.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LEAST, MOST = 300, 600
CANDIDATES = 20
BOOK_CHARACTERS = 100_000
"""Of a novel's beginning: some novels lack the two lines that would show where they begin, and follow another one."""
AUTHORS = (
    "Jane Austen", "Charlotte Brontë", "Wilkie Collins", "Charles Dickens", "Earl of Beaconsfield Benjamin Disraeli",
    "George Eliot", "Elizabeth Cleghorn Gaskell", "Thomas Hardy",
)  # fmt: skip
_BOOK = re.compile(rf"\n\n[^\n]{{3,80}}\n({'|'.join(AUTHORS)})\n\n\n\n")
_ARTICLE = re.compile(r"^ = ([^=].*?) = $", re.MULTILINE)


def passages(paragraphs: list[str]) -> Iterator[str]:
    """Yield consecutive paragraphs joined to passages of ``LEAST`` to ``MOST`` words; longer ones are left out."""
    kept: list[str] = []
    for paragraph in paragraphs:
        kept.append(paragraph.strip())
        count = len(" ".join(kept).split())
        if count >= LEAST:
            if count <= MOST:
                yield " ".join(kept)
            kept = []


def books(text: str) -> dict[str, list[list[str]]]:
    """Return the passages of each novel by author."""
    found: dict[str, list[list[str]]] = {author: [] for author in AUTHORS}
    for match in _BOOK.finditer(text):
        body = text[match.end() : match.end() + BOOK_CHARACTERS]
        found[match[1]].append(list(passages(re.split(r"\n\s*\n", body)))[:40])
    return found


def articles(text: str) -> dict[str, list[str]]:
    """Return the passages of each article that has at least four."""
    pieces = _ARTICLE.split(text)[1:]
    found = {
        title: list(passages([line for line in body.splitlines() if line.strip() and not line.startswith(" =")]))
        for title, body in zip(pieces[::2], pieces[1::2], strict=True)
    }
    return {title: texts for title, texts in found.items() if len(texts) >= 4}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    with lzma.open(arguments.corpora / "fiction_en.txt.xz", "rt", encoding="utf8") as file:
        novels = books(file.read())
    for split, chosen in (("train", slice(1, 2)), ("test", slice(0, 1))):
        rows = [
            {"text": text, "label": author}
            for author, found in novels.items()
            for novel in found[chosen]
            for text in novel
        ]
        write(arguments.out / "AuthorClassification" / f"{split}.jsonl", rows)
    found = articles((arguments.corpora / "wikitext2_raw_test.txt").read_text(encoding="utf8"))
    places = [(title, text) for title, texts in found.items() for text in texts]
    clusters = [{"sentences": text, "labels": title} for title, text in places]
    write(arguments.out / "ArticleClustering" / "test.jsonl", clusters)
    rows = []
    for place, ((title, query), (next_title, following)) in enumerate(itertools.pairwise(places)):
        if title == next_title:
            near = sorted(range(len(places)), key=lambda other: abs(other - place - 1))
            negative = [places[other][1] for other in near if other not in (place, place + 1)][:CANDIDATES]
            rows.append({"query": query, "positive": [following], "negative": negative})
    write(arguments.out / "NextPassageReranking" / "test.jsonl", rows)


if __name__ == "__main__":
    main()
