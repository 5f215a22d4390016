"""Draws the figures of ``docs/vision.md`` from the results: ``python -m benchmarks.vision.figures [FOLDER]``."""

from __future__ import annotations

import sys
from pathlib import Path

import polars as pl

from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.report import plot_metrics, plot_steps_curves
from midlayer_encoders.report.layer_charts import plot_probes

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[2] / "docs" / "figures" / "vision"
PROBES = ("attentive", "linear", "knn")
ORDER = ("supervised", "masked", "autoregressive", "distilled", "untrained", "autoregressive, causal mask")


def objective(name: str) -> str:
    """Return what a model's name ends in: ``vit-12x192-masked`` is masked."""
    return name.split("-", 2)[2].replace("-causal", ", causal mask")


def ordered(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a frame with models named by their objective, always in one order, so that each keeps its colour."""
    named = frame.with_columns(pl.col("model").map_elements(objective, pl.String))
    return named.sort(pl.col("model").map_elements(ORDER.index, pl.Int64), maintain_order=True)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    FIGURES.mkdir(parents=True, exist_ok=True)
    probes = ordered(pl.read_csv(folder / "probes.csv"))
    for kind in PROBES:
        rows = probes.filter(pl.col("probe") == kind)
        tables = {str(name): part for (name,), part in rows.group_by("model", maintain_order=True)}
        figure = plot_probes(tables, num_layers=rows["layer"].max(), chance=0.1, title=f"CIFAR-10, {kind} probe")  # type: ignore[arg-type]
        figure.savefig(FIGURES / f"{kind}.png", dpi=130)
    metrics = ordered(pl.read_csv(folder / "metrics.csv", schema=FRAME_SCHEMA))
    plot_metrics(metrics).savefig(FIGURES / "metrics.png", dpi=130)
    training = ordered(pl.read_csv(folder / "training.csv", schema=FRAME_SCHEMA))
    for metric in ("dataset_entropy", "prompt_entropy"):
        rows = training.filter(pl.col("name") == metric).with_columns(
            pl.col("model").alias("name"), pl.lit("trunk").alias("model")
        )
        plot_steps_curves(rows).savefig(FIGURES / f"training_{metric}.png", dpi=130)


if __name__ == "__main__":
    main()
