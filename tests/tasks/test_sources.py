import pickle
import random
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from midlayer_encoders.errors import OptionError
from midlayer_encoders.tasks import PAPER_TASKS, resolve_tasks, task_label, tfidf_scores
from midlayer_encoders.tasks.sources import _is_path, task_sources
from tests.tasks.made import task_name
from tests.tasks.rows import ROWS, write


def test_import_of_tasks_imports_neither_mteb_nor_torch() -> None:
    code = "import sys, midlayer_encoders.tasks; sys.exit('mteb' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.long
def test_paper_tasks_are_the_32_of_table_1() -> None:
    tasks = resolve_tasks("paper")
    assert sorted(task.metadata.name for task in tasks) == sorted(PAPER_TASKS)
    counts = {"Classification": 10, "Clustering": 6, "PairClassification": 3, "Reranking": 4, "STS": 9}
    assert {kind: sum(task.metadata.type == kind for task in tasks) for kind in counts} == counts
    assert len(tasks) == sum(counts.values()) == 32
    assert all(list(task.eval_splits) == ["test"] for task in tasks)
    assert {subset for task in tasks for subset in task.hf_subsets} == {"default", "en", "en-en"}


def test_paper_tasks_match_the_reference_results(shared_data: Path) -> None:
    import lzma

    import polars as pl

    with lzma.open(shared_data.parent / "reference" / "mteb_layer_scores.csv.xz") as file:
        reference = dict(pl.read_csv(file.read()).select("task", "task_type").unique().rows())
    del reference["ArXivHierarchicalClusteringP2P"]  # in the results, not in the paper's table
    assert {task.metadata.name: task.metadata.type for task in resolve_tasks("paper")} == reference


def test_tasks_are_fresh_objects() -> None:
    for first, second in zip(resolve_tasks(["STS12", "paper"]), resolve_tasks(["STS12", "paper"]), strict=True):
        assert first is not second
        assert first.metadata.name == second.metadata.name


def test_benchmark_by_name_and_by_alias() -> None:
    assert [task.metadata.name for task in resolve_tasks("MTEB(eng, v2)")] == [
        task.metadata.name for task in resolve_tasks(["MTEB(eng)"])
    ]


def test_repeated_task_name_gives_one_task() -> None:
    assert len(task_sources(["STS12", "STS12", "paper"])) == 32


def test_different_tasks_of_the_same_name_are_refused() -> None:
    with pytest.raises(OptionError, match="different ones are called 'STS17'"):
        task_sources(["paper", "STS17"])  # all languages, and English only


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sts12", "Did you mean 'STS12'"),
        ("BankingClassification", "Did you mean 'Banking77Classification'"),
        ("MTEB(eng, v11)", r"Did you mean 'MTEB\(eng, v1\)'"),
        ("papers", "Did you mean 'paper'"),
        ("built-in", "Did you mean 'builtin'"),
        ("xyzzyplugh", r"but got 'xyzzyplugh'\.$"),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(name: str, hint: str) -> None:
    with pytest.raises(OptionError, match=f"`tasks` must be .*{hint}"):
        task_sources(name)


def test_empty_list_and_missing_paths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="at least one task"):
        task_sources([])
    with pytest.raises(OptionError, match="must be names, paths, data or mteb's task objects, but got 5"):
        task_sources([5])
    for missing in (tmp_path / "none.csv", str(tmp_path / "none"), "./none", "none.csv", "~/none-of-this"):
        with pytest.raises(OptionError, match=r"paths that exist, but there is no .*none"):
            task_sources(missing)


def test_bare_name_is_an_mteb_task_before_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("STS12", "mine"):
        write(tmp_path / folder / "test.jsonl", ROWS["STS"])
    monkeypatch.chdir(tmp_path)
    names = [source.name for source in task_sources(["STS12", "./STS12", "mine", Path("mine")])]
    assert [task_label(name) for name in names] == ["STS12", "STS12", "mine"]
    assert names[0] == "STS12"


@pytest.mark.parametrize("name", ["../../outside", "a/b", "a\\b", "two\nlines"])
def test_task_object_whose_name_is_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    """Its scores would be written outside the folder of the sweep."""
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", ROWS["STS"]))
    task.metadata = task.metadata.model_copy(update={"name": name})
    with pytest.raises(OptionError, match=r"`tasks` must have names that are names of files, but got .*: rename"):
        resolve_tasks(task)


def test_no_mteb_name_looks_like_a_path() -> None:
    import mteb
    from mteb.get_tasks import TASK_LIST

    names = [task.metadata.name for task in TASK_LIST] + [benchmark.name for benchmark in mteb.get_benchmarks()]
    assert not any(map(_is_path, names))


def test_generators_are_unchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["Clustering"])
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    task = resolve_tasks(["paper", path, *resolve_tasks("STS12")][1:])[0]
    tfidf_scores(task)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


def test_task_object_is_copied_with_its_data_and_seed(tmp_path: Path) -> None:
    (task,) = resolve_tasks(write(tmp_path / "mine.jsonl", ROWS["Clustering"]))
    task.load_data()
    (source,) = task_sources(task)
    copies = [source.make() for _ in range(2)]
    assert all(copy is not task and copy.dataset is task.dataset for copy in copies)
    # One clustering object evaluated twice gives two scores; copies give one.
    assert len({tfidf_scores(copy) for copy in copies} | {tfidf_scores(task), tfidf_scores(task)}) == 1


@pytest.mark.slow
def test_sources_build_their_tasks_in_other_processes(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", ROWS["STS"])
    sources = task_sources([path, "STS12", resolve_tasks("STS13")[0]])
    assert [source.name for source in pickle.loads(pickle.dumps(sources))] == [source.name for source in sources]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert [pool.submit(task_name, source).result() for source in sources] == [source.name for source in sources]
