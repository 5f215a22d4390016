"""Resolve names, paths, data and objects to descriptions from which every process can create the same tasks."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.errors import OptionError, did_you_mean, short_repr
from midlayer_encoders.files import exists, expand_home, shell_path
from midlayer_encoders.tasks import tables
from midlayer_encoders.tasks.docstrings import BUILTIN_SETS, BUILTIN_TASKS, builtin_data
from midlayer_encoders.tasks.own_data import beir_files, own_data, split_tables
from midlayer_encoders.tasks.tables import SUFFIXES, USUAL_NAMES, Columns, Table, TaskFileError, is_data
from midlayer_encoders.tasks.task_data import TaskData
from midlayer_encoders.validation import check_count, check_flag

if TYPE_CHECKING:
    from mteb.abstasks import AbsTask

_PAPER_FILE = Path(__file__).with_name("paper_tasks.json")
#: For each of the paper's tasks, its dataset in the paper's tables of metrics, ``None`` if they lack it.
REFERENCE_DATASETS: dict[str, str | None] = {
    name: dataset for tasks in json.loads(_PAPER_FILE.read_bytes()).values() for name, dataset in tasks.items()
}

#: The 32 tasks of Table 1 of "Layer by Layer" (arXiv:2502.02013), all of them in ``MTEB(eng, v1)``.
PAPER_TASKS: tuple[str, ...] = tuple(REFERENCE_DATASETS)

_log = logging.getLogger(__name__)

_MIN_LIMIT = 10  # rows below which scores have no interval
_NO_DATA = TaskData(type="Unlabeled", splits={})
_TEXT_COLUMNS = ("text", "sentences", "sentence1", "sentence2", "query", "positive", "negative")
_SPLITS = {"train", "test", "validation"}
_PAPER_BENCHMARK = "MTEB(eng, v1)"


@dataclass(frozen=True)
class MtebSource:
    """An mteb task with the subsets and splits that a benchmark uses."""

    name: str
    hf_subsets: tuple[str, ...]
    eval_splits: tuple[str, ...]

    @classmethod
    def of(cls, task: AbsTask) -> MtebSource:
        """Return the source of an mteb task."""
        return cls(task.metadata.name, tuple(task.hf_subsets), tuple(task.eval_splits))

    def make(self) -> AbsTask:
        """Return a new task."""
        with isolated_random():
            import mteb

            return mteb.get_task(self.name, hf_subsets=self.hf_subsets, eval_splits=self.eval_splits)


@dataclass(frozen=True)
class LocalSource:
    """A built-in task, or a task of your own data.

    Attributes:
        origin: file or folder, or ``None`` for a built-in task or data in memory.
        name: name of the task, which contains a digest of its rows.
        data: the rows.
        columns: how they were read.
    """

    origin: Path | None = field(compare=False)
    name: str
    data: TaskData = field(compare=False, repr=False, default=_NO_DATA)
    columns: Columns | None = field(compare=False, default=None)

    def make(self) -> AbsTask:
        """Return a new task."""
        with isolated_random():  # importing mteb seeds the global generators
            from midlayer_encoders.tasks.local_tasks import TASK_CLASSES

            return TASK_CLASSES[self.data.type](self.data)


@dataclass(frozen=True)
class TextsSource(LocalSource):
    """Texts without labels."""

    def make(self) -> AbsTask:
        """Raise an error, because texts without labels cannot be scored."""
        name, select, metrics = self.name, "select_layer(model, texts)", "measure(model, texts)"
        if self.origin is not None:
            name = shell_path(self.origin)
            select, metrics = (f"midlayer {command} MODEL --texts {name}" for command in ("select", "metrics"))
        raise TaskFileError(
            f"{name} holds texts without labels, which cannot be scored. `{select}` chooses a layer without labels, "
            f"`{metrics}` measures every layer."
        )

    def texts(self) -> list[str]:
        """Return the texts in their order."""
        return list(self.data.splits["test"]["text"])


@dataclass(frozen=True, eq=False)
class ObjectSource:
    """A task object from the caller."""

    task: AbsTask

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.metadata.name

    def make(self) -> AbsTask:
        """Return a copy that shares the data and restarts the task's random generators."""
        import numpy as np

        task = copy.copy(self.task)
        task.rng_state, task.np_rng = random.Random(task.seed), np.random.default_rng(task.seed)
        return task


@dataclass(frozen=True)
class SampledSource:
    """A task that is limited to a sample of its rows.

    Attributes:
        source: source of the whole task.
        limit: rows of each split.
        rows: by split, the rows that mteb reads of the sample and of the whole task, and the texts of a row; filled
            when the data is loaded in this process.
    """

    source: TaskSource
    limit: int
    rows: dict[str, tuple[int, int, int]] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def name(self) -> str:
        """Name of the task with the limit, so that no other sample shares its results."""
        return f"{self.source.name}[{self.limit}]"

    def make(self) -> AbsTask:
        """Return a new task whose data is the sample."""
        from midlayer_encoders.tasks.sampled_tasks import sampled_task

        return sampled_task(self.source.make(), self.name, self.limit, self.rows)


