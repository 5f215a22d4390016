"""Tasks to score encoders on: the paper's 32 mteb tasks, all other mteb tasks, your own files, and five built-in tasks.

Importing this package is fast: functions that need mteb import it, which takes seconds.
"""

from midlayer_encoders._isolation import isolated_random
from midlayer_encoders.tasks.baselines import (
    BM25_PACKAGES,
    Bm25Search,
    TextEncoder,
    TfidfEncoder,
    encoder_score,
    has_bm25,
    source_texts,
    task_texts,
    tfidf_scores,
)
from midlayer_encoders.tasks.docstrings import BUILTIN_TASKS, STS_GRADES
from midlayer_encoders.tasks.sampled_source import SampledSource, whole_source
from midlayer_encoders.tasks.samples import whole_name
from midlayer_encoders.tasks.sources import (
    PAPER_TASKS,
    TaskSource,
    TextsSource,
    builtin_tasks,
    limited_sources,
    own_texts,
    paper_tasks,
    resolve_tasks,
    task_sources,
)
from midlayer_encoders.tasks.table_files import SUFFIXES, TaskFileError
from midlayer_encoders.tasks.task_data import TASK_TYPES, TaskType, task_label

__all__ = [
    "BM25_PACKAGES",
    "BUILTIN_TASKS",
    "PAPER_TASKS",
    "STS_GRADES",
    "SUFFIXES",
    "TASK_TYPES",
    "Bm25Search",
    "SampledSource",
    "TaskFileError",
    "TaskSource",
    "TaskType",
    "TextEncoder",
    "TextsSource",
    "TfidfEncoder",
    "builtin_tasks",
    "encoder_score",
    "has_bm25",
    "isolated_random",
    "limited_sources",
    "own_texts",
    "paper_tasks",
    "resolve_tasks",
    "source_texts",
    "task_label",
    "task_sources",
    "task_texts",
    "tfidf_scores",
    "whole_name",
    "whole_source",
]
