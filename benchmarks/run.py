"""Run every benchmark that needs no accelerator, one after the other; results go to ``benchmarks/results/``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = ("encoder.py", "sweep.py", "real_tasks.py")


def main() -> None:
    for script in SCRIPTS:
        print(f"== {script}", flush=True)
        subprocess.run([sys.executable, str(Path(__file__).parent / script)], check=True)


if __name__ == "__main__":
    main()
