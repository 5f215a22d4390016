"""Kills and full disks after every call that changes a file: nothing is lost, nothing stays stuck (tests/files/killing.py)."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def killed(*words: str) -> dict[str, Any]:
    """Return what a process of its own found: it forks, and must not have used polars before."""
    command = [sys.executable, "-m", "tests.files.killing", "--json", *words]
    process = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert process.returncode == 0, process.stderr
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def check(actual: dict[str, Any], points: int) -> None:
    for name, item in actual.items():
        assert (item["lost"], item["stuck"], item["wrong"]) == ([], [], []), name
    assert sum(item["points"] for item in actual.values()) >= points


@pytest.mark.slow
def test_some_points() -> None:
    check(killed("store:5"), 20)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "points"),
    [
        ("store", 100),
        ("sweep", 350),
        ("metrics", 18),
        ("progression", 70),
        ("reproduce:4", 100),
        ("export", 60),
        ("saved", 60),
        ("history", 30),
        ("resumed", 12),
        ("vectors", 160),
        ("tuning:5", 40),
    ],
)
def test_every_point(name: str, points: int) -> None:
    check(killed(name), points)
