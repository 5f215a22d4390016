"""One version everywhere, and the declared Python versions are tested."""

import re
import tomllib
from pathlib import Path

import yaml

from midlayer_encoders import __version__

_ROOT = Path(__file__).parents[1]


def _text(name: str) -> str:
    return (_ROOT / name).read_text(encoding="utf8")


def test_changelog_and_citation_have_this_version() -> None:
    release = __version__.removesuffix(".dev0")  # until the release
    assert re.findall(r"^## (\S+)", _text("CHANGELOG.md"), re.MULTILINE)[0] == release
    assert yaml.safe_load(_text("CITATION.cff"))["version"] == release


def test_declared_python_versions_are_tested() -> None:
    project = tomllib.loads(_text("pyproject.toml"))["project"]
    claimed = [
        classifier.rpartition(" ")[2] for classifier in project["classifiers"] if re.search(r":: 3\.\d+$", classifier)
    ]
    assert yaml.safe_load(_text(".github/workflows/ci.yml"))["jobs"]["test"]["strategy"]["matrix"]["python"] == claimed
    assert project["requires-python"] == f">={claimed[0]}"
    assert f'"version", {claimed!s}'.replace("'", '"') in _text("tests/integration/test_installed.py")


def test_minimum_versions_are_in_the_table_of_tested_versions() -> None:
    table = _text("docs/versions.md")
    for requirement in tomllib.loads(_text("pyproject.toml"))["project"]["dependencies"]:
        name, _, versions = requirement.partition(">=")
        floor = versions.partition(",")[0]
        assert re.search(rf"^\| {name} \| {re.escape(floor)}(\.0)* \|", table, re.MULTILINE), requirement


def test_libraries_with_private_parts_in_use_are_bounded_at_the_next_major() -> None:
    requirements = tomllib.loads(_text("pyproject.toml"))["project"]["dependencies"]
    bounds = dict(re.findall(r"^([\w-]+)>=\S+,<(\S+)$", "\n".join(requirements), re.MULTILINE))
    floors = dict(re.findall(r"^([\w-]+)>=(\d+)", "\n".join(requirements), re.MULTILINE))
    tested = {path.stem[5:-10].replace("_", "-") for path in _ROOT.glob("tests/*/test_*_internals.py")} - {"trainer"}
    assert bounds == {name: str(int(floors[name]) + 1) for name in tested}
