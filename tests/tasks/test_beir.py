"""Retrieval from your own files: BEIR's layout and pairs, scored like trec_eval, and invalid files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mteb
import pytest
import pytrec_eval

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks import TaskFileError, TfidfEncoder, resolve_tasks, tfidf_scores
from midlayer_encoders.tasks.own_data import own_data
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tables import Columns
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, SENTENCES, write

pytestmark = MTEB

CORPUS = [{"_id": f"d{n}", "title": f"title {n}" if n % 3 else "", "text": text} for n, text in enumerate(SENTENCES)]
QUERIES = [{"_id": f"q{n}", "text": " ".join(SENTENCES[n].split()[:5])} for n in range(14)]
QRELS = [(f"q{n}", f"d{d}", evaluate) for n in range(12) for d, evaluate in ((n, 2), (n + 20, 1), (n + 7, 0))]


def write_beir(
    folder: Path,
    corpus: Any = CORPUS,
    queries: Any = QUERIES,
    qrels: Any = QRELS,
    *,
    header: str = "query-id\tcorpus-id\tscore",
) -> Path:
    """Write a folder in BEIR's layout; 12 of 14 queries are judged."""
    write(folder / "corpus.jsonl", corpus)
    write(folder / "queries.jsonl", queries)
    (folder / "qrels").mkdir()
    lines = [header, *("\t".join(map(str, row)) for row in qrels)]
    (folder / "qrels/test.tsv").write_text("\n".join(line for line in lines if line) + "\n")
    return folder


def evaluate(task: Any, encoder: Any = None) -> float:
    result = mteb.evaluate(encoder or TfidfEncoder(task_texts(task)), task, cache=None, show_progress_bar=False)
    return float(result[0].get_score())


def test_beir_layout_scores_ndcg_of_titles_and_texts_like_trec_eval(tmp_path: Path) -> None:
    (task,) = resolve_tasks(write_beir(tmp_path / "mine"))
    encoder = TfidfEncoder(task_texts(task))
    queries = {query["_id"]: query["text"] for query in QUERIES[:12]}
    documents = {document["_id"]: f"{document['title']} {document['text']}".strip() for document in CORPUS}
    cosines = encoder.similarity(encoder.vectors(list(queries.values())), encoder.vectors(list(documents.values())))
    run = {query: dict(zip(documents, row.tolist(), strict=True)) for query, row in zip(queries, cosines, strict=True)}
    relevant: dict[str, dict[str, int]] = {}
    for query, document, value in QRELS:
        relevant.setdefault(query, {})[document] = value
    query_scores = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.10"}).evaluate(run)
    expected = sum(score["ndcg_cut_10"] for score in query_scores.values()) / len(query_scores)
    assert 0.3 < expected < 1
    assert evaluate(task, encoder) == pytest.approx(expected, abs=1e-4)
    assert (task.metadata.type, task.metadata.main_score) == ("Retrieval", "ndcg_at_10")
    assert list(task.dataset["default"]["test"]["queries"]["id"]) == list(queries)  # the judged ones


def test_task_sources_read_a_beir_folder_beside_a_table_of_other_columns(tmp_path: Path) -> None:
    rows = [{"Frage": sentence, "Rubrik": str(number % 2)} for number, sentence in enumerate(SENTENCES[:20])]
    paths = [write(tmp_path / "fragen.csv", rows), write_beir(tmp_path / "search")]
    names = Columns("Frage", "Rubrik")
    expected = [task_sources(path, columns)[0] for path, columns in zip(paths, (names, Columns()), strict=True)]
    assert task_sources(paths, names) == expected
    with pytest.raises(OptionError, match="apply only to tables of your own"):
        task_sources(paths[1], names)


