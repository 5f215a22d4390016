from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.tasks import (
    BUILTIN_TASKS,
    STS_GRADES,
    builtin_tasks,
    docstrings,
    task_label,
    task_sources,
    task_texts,
    tfidf_scores,
)
from midlayer_encoders.tasks.docstrings import SHELVES, _root, builtin_data, entries, versions
from tests.tasks.made import task_name

MARKUP = re.compile(r":\w+:`|`|\*\*|::|^\.\. |>>>|\[\d+\]_|</?\w+>|\]\(")
GIVEAWAYS = re.compile(
    r"\b(numpy|scipy|sklearn|scikit|torch|pytorch|transformers|hugging ?face|python|ndarray|tensors?|estimators?|cuda"
    r"|asyncio|urllib|trainer|user guide|deprecated)\b|\w_\w|(?-i:[a-z][A-Z])",
    re.IGNORECASE,
)


def test_builtin_has_one_task_of_each_type_over_a_pool_of_short_texts() -> None:
    tasks = builtin_tasks()
    assert [task.metadata.type for task in tasks] == list(BUILTIN_TASKS.values())
    pool = {text for task in tasks for text in task_texts(task)}
    assert 700 <= len(pool) <= 1000
    assert max(len(text.split()) for text in pool) <= 40
    assert sum(len(text.split()) for text in pool) / len(pool) < 16


@pytest.mark.slow
def test_builtin_is_all_five_tasks_and_a_label_is_one() -> None:
    sources = task_sources("builtin")
    assert [task_label(source.name) for source in sources] == list(BUILTIN_TASKS)
    assert task_sources("DocstringNearnessSTS") == sources[-1:]
    assert task_name(sources[0]) == sources[0].name


@pytest.mark.slow
def test_rows_are_the_same_in_any_process_even_without_docstrings() -> None:
    labels = "from midlayer_encoders.tasks.docstrings import BUILTIN_TASKS, builtin_data"
    code = f"{labels}; print(*(builtin_data(label).name for label in BUILTIN_TASKS))"
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    run = subprocess.run(
        [sys.executable, "-OO", "-c", code], capture_output=True, env=environment, check=True, text=True
    )
    assert run.stdout.split() == [builtin_data(label).name for label in BUILTIN_TASKS]


def test_revision_records_the_versions() -> None:
    for task in builtin_tasks():
        revision = task.metadata.dataset["revision"]
        assert all(f"{name}-{version}" in revision for name, version in versions().items())


def test_texts_of_an_object_are_in_one_split_of_the_classification() -> None:
    splits = builtin_data("DocstringLibraryClassification").splits
    sides = {text: split for split, rows in splits.items() for text in rows["text"]}
    for entry in entries():
        assert sides.get(entry.summary) == sides.get(entry.description)
    for rows in splits.values():
        assert len(set(Counter(rows["label"]).values())) == 1
        assert len(set(rows["label"])) == len(SHELVES)


def test_negative_descriptions_are_of_the_same_subject() -> None:
    subjects = {entry.description: (entry.library, entry.shelf) for entry in entries()}
    owners = {entry.summary: entry for entry in entries()}
    rows = builtin_data("DocstringDescriptionReranking").splits["test"]
    for query, positive, negative in zip(rows["query"], rows["positive"], rows["negative"], strict=True):
        assert positive == [owners[query].description]
        assert len(set(negative) - set(positive)) == 9
        assert {subjects[text] for text in negative} == {(owners[query].library, owners[query].shelf)}


def test_half_of_the_pairs_are_of_one_object() -> None:
    description_of = {entry.summary: entry.description for entry in entries()}
    rows = builtin_data("DocstringSameObjectPairs").splits["test"]
    pairs = zip(rows["sentence1"], rows["sentence2"], rows["labels"], strict=True)
    assert all((description_of[summary] == description) == label for summary, description, label in pairs)
    assert sum(rows["labels"]) * 2 == len(rows["labels"])


def test_grades_count_what_two_objects_share() -> None:
    summaries = {entry.summary: entry for entry in entries()}
    descriptions = {entry.description: entry for entry in entries()}
    rows = builtin_data("DocstringNearnessSTS").splits["test"]
    for summary, description, score in zip(rows["sentence1"], rows["sentence2"], rows["score"], strict=True):
        first, second = summaries[summary], descriptions[description]
        if score < 4:
            assert first != second
            assert (first.library == second.library) == (score >= 1)
            assert ((first.library, first.shelf) == (second.library, second.shelf)) == (score >= 2)
            assert ((first.library, first.module) == (second.library, second.module)) == (score >= 3)
        else:
            assert first == second
    assert min(Counter(rows["score"]).values()) > 300
    description = builtin_tasks()[-1].metadata.description
    assert all(f"{grade} = {meaning}" in description for grade, meaning in enumerate(STS_GRADES))


@pytest.mark.slow
def test_tfidf_is_neither_at_chance_nor_saturated() -> None:
    # Chance: one library of six; none; half of the pairs; the mean of 1 / rank among ten; none.
    chance = {"Classification": 1 / 6, "Clustering": 0.1, "PairClassification": 0.5, "Reranking": 0.293, "STS": 0.0}
    for task in builtin_tasks():
        assert chance[task.metadata.type] + 0.1 < tfidf_scores(task) < 0.8


def test_missing_sources_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docstrings, "entries", tuple)
    with pytest.raises(
        MidlayerError, match=r"need 10 in numpy \(core\), but found 0\. Install numpy with its \.py files"
    ):
        docstrings._pool.__wrapped__()
    with pytest.raises(MidlayerError, match="docstrings of no_such_library, which is not installed"):
        _root("no_such_library")


@pytest.mark.slow
def test_entries_are_plain_and_do_not_reveal_their_library() -> None:
    texts = [text for entry in entries() for text in (entry.summary, entry.description)]
    assert [text for text in texts if MARKUP.search(text)] == []
    assert [text for text in texts if GIVEAWAYS.search(text)] == []


def test_entries_are_distinct() -> None:
    texts = [re.sub(r"\W", "", text).lower() for entry in entries() for text in (entry.summary, entry.description)]
    assert len(set(texts)) == len(texts)
    assert len({(entry.library, entry.module, entry.name) for entry in entries()}) == len(entries())


def test_every_shelf_has_enough_entries() -> None:
    counts = {(library, shelf): 0 for library in SHELVES for shelf in SHELVES[library]}
    for entry in entries():
        counts[entry.library, entry.shelf] += 1
    assert min(counts.values()) >= 15
    assert set(versions()) == {*SHELVES, "python"} - {"stdlib"}
