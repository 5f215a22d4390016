"""Ctrl-C and SIGTERM during a sweep in a separate process."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from midlayer_encoders.sweeping import SweepResult


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_sweep_ends_at_once_and_continues(
    sent: signal.Signals, exit_code: int, tiny_folder: Callable[[str], str], tmp_path: Path
) -> None:
    rows = [{"sentence1": f"text {n}", "sentence2": "of many words " * 40, "score": n % 6} for n in range(600)]
    (tmp_path / "many.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["sweep", tiny_folder("Llama"), "--tasks", str(tmp_path / "many.jsonl"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "midlayer_encoders.cli", *arguments, "--device", "cpu", "--metrics", "none"]
    with_workers = [*command, "--json", "--workers", "2"]  # which still import mteb
    running = subprocess.Popen(with_workers, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    assert running.stderr is not None
    output: list[str] = []
    for line in running.stderr:  # until it embeds
        output.append(line)
        if '"embedding"' in line:
            running.send_signal(sent)
            start = time.monotonic()
            break
    output.append(running.stderr.read())
    running.stderr.close()
    assert running.wait(60) == exit_code, output
    assert time.monotonic() - start < 10
    assert "The same command continues from there" in output[-1]
    assert "Traceback" not in output[-1]
    resumed = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    assert resumed.returncode == 0, resumed.stderr
    assert SweepResult.load(tmp_path / "out").best() >= 0
