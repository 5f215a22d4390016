"""Remake the training record's figures and tables from its frames.

python -m benchmarks.pretraining.report             # docs/figures/training/*.png, the tables in docs/training.md
python -m benchmarks.pretraining.report --take OUT  # first take the runs that run.py finished in OUT into the record
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.pages import write_part
from benchmarks.pretraining.figures import figures
from benchmarks.pretraining.record import collect
from benchmarks.pretraining.tables import tables

DOCS = Path(__file__).parents[2] / "docs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", type=Path, default=None, help="a folder of finished runs")
    given = parser.parse_args()
    if given.take:
        print("taken:", ", ".join(collect(given.take)))
    for name, table in tables().items():
        write_part(DOCS / "training.md", name, table)
    folder = DOCS / "figures" / "training"
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures().items():
        figure.savefig(folder / f"{name}.png", dpi=110)
        print(folder / f"{name}.png")


if __name__ == "__main__":
    main()
