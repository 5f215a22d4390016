"""Metrics of a sweep use the same texts in every process and for any order of the tasks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder
from midlayer_encoders.metrics.measuring import measure_layers
from midlayer_encoders.sweeping.store import text_key
from tests.support.others_warnings import MTEB
from tests.support.tiny_folders import Folder
from tests.sweeping.scoring import QUICK, sweep
from tests.tasks.rows import SENTENCES, write

pytestmark = MTEB

METRICS = ["prompt_entropy", "dataset_entropy", "lidar"]
COUNT = 9

_SWEEP = """
import json, sys, warnings
warnings.simplefilter("ignore")
from tests.sweeping.test_sample import measure_metrics
print(json.dumps(measure_metrics(sys.argv[1], *sys.argv[2:])))
"""


def measure_metrics(model: str, out: str, *tasks: str) -> list[float]:
    """Return the metrics of layers 1 and 3 from a sweep of these tasks; metrics use raw states."""
    frame = sweep(
        model, list(tasks), layers=[1, 3], metrics=METRICS, metric_texts=COUNT, views=3, out=out, **QUICK
    ).frame.filter(pl.col("kind") == "metric")
    assert set(frame["dataset"]) == {f"{COUNT} texts of the tasks"}
    return frame.sort("name", "layer")["value"].to_list()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_sample_depends_only_on_the_texts(tiny_folder: Folder, tmp_path: Path) -> None:
    model, half = tiny_folder("Llama"), len(SENTENCES) // 2
    sts_rows = [{"sentence1": a, "sentence2": SENTENCES[0], "score": n % 5} for n, a in enumerate(SENTENCES[:half])]
    reranking_rows = [
        {"query": q, "positive": SENTENCES[-2:-1], "negative": SENTENCES[-1:]} for q in SENTENCES[half:-2]
    ]
    tasks = [
        str(write(tmp_path / name, rows)) for name, rows in (("near.jsonl", sts_rows), ("ranks.jsonl", reranking_rows))
    ]
    sample = sorted(SENTENCES, key=text_key)[:COUNT]
    encoder = LayerEncoder(model, -1, device="cpu")
    raw = measure_layers(encoder, sample, metrics=METRICS, layers=[1, 3], views=3)  # metrics of a sweep use raw states
    expected = raw.sort("name", "layer")["value"].to_list()
    assert measure_metrics(model, str(tmp_path / "one"), *tasks) == pytest.approx(expected, rel=1e-5)
    assert measure_metrics(model, str(tmp_path / "other"), *reversed(tasks)) == pytest.approx(expected, rel=1e-5)
    # In a process whose sets have another order:
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "0" else "0"
    process = subprocess.run(
        [sys.executable, "-c", _SWEEP, model, str(tmp_path / "there"), *tasks],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONHASHSEED": seed}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:]
    assert json.loads(process.stdout.splitlines()[-1]) == pytest.approx(expected, rel=1e-5)
