"""Tasks to score encoders on: the paper's 32 mteb tasks, all other mteb tasks, your own files, and five built-in tasks.

Importing this package is fast: functions that need mteb import it, which takes seconds.
"""

from midlayer_encoders.tasks.docstrings import BUILTIN_TASKS, STS_GRADES
from midlayer_encoders.tasks.sources import PAPER_TASKS, resolve_tasks
from midlayer_encoders.tasks.tables import TaskFileError
from midlayer_encoders.tasks.task_data import task_label
from midlayer_encoders.tasks.tfidf import TfidfEncoder, tfidf_scores

__all__ = [
    "BUILTIN_TASKS",
    "PAPER_TASKS",
    "STS_GRADES",
    "TaskFileError",
    "TfidfEncoder",
    "resolve_tasks",
    "task_label",
    "tfidf_scores",
]
