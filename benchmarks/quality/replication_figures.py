"""Draw the figures of benchmarks/results/replication.md from what ``python -m benchmarks.paper … --out RUN`` wrote.

    python -m benchmarks.quality.replication_figures RUN

Every experiment in the folder is drawn again, with the model's name instead of its folder's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import polars as pl

from benchmarks.paper.reproduce import EXPERIMENTS
from midlayer_encoders.report import write_figure

OUT = Path(__file__).resolve().parents[2] / "docs" / "figures" / "replication"
NAMES = {"local/SmolLM2-135M-Instruct.Q4_1": "SmolLM2-135M"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="the --out of python -m benchmarks.paper")
    for path in sorted(parser.parse_args().run.glob("*.parquet")):
        frame = pl.read_parquet(path)
        if "model" in frame.columns:
            frame = frame.with_columns(pl.col("model").replace(NAMES))
        write_figure(EXPERIMENTS[path.stem].draw(frame), OUT / f"{path.stem}.png", dpi=110)


if __name__ == "__main__":
    main()
