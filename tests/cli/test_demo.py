"""``midlayer demo``: a sweep over two recipes, on one screen."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from midlayer_encoders.cli import app
from midlayer_encoders.files import shell_path
from midlayer_encoders.models import hub
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.tasks import resolve_tasks, task_label
from midlayer_encoders.tasks.docstrings import BUILTIN_TASKS, builtin_data
from tests.cli.calls import tables
from tests.recipes.test_word_echo import save_causal


def test_small_tasks_have_four_objects_of_each_subject() -> None:
    small = {task_label(task.metadata.name): task.metadata.name for task in resolve_tasks("builtin-small")}
    assert small.keys() == BUILTIN_TASKS.keys()
    assert not {task.metadata.name for task in resolve_tasks("builtin")} & set(small.values())
    for label in ("DocstringDescriptionReranking", "DocstringSubjectClustering"):
        few, all_rows = (builtin_data(label, name).splits["test"] for name in ("builtin-small", "builtin"))
        column = "query" if "query" in few else "sentences"
        assert len(few[column]) == 24 * 4
        assert set(few[column]) < set(all_rows[column])


@pytest.mark.docs
def test_demo_prints_the_best_recipe_on_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model stands for the built-in one, whose demo takes minutes."""
    folder = save_causal("byte level", tmp_path / "model")
    monkeypatch.setattr(hub, "built_in_model", lambda _: (str(folder), None))
    out = tmp_path / "demo"
    result = CliRunner().invoke(app, ["demo", "--out", str(out)], catch_exceptions=False, env={"COLUMNS": "100"})
    lines = result.stdout.splitlines()
    assert len(lines) <= 40
    ((_, *rows), *_) = tables(result.stdout)
    assert [row[0] for row in rows][:2] == ["plain", "word-echo"]
    loaded = SweepResult.load(out)
    assert loaded.verdict()[0] in " ".join(" ".join(lines).split())
    assert f"The report: {shell_path(out / 'report.html')}" in lines
    assert (out / "report.html").is_file()
    code = "\n".join(lines[lines.index("In Python:") + 1 :])
    assert code.startswith("from midlayer_encoders import LayerEncoder\nLayerEncoder('built-in', layer=")
    printed = CliRunner().invoke(app, ["demo", "--out", str(out), "--json"], catch_exceptions=False).stdout
    assert json.loads(printed)["best_layer"] == loaded.best()
