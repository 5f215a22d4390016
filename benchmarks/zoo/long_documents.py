"""Write tasks of long texts from two corpora and from XQuAD.

    python -m benchmarks.zoo.long_documents CORPORA runs/long        # fiction_en.txt.xz and wikitext2_raw_test.txt
    python -m benchmarks.zoo.long_documents CORPORA runs/more --others TASKS    # with XQuAD-en, XQuAD-de
    python -m benchmarks.zoo.run runs/long --models … --max-length 2048 --out benchmarks/zoo/results/long

- ``AuthorClassification``: who wrote a passage of a novel; the novels of test are not those of train.
- ``ArticleClustering``: passages of WikiText-2 by their article.
- ``NextPassageReranking``: the passage that follows another one, among others of the same article and of its neighbors.

These are texts of 300 to 600 words. ``--others`` writes, instead of them:

- ``LongAuthorClassification``: as above, passages of 1,300 to 1,600 words, about 2,000 tokens.
- ``XQuADLong-en``, ``XQuADLong-de``: three consecutive passages of an article joined, and their questions.
- ``XQuADCross-de-en``: German questions, English passages.
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

WORDS = 300, 600
LONG_WORDS = 1300, 1600
CANDIDATES = 20
JOINED = 3
BOOK_CHARACTERS = 100_000
"""Of a novel's beginning: some novels lack the two lines that would show where they begin, and follow another one."""
AUTHORS = (
    "Jane Austen", "Charlotte Brontë", "Wilkie Collins", "Charles Dickens", "Earl of Beaconsfield Benjamin Disraeli",
    "George Eliot", "Elizabeth Cleghorn Gaskell", "Thomas Hardy",
)  # fmt: skip
_BOOK = re.compile(rf"\n\n[^\n]{{3,80}}\n({'|'.join(AUTHORS)})\n\n\n\n")
_ARTICLE = re.compile(r"^ = ([^=].*?) = $", re.MULTILINE)


def passages(paragraphs: list[str], words: tuple[int, int] = WORDS) -> Iterator[str]:
    """Yield consecutive paragraphs joined to passages of a minimum to a maximum of words; longer ones are left out."""
    kept: list[str] = []
    for paragraph in paragraphs:
        kept.append(paragraph.strip())
        count = len(" ".join(kept).split())
        if count >= words[0]:
            if count <= words[1]:
                yield " ".join(kept)
            kept = []


def books(text: str, words: tuple[int, int] = WORDS) -> dict[str, list[list[str]]]:
    """Return the passages of each novel by author."""
    found: dict[str, list[list[str]]] = {author: [] for author in AUTHORS}
    for match in _BOOK.finditer(text):
        body = text[match.end() : match.end() + BOOK_CHARACTERS]
        found[match[1]].append(list(passages(re.split(r"\n\s*\n", body), words))[:40])
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


def write_author_task(path: Path, novels: dict[str, list[list[str]]]) -> None:
    """Write the classification of passages by author: the first novel of each is the test, the second trains."""
    for split, novel in (("train", 1), ("test", 0)):
        rows = [
            {"text": text, "label": author}
            for author, found in novels.items()
            if found[novel:]
            for text in found[novel]
        ]
        write(path / f"{split}.jsonl", rows)


def read_xquad(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, str]]:
    """Return the passages, the questions, and the passage of each question."""
    corpus, queries = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf8").splitlines()]
        for name in ("corpus", "queries")
    )
    lines = (folder / "qrels/test.tsv").read_text(encoding="utf8").splitlines()[1:]
    return corpus, queries, {line.split("\t")[0]: line.split("\t")[1] for line in lines}


def write_retrieval_task(
    path: Path, corpus: list[dict[str, Any]], queries: list[dict[str, Any]], relevant: dict[str, str]
) -> None:
    write(path / "corpus.jsonl", corpus)
    write(path / "queries.jsonl", queries)
    qrels = path / "qrels/test.tsv"
    qrels.parent.mkdir(exist_ok=True)
    lines = [f"{query}\t{document}\t1\n" for query, document in relevant.items()]
    qrels.write_text("".join(["query-id\tcorpus-id\tscore\n", *lines]), encoding="utf8")


def write_xquad_tasks(tasks: Path, out: Path) -> None:
    """Write retrieval of joined passages, and of English passages by German questions."""
    for language in ("en", "de"):
        corpus, queries, relevant = read_xquad(tasks / f"XQuAD-{language}")
        joined, document_of = [], {}
        for article, found in itertools.groupby(corpus, key=lambda row: row["article"]):
            for number, group in enumerate(itertools.zip_longest(*[iter(found)] * JOINED)):
                rows = [row for row in group if row is not None]
                name = f"{article}-{number}"
                joined.append({"_id": name, "text": " ".join(row["text"] for row in rows)})
                document_of |= {row["_id"]: name for row in rows}
        found_in = {query: document_of[document] for query, document in relevant.items()}
        write_retrieval_task(out / f"XQuADLong-{language}", joined, queries, found_in)
    corpus, _, relevant = read_xquad(tasks / "XQuAD-en")
    _, queries, _ = read_xquad(tasks / "XQuAD-de")
    write_retrieval_task(out / "XQuADCross-de-en", corpus, queries, relevant)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--others", type=Path, metavar="TASKS", help="folder with XQuAD-en and XQuAD-de")
    arguments = parser.parse_args()
    with lzma.open(arguments.corpora / "fiction_en.txt.xz", "rt", encoding="utf8") as file:
        fiction = file.read()
    if arguments.others is not None:
        write_author_task(arguments.out / "LongAuthorClassification", books(fiction, LONG_WORDS))
        write_xquad_tasks(arguments.others, arguments.out)
        return
    write_author_task(arguments.out / "AuthorClassification", books(fiction))
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
