"""Retrieval out of your own files: BEIR's layout and pairs, scored as trec_eval does, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mteb
import pytest
import pytrec_eval

from midlayer_encoders.tasks import TaskFileError, TfidfEncoder, resolve_tasks, task_sources, task_texts, tfidf_scores
from midlayer_encoders.tasks.file_tasks import files_data
from tests.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB

CORPUS = [{"_id": f"d{n}", "title": f"title {n}" if n % 3 else "", "text": text} for n, text in enumerate(SENTENCES)]
QUERIES = [{"_id": f"q{n}", "text": " ".join(SENTENCES[n].split()[:5])} for n in range(14)]
QRELS = [(f"q{n}", f"d{d}", score) for n in range(12) for d, score in ((n, 2), (n + 20, 1), (n + 7, 0))]


def beir(
    folder: Path,
    corpus: Any = CORPUS,
    queries: Any = QUERIES,
    qrels: Any = QRELS,
    *,
    header: str = "query-id\tcorpus-id\tscore",
) -> Path:
    """Write a folder in BEIR's layout; of 14 queries 12 are judged."""
    write(folder / "corpus.jsonl", corpus)
    write(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    lines = [header, *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels/test.tsv").write_text("\n".join(line for line in lines if line) + "\n")
    return folder


def score(task: Any, encoder: Any = None) -> float:
    result = mteb.evaluate(encoder or TfidfEncoder(task_texts(task)), task, cache=None, show_progress_bar=False)
    return float(result[0].get_score())


def test_beir_s_layout_scores_ndcg_of_titles_and_texts_as_trec_eval_does(tmp_path: Path) -> None:
    (task,) = resolve_tasks(beir(tmp_path / "mine"))
    encoder = TfidfEncoder(task_texts(task))
    queries = {query["_id"]: query["text"] for query in QUERIES[:12]}
    documents = {one["_id"]: f"{one['title']} {one['text']}".strip() for one in CORPUS}
    cosines = encoder.similarity(encoder.vectors(list(queries.values())), encoder.vectors(list(documents.values())))
    run = {query: dict(zip(documents, row.tolist(), strict=True)) for query, row in zip(queries, cosines, strict=True)}
    relevant: dict[str, dict[str, int]] = {}
    for query, document, value in QRELS:
        relevant.setdefault(query, {})[document] = value
    each = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(run)
    expected = sum(one["ndcg_cut_10"] for one in each.values()) / len(each)
    assert 0.3 < expected < 1
    assert score(task, encoder) == pytest.approx(expected, abs=1e-4)
    assert (task.metadata.type, task.metadata.main_score) == ("Retrieval", "ndcg_at_10")
    assert list(task.dataset["default"]["test"]["queries"]["id"]) == list(queries)  # those that are judged


def test_rows_of_queries_and_passages_are_the_same_task_as_the_folder_of_them(tmp_path: Path) -> None:
    rows = [*ROWS["Retrieval"], {"query": ROWS["Retrieval"][0]["query"], "positive": SENTENCES[40]}]
    data = files_data(write(tmp_path / "mine.jsonl", rows))
    texts = data.splits["corpus"]["text"]
    assert texts == sorted({*SENTENCES[:25], SENTENCES[40]})
    by_text = dict(zip(texts, data.splits["corpus"]["id"], strict=True))
    asked = dict(zip(data.splits["queries"]["text"], data.splits["queries"]["id"], strict=True))
    assert len(asked) == 24  # the last row is one more passage of the first query
    expected = {
        (asked[row["query"]], by_text[text])
        for row in rows
        for text in ([row["positive"]] if isinstance(row["positive"], str) else row["positive"])
    }
    judged = data.splits["qrels"]
    assert set(zip(judged["query-id"], judged["corpus-id"], strict=True)) == expected
    assert set(judged["score"]) == {1}
    corpus = [{"_id": name, "text": text} for text, name in by_text.items()]
    queries = [{"_id": name, "text": text} for text, name in asked.items()]
    folder = beir(tmp_path / "beir", corpus, queries, [(*pair, 1) for pair in sorted(expected)])
    (one,), (other,) = resolve_tasks(tmp_path / "mine.jsonl"), resolve_tasks(folder)
    assert score(one) == score(other)


def test_anchors_are_queries_and_negatives_make_it_a_reranking(tmp_path: Path) -> None:
    rows = [{"anchor": row["query"], "positive": row["positive"]} for row in ROWS["Retrieval"]]
    same = files_data(write(tmp_path / "mine.jsonl", ROWS["Retrieval"])).splits
    assert files_data(write(tmp_path / "anchors.jsonl", rows)).splits == same
    triples = [{**row, "negative": [SENTENCES[-1]]} for row in rows]
    assert files_data(write(tmp_path / "triples.jsonl", triples)).type == "Reranking"


def test_a_changed_judgment_is_another_task(tmp_path: Path) -> None:
    folder = beir(tmp_path / "mine")
    before = task_sources(folder)[0].name
    path = folder / "qrels/test.tsv"
    path.write_text(path.read_text().replace("q3\td3\t2", "q3\td3\t1"))
    assert task_sources(folder)[0].name != before


def test_a_query_that_is_a_document_under_its_own_id_does_not_find_itself(tmp_path: Path) -> None:
    queries = [{"_id": one["_id"], "text": f"{one['title']} {one['text']}".strip()} for one in CORPUS[:12]]
    qrels = [(f"d{n}", f"d{n + 12}", 1) for n in range(12)]
    (task,) = resolve_tasks(beir(tmp_path / "mine", queries=queries, qrels=qrels))
    assert task.ignore_identical_ids
    task.load_data()
    found = score(task)
    task.ignore_identical_ids = False
    assert score(task) < found
    # Where a query's own document is judged relevant, it is to be found: without it the query could find nothing.
    own = [*qrels[1:], ("d0", "d0", 1)]
    (task,) = resolve_tasks(beir(tmp_path / "own", queries=queries, qrels=own))
    assert not task.ignore_identical_ids
    # Ids that both sides count from 1 say nothing.
    numbers = {one["_id"]: n for n, one in enumerate(QUERIES)}
    (task,) = resolve_tasks(
        beir(
            tmp_path / "numbered",
            [{**one, "_id": n} for n, one in enumerate(CORPUS)],
            [{**one, "_id": n} for n, one in enumerate(QUERIES)],
            [(numbers[query], document[1:], value) for query, document, value in QRELS],
        )
    )
    assert not task.ignore_identical_ids


def replaced(rows: list[dict[str, Any]], number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} if place == number else row for place, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"corpus": replaced(CORPUS, 2, _id="d0")}, r"corpus.jsonl, line 3: `_id` must not repeat, but 'd0' is in line 1 too\. Correct or remove it"),
        ({"queries": replaced(QUERIES, 1, _id=None)}, "queries.jsonl, line 2: `_id` must be an id, .* but got None"),
        ({"queries": replaced(QUERIES, 1, text=" ")}, "queries.jsonl, line 2: `text` must be a string that is not empty"),
        ({"corpus": replaced(CORPUS, 3, text="", title="")}, "corpus.jsonl, line 4: `text` must be a string that is not empty, unless `title` is"),
        ({"corpus": replaced(CORPUS, 3, text=3)}, "corpus.jsonl, line 4: `text` must be a string, but got 3"),
        ({"corpus": [{"name": "d0", "text": "x"}]}, "corpus.jsonl must have the column _id or id, but has name, text"),
        ({"corpus": CORPUS[:1], "qrels": [("q0", "d0", 1)]}, "must have two passages or more, but has one"),
        ({"qrels": [("q0", "d0", 1), ("q99", "d1", 1)]}, "test.tsv, line 3: `query-id` must be an id of queries.jsonl, but there is no 'q99'"),
        ({"qrels": [("q0", "d0", 1), ("q1", "d99", 1)]}, "test.tsv, line 3: `corpus-id` must be an id of corpus.jsonl, but there is no 'd99'"),
        ({"qrels": [("q0", "d0", 0)]}, "test.tsv, line 2: every query must have a document whose `score` is 1 or more, but 'q0' has none"),
        ({"qrels": [("q0", "d0", 1), ("q1", "d0", 0)]}, "test.tsv, line 3: every query must have .* 'q1' has none"),
        ({"qrels": [("q0", "d0", 0.5)]}, "test.tsv, line 2: `score` must be a whole number, 1 or more .* but got 0.5"),
        ({"qrels": [("q0", "d0", 1), ("q0", "d1", 10**30)]}, "test.tsv, line 3: `score` must be a whole number, .* 1000000 at most, but got 1e[+]30"),
        ({"qrels": [("q0", "d0", 1), ("q0", "d1", -(10**20))]}, "test.tsv, line 3: `score` must be .* 1000000 at most, but got -1e[+]20"),
        ({"qrels": [("q0", "d0", 1), ("q0", "d0", 2)]}, "line 3: the same query and document have another score above"),
        ({"header": ""}, r"test.tsv must have the column query-id, but has q0, d0, 2\. Its first line must name the columns"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(tmp_path: Path, parts: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        files_data(beir(tmp_path / "mine", **parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "qrels/test.tsv").rename(f / "qrels/dev.tsv"), r"qrels must hold test.tsv, .* but holds dev.tsv\. Rename the one to score on to test"),
        (lambda f: (f / "qrels/test.tsv").unlink(), r"qrels must hold test.tsv, .* but holds no such file\. Add it"),
        (lambda f: (f / "queries.jsonl").unlink(), r"must hold corpus.jsonl, queries.jsonl and qrels/test.tsv, .* but has no queries\.\*"),
        (lambda f: [(f / "qrels/test.tsv").unlink(), (f / "qrels").rmdir()], "but has no qrels/"),
        (lambda f: (f / "corpus.csv").write_text("_id,text\nd0,x\n"), r"must hold one file of each name, but has corpus.csv and corpus.jsonl: remove all but one"),
        (lambda f: (f / "qrels/test.csv").write_text("query-id,corpus-id,score\nq0,d1,1\n"), r"qrels must hold one file of each name, but has test.csv and test.tsv"),
    ],
)  # fmt: skip
def test_a_file_that_is_not_there_or_there_twice_is_named(
    tmp_path: Path, change: Callable[[Path], Any], message: str
) -> None:
    folder = beir(tmp_path / "mine")
    change(folder)
    with pytest.raises(TaskFileError, match=message):
        files_data(folder)