#: A picklable description of a task that creates the same task in any process.
#:
#: ``make`` returns a new task, because mteb's clustering tasks give a different score when they are evaluated again.
TaskSource: TypeAlias = MtebSource | LocalSource | TextsSource | ObjectSource | SampledSource


#: Tasks as :func:`resolve_tasks` accepts them.
Tasks: TypeAlias = Any


def resolve_tasks(
    names: Tasks, *, text_column: str | None = None, label_column: str | None = None, drop_empty: bool = False
) -> list[AbsTask]:
    """Return the tasks for ``names`` as new objects, without changing the global random generators.

    Args:
        names: one or several of: ``"paper"``; ``"builtin"``, or the label of a built-in task; the name of an mteb task
            or benchmark; a path to your own data; a task object; data in memory. Write a folder with the name of an
            mteb task as a path (``./STS12``). Data is a data frame of pandas or polars, a dataset, a dict of columns, a
            list of dicts or of pairs of a text and its label, a tuple of texts and labels; ``{"train": …, "test": …}``
            of these, or a dict of them by the name of their task.
        text_column: column of your own data that holds the texts, if it is not ``text``.
        label_column: column of your own data that holds the labels, if it is not ``label``.
        drop_empty: leave out rows of your own data that have an empty cell where a text or label is needed, and log how
            many they are. By default such rows raise an error.

    Raises:
        OptionError: for an unknown name.
        TaskFileError: for data that is not a valid task.
    """
    sources = task_sources(names, Columns(text_column, label_column, drop_empty))
    return [source.make() for source in sources]


def task_items(names: Tasks) -> list[Any]:
    """Return several tasks one by one, each as :func:`task_sources` accepts it."""
    if tables.is_dict_of_data(names) and not _SPLITS & names.keys():
        return [{name: data} for name, data in names.items()]
    is_single = is_data(names) or isinstance(names, str) or not isinstance(names, Sequence)
    return [names] if is_single else list(names)


def task_sources(names: Tasks, columns: Columns = USUAL_NAMES, *, must_apply: bool = True) -> list[TaskSource]:
    """Return the distinct sources of the tasks for ``names``, for use in other processes.

    Args:
        names: as in :func:`resolve_tasks`.
        columns: how to read your own data.
        must_apply: raise an error if none of the tasks is your own data, to which ``columns`` would apply.
    """
    check_flag("drop_empty", columns.drop_empty)
    sources: dict[str, TaskSource] = {}
    for source in (source for item in task_items(names) for source in _sources(item, columns)):
        if sources.setdefault(source.name, source) != source:
            raise OptionError(
                f"`tasks` must have different names, because results are stored by name, but two different ones are "
                f"called {source.name!r}."
            )
    if not sources:
        raise OptionError("`tasks` must name at least one task, but is empty.")
    applies = any(getattr(source, "columns", None) == columns for source in sources.values())
    if must_apply and any(columns) and not applies:
        names = "`text_column`, `label_column` and `drop_empty`"
        raise OptionError(f"{names} apply only to tables of your own.")
    return list(sources.values())


def limited_sources(sources: Sequence[TaskSource], limit: int | None) -> list[TaskSource]:
    """Return the sources limited to a sample of ``limit`` rows; all rows if it is ``None``. Texts stay as they are."""
    if limit is None:
        return list(sources)
    limit = check_count("limit", limit, minimum=_MIN_LIMIT)
    return [source if isinstance(source, TextsSource) else SampledSource(source, limit) for source in sources]


def _sources(name: Any, columns: Columns) -> Sequence[TaskSource]:
    if isinstance(name, get_args(TaskSource)):
        return [name]
    if is_data(name):
        is_named = tables.is_dict_of_data(name) and not _SPLITS & name.keys()
        label, rows = next(iter(name.items())) if is_named else ("data", name)
        return [_own_source(rows, columns, label)]
    if isinstance(name, str) and not name.strip():
        raise OptionError("`tasks` must be names or paths, but one of them is empty. Remove the extra comma.")
    if isinstance(name, Path) or (isinstance(name, str) and _is_path(name)):
        path = expand_home(name).absolute()
        if not exists(path):
            raise OptionError(
                f"`tasks` must be names or paths that exist, but there is no {short_repr(str(path), 200)}."
            )
        return [_own_source(path, columns if beir_files(path) is None else None)]
    if isinstance(name, str):
        labels = BUILTIN_TASKS if name in BUILTIN_SETS else [label for label in BUILTIN_TASKS if label == name]
        origins = [(label, name if name in BUILTIN_SETS else "builtin") for label in labels]
        sources = [LocalSource(None, data.name, data) for data in (builtin_data(*origin) for origin in origins)]
        return sources or _mteb_sources(name, columns)
    if not hasattr(name, "metadata"):
        raise OptionError(f"`tasks` must be names, paths, data or mteb's task objects, but got {short_repr(name)}.")
    source = ObjectSource(name)
    if not source.name.isprintable() or {"/", "\\"} & set(source.name):
        raise OptionError(
            f"`tasks` must have names that are names of files, but got {short_repr(source.name)}: rename the task."
        )
    return [source]


