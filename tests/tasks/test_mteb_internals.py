"""Assumptions of `tasks/mteb_internals.py` about mteb: each test fails when a release changes one."""

from typing import Any

import datasets
import mteb
import pytest
from mteb import _create_dataloaders
from mteb._create_dataloaders import create_dataloader
from mteb.abstasks import AbsTaskClassification
from mteb.models import SentenceTransformerEncoderWrapper
from mteb.types import PromptType

from midlayer_encoders.tasks import PAPER_TASKS, mteb_internals
from tests.tasks.rows import ROWS, write


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


@pytest.mark.long
def test_listed_labels_do_not_change_mteb_scores(tmp_path) -> None:
    from midlayer_encoders.tasks import TfidfEncoder, resolve_tasks
    from midlayer_encoders.tasks.tfidf import task_texts

    (local,) = resolve_tasks(write(tmp_path / "Classification.jsonl", ROWS["Classification"]))
    local.load_data()

    class Plain(AbsTaskClassification):
        metadata = local.metadata

    def make_plain_task() -> Any:
        task = Plain()
        task.dataset, task.data_loaded = local.dataset, True
        return task

    def evaluate(task: Any) -> Any:
        return mteb.evaluate(TfidfEncoder(task_texts(task)), task, cache=None, show_progress_bar=False)[0].scores

    listed = mteb_internals.with_lists(make_plain_task())
    assert type(listed).__name__ == "Plain"
    assert evaluate(listed) == evaluate(local) == evaluate(make_plain_task())


def test_mteb_reads_labels_through_the_listed_methods(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation calls the two private methods once for each experiment."""
    from midlayer_encoders.tasks import resolve_tasks, tfidf_scores

    calls: list[str] = []
    for name in ("_undersample_data", "_calculate_scores"):
        original_method = getattr(AbsTaskClassification, name)

        def counted(*args: Any, _name: str = name, _theirs: Any = original_method, **kwargs: Any) -> Any:
            calls.append(f"{_name} {type(args[1]).__name__}")
            return _theirs(*args, **kwargs)

        monkeypatch.setattr(AbsTaskClassification, name, counted)
    (task,) = resolve_tasks(write(tmp_path / "Classification.jsonl", ROWS["Classification"]))
    tfidf_scores(task)
    assert sorted(set(calls)) == ["_calculate_scores ndarray", "_undersample_data _Listed"]
    assert len(calls) == 2 * task.n_experiments


def test_texts_are_decoded_at_once_and_batches_do_not_change(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"sentence1": [f"text {number}" for number in range(70)]})
    task = mteb.get_task("STS12")

    def batches() -> list[Any]:
        return list(create_dataloader(rows, task_metadata=task.metadata, input_column="sentence1"))

    lazily = _create_dataloaders._create_dataloader_from_texts
    expected = batches()
    reads: list[Any] = []
    read = datasets.arrow_dataset.Column.__getitem__
    monkeypatch.setattr(
        datasets.arrow_dataset.Column, "__getitem__", lambda column, key: (reads.append(key), read(column, key))[1]
    )
    with mteb_internals.listed_texts():
        with pytest.raises(ZeroDivisionError), mteb_internals.listed_texts():
            raise ZeroDivisionError
        assert batches() == expected
    assert reads == [slice(None)]
    assert _create_dataloaders._create_dataloader_from_texts is lazily, "as mteb's own evaluations find it"