def test_words_of_a_document_are_counted_in_its_title_and_text_as_one(tmp_path: Path) -> None:
    joined = [{"_id": one["_id"], "text": f"{one['title']} {one['text']}".strip()} for one in CORPUS]
    (titled,), (plain,) = resolve_tasks(beir(tmp_path / "a")), resolve_tasks(beir(tmp_path / "b", joined))
    assert task_texts(titled) == task_texts(plain)
    assert "title 1" not in task_texts(titled)
    assert tfidf_scores(titled) == tfidf_scores(plain)


def test_a_document_may_have_a_title_alone_and_a_judgment_may_be_there_twice(tmp_path: Path) -> None:
    corpus = replaced(CORPUS, 4, text="", title="alone")
    folder = beir(tmp_path / "mine", corpus, qrels=[*QRELS, QRELS[0]])
    data = files_data(folder)
    assert len(data.splits["qrels"]["score"]) == len(QRELS)
    (task,) = resolve_tasks(folder)
    seen: list[str] = []

    class Seeing(TfidfEncoder):
        def encode(self, inputs: Any, **kwargs: Any) -> Any:
            batches = list(inputs)
            seen.extend(text for batch in batches for text in batch["text"])
            return super().encode(batches, **kwargs)

    score(task, Seeing(task_texts(task)))
    assert "alone" in seen


def test_a_test_file_goes_before_other_files_and_task_json_before_both(tmp_path: Path) -> None:
    folder = beir(tmp_path / "mine")
    write(folder / "test.jsonl", ROWS["STS"])
    assert files_data(folder).type == "STS"
    (folder / "test.jsonl").unlink()
    (folder / "task.json").write_text(json.dumps({"type": "Retrieval", "name": "my search"}))
    assert (files_data(folder).type, files_data(folder).label) == ("Retrieval", "my_search")
    alone = write(tmp_path / "alone/corpus.jsonl", [{"text": text} for text in SENTENCES]).parent
    assert files_data(alone).type == "Unlabeled"