def test_query_passage_rows_are_the_same_task_as_their_beir_folder(tmp_path: Path) -> None:
    rows = [*ROWS["Retrieval"], {"query": ROWS["Retrieval"][0]["query"], "positive": SENTENCES[40]}]
    data = own_data(write(tmp_path / "mine.jsonl", rows))
    texts = data.splits["corpus"]["text"]
    assert texts == sorted({*SENTENCES[:25], SENTENCES[40]})
    by_text = dict(zip(texts, data.splits["corpus"]["id"], strict=True))
    query_ids = dict(zip(data.splits["queries"]["text"], data.splits["queries"]["id"], strict=True))
    assert len(query_ids) == 24  # the last row adds a passage to the first query
    expected = {
        (query_ids[row["query"]], by_text[text])
        for row in rows
        for text in ([row["positive"]] if isinstance(row["positive"], str) else row["positive"])
    }
    judged = data.splits["qrels"]
    assert set(zip(judged["query-id"], judged["corpus-id"], strict=True)) == expected
    assert set(judged["score"]) == {1}
    corpus = [{"_id": name, "text": text} for text, name in by_text.items()]
    queries = [{"_id": name, "text": text} for text, name in query_ids.items()]
    folder = write_beir(tmp_path / "beir", corpus, queries, [(*pair, 1) for pair in sorted(expected)])
    (row_task,), (beir_task,) = resolve_tasks(tmp_path / "mine.jsonl"), resolve_tasks(folder)
    assert evaluate(row_task) == evaluate(beir_task)


def test_anchors_are_queries_and_negatives_give_a_reranking_task(tmp_path: Path) -> None:
    rows = [{"anchor": row["query"], "positive": row["positive"]} for row in ROWS["Retrieval"]]
    expected = own_data(write(tmp_path / "mine.jsonl", ROWS["Retrieval"])).splits
    assert own_data(write(tmp_path / "anchors.jsonl", rows)).splits == expected
    triples = [{**row, "negative": [SENTENCES[-1]]} for row in rows]
    assert own_data(write(tmp_path / "triples.jsonl", triples)).type == "Reranking"


def test_changed_judgment_gives_another_task(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "mine")
    before = task_sources(folder)[0].name
    path = folder / "qrels/test.tsv"
    path.write_text(path.read_text().replace("q3\td3\t2", "q3\td3\t1"))
    assert task_sources(folder)[0].name != before


def test_query_that_is_also_a_document_does_not_match_itself(tmp_path: Path) -> None:
    queries = [{"_id": row["_id"], "text": f"{row['title']} {row['text']}".strip()} for row in CORPUS[:12]]
    qrels = [(f"d{n}", f"d{n + 12}", 1) for n in range(12)]
    (task,) = resolve_tasks(write_beir(tmp_path / "mine", queries=queries, qrels=qrels))
    assert task.ignore_identical_ids
    task.load_data()
    score = evaluate(task)
    task.ignore_identical_ids = False
    assert evaluate(task) < score
    # If a query's own document is judged relevant, it counts: without it, the query would have no match.
    self_judged = [*qrels[1:], ("d0", "d0", 1)]
    (task,) = resolve_tasks(write_beir(tmp_path / "own", queries=queries, qrels=self_judged))
    assert not task.ignore_identical_ids
    # Ids that are numbers on both sides carry no information.
    numbers = {row["_id"]: n for n, row in enumerate(QUERIES)}
    (task,) = resolve_tasks(
        write_beir(
            tmp_path / "numbered",
            [{**row, "_id": n} for n, row in enumerate(CORPUS)],
            [{**row, "_id": n} for n, row in enumerate(QUERIES)],
            [(numbers[query], document[1:], value) for query, document, value in QRELS],
        )
    )
    assert not task.ignore_identical_ids


