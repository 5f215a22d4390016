"""Plant mistakes, one at a time, and check that the tests notice.

    python benchmarks/mistakes/run.py                      # all of planted.json, two at a time
    python benchmarks/mistakes/run.py --only store-01 cli-05
    python benchmarks/mistakes/run.py --workers 15 --out results.json

Each mistake is planted in a copy of the tree, and its tests, or those of its subpackage and of subpackages built on it,
run there until one fails. Pass tests that fail on this machine without any mistake to ``--skip``; mistakes that only
they would catch count as missed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLANTED = Path(__file__).with_name("planted.json")
PYTEST = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--show-capture=no", "--tb=line"]
PATIENCE = 600  # seconds for the tests of one mistake

_MEASURING = (
    "tests/test_measuring.py tests/test_measured_by_hand.py tests/test_measuring_batches.py tests/test_seeds.py"
)
TESTS = {
    "models": "tests/models tests/encoder",
    "media": "tests/media tests/views tests/encoder/test_media_exact.py tests/test_media_measuring.py",
    "views": "tests/views tests/test_seeds.py",
    "spectra": "tests/spectra tests/metrics",
    "metrics": f"tests/metrics {_MEASURING}",
    "frame": f"tests/frame tests/selection tests/report {_MEASURING}",
    "store": "tests/store tests/sweeping",
    "tasks": "tests/tasks tests/sweeping",
    "reading": f"tests/reading tests/selection tests/encoder/test_multimodal.py tests/test_media_measuring.py {_MEASURING}",
    "report": "tests/report tests/comparing tests/probing tests/paper",
    "measuring": f"{_MEASURING} tests/test_media_measuring.py tests/selection",
    "selection": "tests/selection tests/encoder/test_choosing.py",
    "encoder": "tests/encoder tests/selection",
    "callbacks": "tests/callbacks",
    "sweeping": "tests/sweeping tests/cli tests/test_media_measuring.py",
    "comparing": "tests/comparing tests/cli/test_analysis_commands.py tests/paper",
    "probing": "tests/probing tests/cli/test_analysis_commands.py",
    "paper": "tests/paper",
    "cli": "tests/cli tests/encoder/test_lines.py",
    "_types/_isolation": "tests/test_isolation.py tests/test_measuring.py tests/sweeping tests/tasks",
}


def plant(mistake: dict[str, str], skipped: list[str]) -> dict[str, Any]:
    """Return a mistake with its result: ``caught`` and by which test, or ``missed``."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(".git", ".cache", ".venv", "runs"))
        path = root / mistake["file"]
        text = path.read_text(encoding="utf8")
        if text.count(mistake["old"]) != 1:
            return {**mistake, "result": "does not apply"}
        path.write_text(text.replace(mistake["old"], mistake["new"]), encoding="utf8")
        leave_out = [word for name in skipped for word in ("--deselect", name)]
        command = [
            *PYTEST,
            "-m",
            "not (slow or docs or gpu or extras)",
            *leave_out,
            *mistake.get("tests", TESTS.get(mistake["room"], "tests")).split(),
        ]
        try:
            process = subprocess.run(
                command, cwd=root, env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
                capture_output=True, text=True, timeout=PATIENCE, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {**mistake, "result": "missed", "by": f"no test failed within {PATIENCE} s"}
    first = re.search(r"^(?:FAILED|ERROR) (\S+)", process.stdout, re.M)
    if process.returncode == 0:
        return {**mistake, "result": "missed"}
    return {
        **mistake,
        "result": "caught" if first else f"exit code {process.returncode}",
        "by": first[1] if first else "",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="*", default=[], help="ids, instead of all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--skip", nargs="*", default=[], help="tests that fail here without any mistake")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    arguments = parser.parse_args()
    mistakes = json.loads(PLANTED.read_text(encoding="utf8"))
    selected = [mistake for mistake in mistakes if not arguments.only or mistake["id"] in arguments.only]
    results = []
    with ThreadPoolExecutor(arguments.workers) as pool:
        for result in pool.map(lambda mistake: plant(mistake, arguments.skip), selected):
            results.append(result)
            print(f"{result['id']:<18} {result['result']:<8} {result.get('by', '')}", flush=True)
    caught = sum(result["result"] == "caught" for result in results)
    print(f"{caught} of {len(results)} caught")
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=1), encoding="utf8")


if __name__ == "__main__":
    main()
