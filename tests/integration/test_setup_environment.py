"""The setup script that every `make` command runs first: each failure is one line with the cure."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Return the script as a module that writes its log to a temporary folder."""
    spec = importlib.util.spec_from_file_location("setup_environment", ROOT / "scripts" / "setup_environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "LOG", tmp_path / "setup.log")
    monkeypatch.setattr(module, "has_nvidia_gpu", lambda: False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", (tmp_path / "wheels").as_uri())
    (tmp_path / "wheels").mkdir()
    return module


def write_wheel(folder: Path, name: str, *requirements: str) -> None:
    """Write an empty wheel with the given requirements."""
    info = f"{name}-9.0.dist-info"
    metadata = "\n".join(
        [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            "Version: 9.0",
            *(f"Requires-Dist: {requirement}" for requirement in requirements),
        ]
    )
    with zipfile.ZipFile(folder / f"{name}-9.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any")
        wheel.writestr(f"{info}/RECORD", "")


def test_a_full_disk_is_named_with_the_cure(setup: ModuleType) -> None:
    with pytest.raises(
        SystemExit, match=r"the environment needs about 10000 GB, but only [\d.]+ GB are free .* free some"
    ):
        setup.check_disk_space(10**13, "the environment", "free some space")
    setup.check_disk_space(1, "the environment", "free some space")


@pytest.mark.long
@pytest.mark.parametrize("cuda", [True, False])
def test_cuda_packages_are_announced_before_the_download(
    cuda: bool, setup: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(tmp_path / "wheels", "torchlike", *(["nvidia-blas"] if cuda else []))
    write_wheel(tmp_path / "wheels", "nvidia_blas")
    monkeypatch.setenv("PIP_VERBOSE", "1")  # pip then prints more than the report
    setup.check_cuda_packages(setup.Pip(Path(sys.executable)), ["torchlike"])
    printed = capsys.readouterr().out
    assert ("torch brings 1 CUDA packages" in printed and "TORCH_BACKEND=cpu" in printed) == cuda
    monkeypatch.setattr(setup, "NEEDED_BYTES_WITH_CUDA", 10**15)
    if cuda:
        with pytest.raises(SystemExit, match=r"torch with its CUDA packages needs .* TORCH_BACKEND=cpu"):
            setup.check_cuda_packages(setup.Pip(Path(sys.executable)), ["torchlike"])


@pytest.mark.long
def test_a_package_that_cannot_be_installed_is_one_line(setup: ModuleType) -> None:
    with pytest.raises(SystemExit) as raised:
        setup.Pip(Path(sys.executable)).install("no-such-package-here")
    message = str(raised.value)
    assert message.startswith("setup: pip could not install no-such-package-here: ERROR: ")
    assert "setup.log" in message
    assert "\n" not in message


@pytest.mark.long
def test_an_index_that_does_not_answer_is_named(setup: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    with pytest.raises(SystemExit, match="the package index did not answer: check the network or proxy"):
        setup.Pip(Path(sys.executable)).install("no-such-package-here")


def run_copy(folder: Path) -> str:
    """Run a copy of the script in a folder of its own, and return what it prints."""
    script = folder / "scripts" / "setup_environment.py"
    script.parent.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "setup_environment.py", script)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    return result.stderr


def test_a_path_in_which_no_environment_can_be_created_is_named(tmp_path: Path) -> None:
    assert "contains the PATH separator :. Clone to another path." in run_copy(tmp_path / "a:b")


def test_a_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / ".cache").touch()
    assert run_copy(tmp_path).startswith("setup: [Errno 17] File exists")


@pytest.mark.long
def test_a_missing_torch_of_the_system_is_named(setup: ModuleType, tmp_path: Path) -> None:
    venv.create(tmp_path / "environment", with_pip=False)
    with pytest.raises(SystemExit, match=r"TORCH=system needs an installed torch, but .* run make again"):
        setup.check_system_torch(setup.python_of(tmp_path / "environment"))
    setup.check_system_torch(Path(sys.executable))


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_settings_of_pip_cannot_move_the_installation(tmp_path: Path) -> None:
    rule = "print:\n\t@echo $$PIP_USER $${PIP_TARGET-unset} $${PIP_PREFIX-unset}\n"
    makefile = (ROOT / "Makefile").read_text(encoding="utf8")  # `include` takes no path with spaces
    (tmp_path / "Makefile").write_text(f"{makefile}\n{rule}", encoding="utf8")
    settings = {**os.environ, "PIP_USER": "1", "PIP_TARGET": "/elsewhere", "PIP_PREFIX": "/elsewhere"}
    printed = subprocess.check_output(["make", "--no-print-directory", "print"], cwd=tmp_path, env=settings, text=True)
    assert printed.split() == ["0", "unset", "unset"]


def test_the_stand_in_satisfies_mteb_and_yields_to_the_real_package() -> None:
    project = tomllib.loads((ROOT / "pytrec_eval_numpy" / "pyproject.toml").read_text(encoding="utf8"))["project"]
    requirements = map(Requirement, importlib.metadata.requires("mteb") or [])
    (required,) = (requirement for requirement in requirements if requirement.name == project["name"])
    assert required.specifier.contains(project["version"])
    assert Version(project["version"]) < Version("0.5.7")
    assert f'__version__ = "{project["version"]}"' in (
        ROOT / "pytrec_eval_numpy" / "pytrec_eval" / "__init__.py"
    ).read_text(encoding="utf8")
