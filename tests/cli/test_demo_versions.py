from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Any

import pytest

from midlayer_encoders.cli import _arguments, sweep
from midlayer_encoders.tasks import builtin_tasks
from tests.cli.calls import run


@pytest.mark.slow
def test_demo_prints_the_versions_its_scores_depend_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The five tasks come from installed packages; the sweep itself takes minutes and is skipped."""
    requested: list[Any] = []
    monkeypatch.setattr(_arguments, "load_model", lambda model, _: model)
    monkeypatch.setattr(sweep, "run_sweep", lambda *args, **_: requested.append(args))
    (line,) = run("demo").splitlines()
    assert requested == [("built-in", ["builtin"])]
    assert line.startswith(
        f"Scores depend on these versions, whose docstrings the tasks are made of: python "
        f"{platform.python_version()}, numpy {version('numpy')}, "
    )
    for name, package in (("scipy", "scipy"), ("sklearn", "scikit-learn"), ("torch", "torch")):
        assert f"{name} {version(package)}" in line
    revision = builtin_tasks()[0].metadata.dataset["revision"]
    assert all(
        f"{package_version.rpartition('-')[0]} {package_version.rpartition('-')[2]}" in line
        for package_version in revision.split(",")[:-1]
    )