def replace_row(rows: list[dict[str, Any]], number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} if index == number else row for index, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"corpus": replace_row(CORPUS, 2, _id="d0")}, r"corpus.jsonl, line 3: `_id` must not repeat, but 'd0' is in line 1 too\. Correct or remove it"),
        ({"queries": replace_row(QUERIES, 1, _id=None)}, "queries.jsonl, line 2: `_id` must be an id, .* but got None"),
        ({"queries": replace_row(QUERIES, 1, text=" ")}, "queries.jsonl, line 2: `text` must be a string that is not empty"),
        ({"corpus": replace_row(CORPUS, 3, text="", title="")}, "corpus.jsonl, line 4: `text` must be a string that is not empty, unless `title` is"),
        ({"corpus": replace_row(CORPUS, 3, text=3)}, "corpus.jsonl, line 4: `text` must be a string, but got 3"),
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
def test_invalid_files_are_refused(tmp_path: Path, parts: Mapping[str, Any], message: str) -> None:
    with pytest.raises(TaskFileError, match=message):
        own_data(write_beir(tmp_path / "mine", **parts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "qrels/test.tsv").rename(f / "qrels/dev.tsv"), r"must hold .* qrels/test.tsv, .* but has no qrels/test\.\* \(qrels holds dev.tsv\)\. Add or rename"),
        (lambda f: (f / "qrels/test.tsv").unlink(), r"but has no qrels/test\.\* \(qrels holds no table\)"),
        (lambda f: (f / "queries.jsonl").unlink(), r"must hold corpus.jsonl, queries.jsonl and qrels/test.tsv, .* but has no queries\.\*"),
        (lambda f: [(f / "qrels/test.tsv").unlink(), (f / "qrels").rmdir()], "but has no qrels/"),
        (lambda f: (f / "corpus.csv").write_text("_id,text\nd0,x\n"), r"must hold one file of each name, but has corpus.csv and corpus.jsonl: remove all but one"),
        (lambda f: (f / "qrels/test.csv").write_text("query-id,corpus-id,score\nq0,d1,1\n"), r"qrels must hold one file of each name, but has test.csv and test.tsv"),
    ],
)  # fmt: skip
def test_missing_or_duplicate_files_are_refused(tmp_path: Path, change: Callable[[Path], Any], message: str) -> None:
    folder = write_beir(tmp_path / "mine")
    change(folder)
    with pytest.raises(TaskFileError, match=message):
        own_data(folder)


def test_title_and_text_of_a_document_are_one_text(tmp_path: Path) -> None:
    joined = [{"_id": row["_id"], "text": f"{row['title']} {row['text']}".strip()} for row in CORPUS]
    (titled,), (plain,) = resolve_tasks(write_beir(tmp_path / "a")), resolve_tasks(write_beir(tmp_path / "b", joined))
    assert task_texts(titled) == task_texts(plain)
    assert "title 1" not in task_texts(titled)
    assert tfidf_scores(titled) == tfidf_scores(plain)


def test_document_may_have_only_a_title_and_judgments_may_repeat(tmp_path: Path) -> None:
    corpus = replace_row(CORPUS, 4, text="", title="alone")
    folder = write_beir(tmp_path / "mine", corpus, qrels=[*QRELS, QRELS[0]])
    data = own_data(folder)
    assert len(data.splits["qrels"]["score"]) == len(QRELS)
    (task,) = resolve_tasks(folder)
    encoded_texts: list[str] = []

    class RecordingEncoder(TfidfEncoder):
        def encode(self, inputs: Any, **kwargs: Any) -> Any:
            batches = list(inputs)
            encoded_texts.extend(text for batch in batches for text in batch["text"])
            return super().encode(batches, **kwargs)

    evaluate(task, RecordingEncoder(task_texts(task)))
    assert "alone" in encoded_texts


def test_test_file_takes_precedence_over_beir_files(tmp_path: Path) -> None:
    folder = write_beir(tmp_path / "mine")
    write(folder / "test.jsonl", ROWS["STS"])
    assert own_data(folder).type == "STS"
    (folder / "test.jsonl").unlink()
    assert (own_data(folder).type, own_data(folder).label) == ("Retrieval", "mine")
    corpus_only = write(tmp_path / "alone/corpus.jsonl", [{"text": text} for text in SENTENCES]).parent
    assert own_data(corpus_only).type == "Unlabeled"
