"""An exported recipe, loaded by plain sentence-transformers, on a whole test set of pairs, beside what the sweep said.

    python -m benchmarks.recipes.exported TASKS/STSBenchmark --sweep runs/recipes --recipe one-word [--device cuda]

The folder is read by another process, which does not import this package.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import polars as pl

from midlayer_encoders import LayerEncoder
from midlayer_encoders.tasks import task_label

READER = """
import json, sys
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity
folder, rows, device = sys.argv[1:]
rows = [json.loads(line) for line in open(rows)]
model = SentenceTransformer(folder, device=device)
first, second = (
    model.encode([row[name] for row in rows], convert_to_tensor=True, batch_size=128, show_progress_bar=False)
    for name in ("sentence1", "sentence2")
)
assert not any(name.startswith("midlayer") for name in sys.modules)
print(len(rows), 100 * spearmanr(cosine_similarity(first, second).cpu(), [row["score"] for row in rows]).statistic)
"""


def main() -> None:
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", type=Path)
    parser.add_argument("--sweep", type=Path, required=True, help="folder of a sweep with this task and recipe")
    parser.add_argument("--recipe", default="one-word")
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    frame = pl.read_csv(given.sweep / "scores.csv").filter(
        pl.col("kind") == "score", pl.col("recipe") == given.recipe,
        pl.col("dataset").map_elements(task_label, return_dtype=pl.String) == given.task.name,
    )  # fmt: skip
    best = frame.sort("value", descending=True, nulls_last=True).row(0, named=True)
    with tempfile.TemporaryDirectory() as folder:
        LayerEncoder(given.model, best["layer"], recipe=given.recipe).save_pretrained(folder)
        read = [sys.executable, "-c", READER, folder, str(given.task / "test.jsonl"), given.device]
        count, score = subprocess.run(read, capture_output=True, text=True, check=True).stdout.split()[-2:]
    said = 100 * best["value"]
    print(
        f"{given.recipe} at layer {best['layer']}, {count} pairs: the sweep said {said:.3f}, the folder gives", end=" "
    )
    print(f"{float(score):.3f}: {float(score) - said:+.3f}")


if __name__ == "__main__":
    main()
