"""Samples of tasks: in proportion, the same everywhere, one inside the other, and never changing the data they are of."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from mteb import abstasks
from mteb.abstasks.task_metadata import TaskMetadata

from midlayer_encoders._types import content_digest
from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks.sampled_tasks import sample_order, training_order
from midlayer_encoders.tasks.sources import ObjectSource, SampledSource, limited_sources, task_sources
from midlayer_encoders.tasks.tfidf import task_texts
from tests.scoring.made import retrieval
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, write

pytestmark = MTEB


def loaded(source: Any, limit: int) -> Any:
    """Return the task limited to a sample, with its data."""
    return source_task(SampledSource(source, limit))


def source_task(source: SampledSource) -> Any:
    """Return the sampled task with its data; the rows are counted in the source."""
    task = source.make()
    if not task.data_loaded:
        task.load_data()
    return task


@pytest.fixture(params=sorted(ROWS))
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return task_sources(write(tmp_path / "rows.jsonl", ROWS[request.param]))[0]


def test_every_beginning_of_the_order_has_each_stratum_in_proportion_to_within_a_row() -> None:
    strata = random.Random(0).choices("abcdefghij", weights=[40, 20, 10, 8, 6, 5, 4, 3, 2, 2], k=500)
    order = sample_order(strata)
    assert sorted(order) == list(range(500))
    for size in (10, 50, 100, 250):
        counts = Counter(strata[row] for row in order[:size])
        for stratum, total in Counter(strata).items():
            assert abs(counts[stratum] - size * total / 500) < 2, (size, stratum)


def test_every_sample_has_several_strata() -> None:
    for strata, expected in ((["a"] * 298 + ["b"] * 2, 2), (["a"] * 240 + [str(n // 2) for n in range(60)], 3)):
        assert len({strata[row] for row in sample_order(strata)[:10]}) >= expected


def test_strata_of_one_row_are_sampled_like_the_others() -> None:
    strata = ["common"] * 500 + [f"rare {number}" for number in range(500)]
    sampled = [strata[row] for row in sample_order(strata)[:200]]
    assert 80 <= sum(stratum != "common" for stratum in sampled) <= 120


def test_the_sample_is_the_same_everywhere() -> None:
    order = sample_order([str(row % 7) for row in range(1000)])
    assert content_digest(" ".join(map(str, order))) == "d7d983ad6292"


def test_training_rows_have_enough_of_every_label() -> None:
    labels = [["a"]] * 90 + [["b"]] * 6 + [["c"], ["c", "d"]] * 2
    order, fewest = training_order(labels, 4)
    counts = Counter(label for row in order[:fewest] for label in labels[row])
    assert counts == {"a": 4, "b": 4, "c": 4, "d": 2}
    assert sorted(order) == list(range(100))


def test_a_sample_has_the_rows_of_a_smaller_one(source: Any) -> None:
    small, large = (set(task_texts(loaded(source, limit))) for limit in (10, 16))
    assert small < large < set(task_texts(source.make()))


def test_a_limit_above_the_rows_keeps_all_in_order(source: Any) -> None:
    assert task_texts(loaded(source, 1000)) == task_texts(source.make())


def test_the_rows_are_counted(source: Any) -> None:
    sampled = SampledSource(source, 12)
    assert not sampled.rows
    task = sampled.make()
    task.load_data()
    if task.metadata.type in ("Reranking", "Retrieval"):
        assert sampled.rows["queries"][0] == 12 == len(task.dataset["default"]["test"]["queries"])
        assert sampled.rows["documents"][0] == len(task.dataset["default"]["test"]["corpus"])
    else:
        assert {split: counts[0] for split, counts in sampled.rows.items()} == {
            split: len(rows) for split, rows in task.dataset.items()
        }
        assert sampled.rows["test"][0] == 12
        assert sampled.rows["test"][2] == (2 if "sentence1" in task.dataset["test"].column_names else 1)


def test_only_the_rows_that_mteb_trains_on_count(tmp_path: Path) -> None:
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(1000)]
    for split in ("train", "test"):
        write(tmp_path / "task" / f"{split}.jsonl", rows if split == "train" else rows[:100])
    sampled = SampledSource(task_sources(tmp_path / "task")[0], 20)
    task: Any = sampled.make()
    task.load_data()
    most = task.n_experiments * task.samples_per_label * 2
    assert most < 1000
    assert sampled.rows == {"train": (20, most, 1), "test": (20, 100, 1)}


@pytest.mark.parametrize(("kind", "column"), [("STS", "score"), ("PairClassification", "labels")])
def test_pairs_are_in_proportion_to_their_grades(kind: str, column: str, tmp_path: Path) -> None:
    (source,) = task_sources(write(tmp_path / "rows.jsonl", ROWS[kind]))
    counts = Counter(loaded(source, 24).dataset["test"][column])
    assert all(abs(counts[value] - total / 2) <= 1 for value, total in Counter(r[column] for r in ROWS[kind]).items())


def test_a_search_keeps_relevant_documents_and_some_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from midlayer_encoders.tasks import sampled_tasks

    monkeypatch.setattr(sampled_tasks, "DOCUMENTS_PER_QUERY", 1)
    (source,) = task_sources(write(tmp_path / "rows.jsonl", ROWS["Retrieval"]))
    whole = source.make()
    whole.load_data()
    before, after = whole.dataset["default"]["test"], loaded(source, 10).dataset["default"]["test"]
    ids = set(after["corpus"]["id"])
    assert len(after["queries"]) == 10 == len(after["relevant_docs"])
    assert set(after["queries"]["id"]) == set(after["relevant_docs"])
    for query, documents in after["relevant_docs"].items():
        assert documents == before["relevant_docs"][query]
        assert set(documents) <= ids
    relevant = {document for documents in after["relevant_docs"].values() for document in documents}
    assert len(relevant) < len(ids) <= len(relevant) + 10 < len(before["corpus"])


@pytest.mark.parametrize("with_candidates", [False, True])
def test_a_search_keeps_no_document_that_is_judged_irrelevant(
    with_candidates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midlayer_encoders.tasks.sampled_tasks.DOCUMENTS_PER_QUERY", 0)  # no others
    task: Any = retrieval(ranked=with_candidates)
    task.load_data()
    before = task.dataset["default"]["test"]
    judged, candidates = before["relevant_docs"], before["top_ranked"] or {}
    source = SampledSource(ObjectSource(task), 4)
    after = source_task(source).dataset["default"]["test"]
    queries = after["queries"]["id"][:]
    expected = {document for query in queries for document, grade in judged[query].items() if grade > 0}
    expected |= {document for query in queries for document in candidates.get(query, ())}
    expected &= set(before["corpus"]["id"][:])
    assert len(queries) == 4
    assert set(after["corpus"]["id"][:]) == expected
    if not with_candidates:
        irrelevant = {document for query in queries for document, grade in judged[query].items() if grade == 0}
        assert irrelevant - expected, "the rule matters"
    assert after["relevant_docs"] == {
        query: {document: grade for document, grade in judged[query].items() if document in expected}
        for query in queries
    }
    assert source.rows["documents"][0] == len(expected)
    assert source.rows["queries"] == (4, sum(map(bool, judged.values())), 1)


def made(base: type, dataset: Any, **settings: Any) -> Any:
    """Return a source of an mteb task with data in memory."""
    metadata = TaskMetadata(
        name="Made", description="", type=settings.pop("type", "Clustering"), category="t2c", eval_splits=["test"],
        eval_langs=settings.pop("langs", ["eng-Latn"]), main_score="v_measure",
        dataset={"path": "made/made", "revision": "1"},
    )  # fmt: skip
    task_class: Any = type("Made", (base,), {"metadata": metadata, "dataset": dataset, "data_loaded": True, **settings})
    task_class.__abstractmethods__ = frozenset()
    return ObjectSource(task_class())


def test_data_that_is_loaded_does_not_change() -> None:
    data = DatasetDict(test=Dataset.from_dict({"sentences": [f"t{n}" for n in range(50)], "labels": [0, 1] * 25}))
    source = made(abstasks.AbsTaskClustering, data, max_fraction_of_documents_to_embed=None)
    task = SampledSource(source, 10).make()
    assert len(task.dataset["test"]) == 10
    assert task.metadata.name == "Made[10]"
    assert len(source.task.dataset["test"]) == 50
    assert source.task.metadata.name == "Made"


@pytest.mark.parametrize(("share", "limit", "rows"), [(0.4, 10, 10), (0.4, 30, 20), (None, 30, 30)])
def test_mteb_embeds_the_whole_sample_of_a_clustering(share: float | None, limit: int, rows: int) -> None:
    data = DatasetDict(test=Dataset.from_dict({"sentences": [f"t{n}" for n in range(50)], "labels": [0, 1] * 25}))
    sampled = SampledSource(made(abstasks.AbsTaskClustering, data, max_fraction_of_documents_to_embed=share), limit)
    task: Any = sampled.make()
    assert len(task.dataset["test"]) == rows
    assert task.max_fraction_of_documents_to_embed is None
    assert sampled.rows["test"][:2] == (rows, 50 if share is None else 20)


def test_sets_of_a_clustering_keep_some_of_their_texts_each() -> None:
    sets = {"sentences": [[f"s{s} {n}" for n in range(40)] for s in range(3)], "labels": [[0, 1, 2, 3] * 10] * 3}
    source = made(abstasks.AbsTaskClusteringLegacy, DatasetDict(test=Dataset.from_dict(sets)))
    task = loaded(source, 24)
    for sentences, labels, number in zip(*task.dataset["test"].to_dict().values(), range(3), strict=True):
        assert abs(len(sentences) - 8) <= 2
        assert all(labels[k] == int(text.split()[1]) % 4 for k, text in enumerate(sentences))
        assert all(text.startswith(f"s{number}") for text in sentences)


def test_rows_with_several_labels_are_sampled_by_all_of_them() -> None:
    table = Dataset.from_dict({"text": [f"t{n}" for n in range(80)], "label": [["a"], ["a", "b"], ["b"], ["c"]] * 20})
    source = made(abstasks.AbsTaskMultilabelClassification, DatasetDict(train=table, test=table), samples_per_label=2)
    task = loaded(source, 12)
    counts = Counter(" ".join(labels) for labels in task.dataset["test"]["label"])
    assert counts.keys() == {"a", "a b", "b", "c"}
    assert set(counts.values()) <= {2, 3, 4}
    assert len(task.dataset["train"]) == 12


def test_pairs_in_one_row_are_sampled() -> None:
    row = {"sentence1": [[f"a{n}" for n in range(40)]], "sentence2": [[f"b{n}" for n in range(40)]]}
    data = DatasetDict(test=Dataset.from_dict({**row, "labels": [[0, 1] * 20]}))
    table = loaded(made(abstasks.AbsTaskPairClassification, data, type="PairClassification"), 20).dataset["test"]
    assert len(table) == 20
    assert sum(table["labels"]) == 10
    assert all(a[1:] == b[1:] for a, b in zip(table["sentence1"], table["sentence2"], strict=True))


def test_every_subset_is_sampled_and_unused_splits_are_not() -> None:
    tables = {"test": Dataset.from_dict({"sentences": [f"t{n}" for n in range(50)], "labels": [0, 1] * 25})}
    tables["dev"] = tables["test"]
    data = {language: DatasetDict(tables) for language in ("en", "de")}
    languages = {"en": ["eng-Latn"], "de": ["deu-Latn"]}
    sampled = SampledSource(made(abstasks.AbsTaskClusteringLegacy, data, langs=languages), 10)
    task = sampled.make()
    sizes = {(name, split): len(rows) for name, part in task.dataset.items() for split, rows in part.items()}
    assert sizes == {("en", "test"): 10, ("en", "dev"): 50, ("de", "test"): 10, ("de", "dev"): 50}
    assert sampled.rows == {"en test": (10, 50, 1), "de test": (10, 50, 1)}


def test_a_task_that_cannot_be_sampled_is_refused() -> None:
    source = made(abstasks.AbsTaskRetrieval, {}, type="InstructionReranking")
    with pytest.raises(OptionError, match=r"`limit` does not apply to Made: tasks of the type InstructionReranking"):
        SampledSource(source, 10).make()


@pytest.mark.parametrize("limit", [0, -1, 9, 2.5, True, "many"])
def test_wrong_limits_are_refused(limit: Any, tmp_path: Path) -> None:
    sources = task_sources(write(tmp_path / "rows.jsonl", ROWS["STS"]))
    with pytest.raises(OptionError, match="`limit` must be a whole number, 10 or more"):
        limited_sources(sources, limit)
