import re
from collections import Counter

import pytest

from midlayer_encoders.tasks import BUILTIN_TASKS, STS_GRADES, resolve_tasks, task_label, tfidf_scores
from midlayer_encoders.tasks.docstrings import builtin_data, entries
from midlayer_encoders.tasks.sources import task_sources
from midlayer_encoders.tasks.tfidf import task_texts
from tests.tasks.made import task_name

MARKUP = re.compile(r":\w+:`|`|\*\*|::|^\.\. |>>>|\[\d+\]_|</?\w+>|\]\(")
GIVEAWAYS = re.compile(
    r"\b(numpy|scipy|sklearn|scikit|torch|pytorch|transformers|hugging ?face|python|ndarray|tensors?|estimators?|cuda"
    r"|asyncio|urllib|trainer|user guide|deprecated)\b|\w_\w|(?-i:[a-z][A-Z])",
    re.IGNORECASE,
)


def test_builtin_has_one_task_of_each_type_over_a_pool_of_short_texts() -> None:
    tasks = resolve_tasks("builtin")
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


def test_rows_are_the_same_on_every_machine() -> None:
    digests = [builtin_data(label).digest for label in BUILTIN_TASKS]
    assert digests == ["e966a03a", "e1410afe", "50d76e57", "c08351e9", "6eab5fec"]


def test_texts_of_an_object_are_in_one_split_of_the_classification() -> None:
    splits = builtin_data("DocstringLibraryClassification").splits
    sides = {text: split for split, rows in splits.items() for text in rows["text"]}
    for entry in entries():
        assert sides.get(entry.summary) == sides.get(entry.description)
    for rows in splits.values():
        assert len(set(Counter(rows["label"]).values())) == 1
        assert len(set(rows["label"])) == 6


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
    description = resolve_tasks("builtin")[-1].metadata.description
    assert all(f"{grade} = {meaning}" in description for grade, meaning in enumerate(STS_GRADES))


@pytest.mark.slow
def test_tfidf_is_neither_at_chance_nor_saturated() -> None:
    # Chance: one library of six; none; half of the pairs; the mean of 1 / rank among ten; none.
    chance = {"Classification": 1 / 6, "Clustering": 0.1, "PairClassification": 0.5, "Reranking": 0.293, "STS": 0.0}
    for task in resolve_tasks("builtin"):
        assert chance[task.metadata.type] + 0.1 < tfidf_scores(task) < 0.8


def test_entries_are_plain_and_do_not_reveal_their_library() -> None:
    texts = [text for entry in entries() for text in (entry.summary, entry.description)]
    assert [text for text in texts if MARKUP.search(text)] == []
    assert [text for text in texts if GIVEAWAYS.search(text)] == []


def test_entries_are_distinct() -> None:
    texts = [re.sub(r"\W", "", text).lower() for entry in entries() for text in (entry.summary, entry.description)]
    assert len(set(texts)) == len(texts)
    assert len({(entry.library, entry.module, entry.name) for entry in entries()}) == len(entries())


def test_every_shelf_has_enough_entries() -> None:
    counts = Counter((entry.library, entry.shelf) for entry in entries())
    assert len(counts) == 24
    assert min(counts.values()) >= 20
