"""Assumptions of `tasks/mteb_internals.py` about mteb: each test fails when a release changes one."""

from pathlib import Path
from typing import Any

import datasets
import mteb
import pytest
from datasets.arrow_dataset import Column
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.types import PromptType

from midlayer_encoders.tasks import PAPER_TASKS, TfidfEncoder, mteb_internals, resolve_tasks
from midlayer_encoders.tasks.tfidf import task_texts
from tests.support.others_warnings import MTEB
from tests.tasks.rows import ROWS, write

pytestmark = MTEB


def test_task_names_include_every_mteb_task() -> None:
    names = mteb_internals.task_names()
    assert names.issuperset(PAPER_TASKS)
    assert mteb.get_task("STS12").metadata.name in names
    assert "NoSuchTask" not in names


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("STS12", {"sentence1", "sentence2"}),
        ("Banking77Classification", {"text"}),
        ("TwitterURLCorpus", {"sentence1", "sentence2"}),
        ("ArxivClusteringS2S", {"sentences"}),
        ("SciDocsRR", {"text"}),
    ],
)
def test_content_columns_hold_the_texts_of_a_task(name: str, columns: set[str]) -> None:
    assert mteb_internals.content_columns(mteb.get_task(name)) >= columns
    assert not mteb_internals.content_columns(mteb.get_task(name)) & {"label", "labels", "score"}


@pytest.mark.parametrize("prompt_type", [None, PromptType.query, PromptType.document])
@pytest.mark.parametrize(
    "prompts",
    [
        {"query": "find: ", "document": "a text: "},
        {"STS": "compare: ", "query": "find: "},
        {"STS12": "grade: ", "STS12-query": "grade this: "},
        {"STS-document": "with: "},
        {},
    ],
)
def test_prompt_name_matches_mteb_wrapper(prompts: dict[str, str], prompt_type: PromptType | None) -> None:
    task = mteb.get_task("STS12").metadata
    wrapper: Any = SentenceTransformerEncoderWrapper.__new__(SentenceTransformerEncoderWrapper)
    wrapper.model_prompts = prompts
    assert mteb_internals.prompt_name(prompts, task, prompt_type) == wrapper.get_prompt_name(task, prompt_type)


def test_prompt_for_task_type_and_input_takes_precedence() -> None:
    task = mteb.get_task("STS12").metadata
    prompts = {"STS-query": "compare: ", "query": "find: "}
    assert mteb_internals.prompt_name(prompts, task, PromptType.query) == "STS-query"
    assert mteb_internals.prompt_name(prompts, task, None) is None


@pytest.mark.parametrize("task_type", ["Classification", "Clustering", "Retrieval"])
def test_columns_are_decoded_at_once_and_scores_do_not_change(
    task_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate() -> Any:
        (task,) = resolve_tasks(path)
        return mteb.evaluate(TfidfEncoder(task_texts(task)), task, cache=None, show_progress_bar=False)[0].scores

    path = write(tmp_path / "mine.jsonl", ROWS[task_type])
    expected = evaluate()
    reads: list[Any] = []
    read = Column.__getitem__
    monkeypatch.setattr(Column, "__getitem__", lambda column, key: (reads.append(key), read(column, key))[1])
    with mteb_internals.listed_columns():
        actual = evaluate()
    assert actual == expected
    assert set(map(str, reads)) == {str(slice(None))}


def test_columns_are_lazy_after_the_last_evaluation() -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "image": [{"bytes": b""}, {"bytes": b""}]})
    rows = rows.cast_column("image", datasets.Image())
    with mteb_internals.listed_columns():
        with pytest.raises(ZeroDivisionError), mteb_internals.listed_columns():
            raise ZeroDivisionError
        assert rows["text"] == ["a", "b"]
        assert isinstance(rows["image"], Column), "images are decoded one by one"
    assert isinstance(rows["text"], Column), "as the user's own evaluations find it"
