"""What `tasks/mteb_internals.py` takes for granted of mteb: each test fails when a release changes it."""

from __future__ import annotations

from typing import Any

import mteb
import pytest
from mteb.abstasks import AbsTaskClassification
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.types import PromptType

from midlayer_encoders.tasks import PAPER_TASKS, mteb_internals
from tests.tasks.rows import ROWS, write


def test_every_task_that_mteb_makes_by_its_name_is_known() -> None:
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
def test_the_columns_of_a_task_are_those_that_hold_its_texts(name: str, columns: set[str]) -> None:
    assert mteb_internals.content_columns(mteb.get_task(name)) >= columns
    assert not mteb_internals.content_columns(mteb.get_task(name)) & {"label", "labels", "score"}


@pytest.mark.parametrize("kind", [None, PromptType.query, PromptType.document])
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
def test_the_prompt_is_that_of_mteb_s_own_wrapper(prompts: dict[str, str], kind: PromptType | None) -> None:
    task = mteb.get_task("STS12").metadata
    wrapper: Any = SentenceTransformerEncoderWrapper.__new__(SentenceTransformerEncoderWrapper)
    wrapper.model_prompts = prompts
    assert mteb_internals.prompt_name(prompts, task, kind) == wrapper.get_prompt_name(task, kind)


def test_a_prompt_for_the_type_of_task_and_input_comes_before_one_for_the_input_alone() -> None:
    task = mteb.get_task("STS12").metadata
    prompts = {"STS-query": "compare: ", "query": "find: "}
    assert mteb_internals.prompt_name(prompts, task, PromptType.query) == "STS-query"
    assert mteb_internals.prompt_name(prompts, task, None) is None


def test_lists_of_labels_leave_mteb_s_scores_as_they_are(tmp_path) -> None:
    from midlayer_encoders.tasks import TfidfEncoder, resolve_tasks, task_texts

    (local,) = resolve_tasks(write(tmp_path / "Classification.jsonl", ROWS["Classification"]))
    local.load_data()

    class Plain(AbsTaskClassification):
        metadata = local.metadata

    def plain() -> Any:
        task = Plain()
        task.dataset, task.data_loaded = local.dataset, True
        return task

    def scores(task: Any) -> Any:
        return mteb.evaluate(TfidfEncoder(task_texts(task)), task, cache=None, show_progress_bar=False)[0].scores

    listed = mteb_internals.with_listed_labels(plain())
    assert type(listed).__name__ == "Plain"
    assert scores(listed) == scores(local) == scores(plain())


def test_mteb_asks_for_its_labels_where_they_are_listed(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two private methods are those that an evaluation calls, once for each experiment."""
    from midlayer_encoders.tasks import resolve_tasks, tfidf_scores

    calls: list[str] = []
    for name in ("_undersample_data", "_calculate_scores"):
        theirs = getattr(AbsTaskClassification, name)

        def counted(*args: Any, _name: str = name, _theirs: Any = theirs, **kwargs: Any) -> Any:
            calls.append(f"{_name} {type(args[1]).__name__}")
            return _theirs(*args, **kwargs)

        monkeypatch.setattr(AbsTaskClassification, name, counted)
    (task,) = resolve_tasks(write(tmp_path / "Classification.jsonl", ROWS["Classification"]))
    tfidf_scores(task)
    assert sorted(set(calls)) == ["_calculate_scores ndarray", "_undersample_data _Listed"]
    assert len(calls) == 2 * task.n_experiments