def _own_source(origin: Any, columns: Columns | None, name: str = "data") -> TaskSource:
    data = own_data(origin, columns or USUAL_NAMES, name)
    path = origin if isinstance(origin, Path) else None
    if data.note:
        _log.warning("%s: %s", path or data.label, data.note)
    source = TextsSource if data.type == "Unlabeled" else LocalSource
    return source(path, data.name, data, columns)


def _own_tables(path: Path, columns: Columns) -> list[Table]:
    """Return the tables in a file or folder; none for a folder in BEIR's layout."""
    files = {} if beir_files(path) else split_tables(path)
    return [tables.read_table(file, columns) for file in files.values()]


def own_texts(path: Path, columns: Columns = USUAL_NAMES) -> list[str]:
    """Return the texts of your own data, with or without labels, in order.

    A file with a text column gives the texts of all its rows; another task, each distinct text once.

    Args:
        path: a file or folder, as in :func:`task_sources`.
        columns: how to read a file.

    Raises:
        TaskFileError: for data that is neither a valid task nor texts.
    """
    path = path.absolute()
    own = _own_tables(path, columns)
    if own and all("text" in table.columns for table in own) and (columns.text_column or not path.is_dir()):
        return [text for table in own for text in table.complete("text").cells("text", tables.TEXT)]
    data = own_data(path, columns)
    if data.type == "Unlabeled":
        return list(data.splits["test"]["text"])
    columns_of_texts = [rows[name] for rows in data.splits.values() for name in _TEXT_COLUMNS if name in rows]
    cells = [cell for column in columns_of_texts for cell in column]
    texts = dict.fromkeys(text for cell in cells for text in ([cell] if isinstance(cell, str) else cell))
    return [text for text in texts if text.strip()]


def has_labels(path: Path, columns: Columns) -> bool:
    """Return whether a file, or a folder, is a table with a column label."""
    path = expand_home(path).absolute()
    is_table = path.is_dir() or path.suffix.lower() in SUFFIXES
    return is_table and any("label" in table.columns for table in _own_tables(path, columns))


def own_labels(path: Path, columns: Columns) -> list[str | None]:
    """Return the label of each text of a file, in the order of :func:`own_texts`; ``None`` for an empty cell."""
    labels: list[str | None] = []
    for table in _own_tables(expand_home(path).absolute(), columns):
        cells = table.complete("text").columns[table.column("label")]
        labels += [None if tables.is_empty(cell) else str(cell) for cell in cells]
    return labels


def _is_path(name: str) -> bool:
    """Return True if a name looks like a path: it has a separator, a known suffix, or a leading dot or tilde."""
    is_named_so = name.startswith(("~", ".")) or name.endswith((*SUFFIXES, ".txt"))
    return is_named_so or os.sep in name or (os.altsep or os.sep) in name


def _mteb_sources(name: str, columns: Columns) -> Sequence[TaskSource]:
    with isolated_random():
        import mteb

        from midlayer_encoders.tasks.mteb_internals import task_names

        tasks = task_names()
        if name in tasks:  # before benchmarks, which mteb makes for seconds
            return [MtebSource.of(mteb.get_task(name))]
        benchmark_name = _PAPER_BENCHMARK if name == "paper" else name
        benchmarks = {
            name_or_alias: benchmark
            for benchmark in mteb.get_benchmarks()
            for name_or_alias in (benchmark.name, *(benchmark.aliases or ()))
        }
        if benchmark_name in benchmarks:
            members = map(MtebSource.of, benchmarks[benchmark_name].tasks)
            return [source for source in members if name != "paper" or source.name in PAPER_TASKS]
    if exists(Path(name)):
        return _sources(Path(name), columns)
    choices = ("paper", *BUILTIN_SETS, *BUILTIN_TASKS, *benchmarks, *sorted(tasks))
    raise OptionError(
        f"`tasks` must be 'paper', 'builtin', the name of an mteb task or benchmark, or a path to your own data, "
        f"but got {short_repr(name)}.{did_you_mean(name, choices)}"
    )
