"""mteb's result files, each whole or not there: mteb itself writes them in place, and fails for ever on half of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mteb.cache import ResultCache

from midlayer_encoders.files import explain_full_disk, make_folder, read_artifact, scratch, write_file

if TYPE_CHECKING:
    from mteb.models.model_meta import ModelMeta
    from mteb.results import TaskResult

__all__ = ["ResultFiles"]


class ResultFiles(ResultCache):
    """mteb's cache of results in a folder. A file that cannot be read is set aside, and its task evaluated again."""

    def __init__(self, cache_path: Path) -> None:
        make_folder(cache_path)  # a full disk ends the sweep: task by task, the texts would meet in other batches
        super().__init__(cache_path)

    def load_task_result(self, task_name: str, model_name: str | ModelMeta, *args: Any, **more: Any) -> Any:
        """Return the result in a file, or ``None`` where there is none that can be read."""
        load = super().load_task_result
        path = self.get_task_result_path(task_name, model_name)
        return read_artifact(path, lambda _: load(task_name, model_name, *args, **more))

    def save_to_cache(self, task_result: TaskResult, model_name: str | ModelMeta, *args: Any, **more: Any) -> None:
        """Write the result, the model's metadata and the settings of the run as mteb does, but beside their places."""
        path = self.get_task_result_path(task_result.task_name, model_name, *args)
        with scratch(self.cache_path) as aside, explain_full_disk(path):
            theirs = ResultCache(aside)
            made = theirs.get_task_result_path(task_result.task_name, model_name, *args)
            made.parent.mkdir(parents=True)
            settings = read_artifact(path.with_name("run_settings.jsonl"), _read_lines)
            if settings is not None:  # of the tasks before, which mteb merges
                made.with_name("run_settings.jsonl").write_bytes(settings)
            theirs.save_to_cache(task_result, model_name, *args, **more)
            # The result comes last: where it is, everything is.
            for file in sorted(made.parent.iterdir(), key=lambda one: one == made):
                write_file(path.with_name(file.name), file.read_bytes())


def _read_lines(path: Path) -> bytes:
    """Return the bytes of a file of JSON lines, or raise where one is torn."""
    content = path.read_bytes()
    for line in content.splitlines():
        json.loads(line)
    return content
