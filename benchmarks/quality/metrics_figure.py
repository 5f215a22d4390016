"""The picture of docs/metrics.md: what each metric shows on SmolLM2-135M, from committed frames: no model is run.

``python -m benchmarks.quality.metrics_figure``
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import polars as pl

from midlayer_encoders.metrics import METRICS
from midlayer_encoders.report.style import LIGHT, SERIES

HOME = Path(__file__).resolve().parents[1]
FRAMES = (
    HOME / "results/smollm2_wikitext.csv",
    HOME / "selection/results/real_metrics.csv",
    HOME / "results/smollm2_other_metrics.csv",
)
OUT = HOME.parent / "docs/figures/metrics.png"
SHOWS = {
    "prompt_entropy": "how varied the tokens of a text are",
    "dataset_entropy": "how varied the texts are",
    "effective_rank": "how many directions the texts use",
    "curvature": "how sharply the path from token to token turns",
    "infonce": "how hard two views of a text are to pair",
    "dime": "how much two views of a text share",
    "matrix_entropy": "how varied all tokens together are",
    "prompt_effective_rank": "how many directions a text's tokens use",
    "anisotropy": "how much all texts point one way",
    "intrinsic_dimension": "dimensions of the surface texts lie on",
    "alpha_req": "how fast the spectrum falls",
    "logdet_entropy": "volume that the texts fill",
    "first_token_share": "how much of the norm the first token takes",
    "cka": "likeness to the layer before",
    "block_influence": "how far a block turns the tokens",
    "neighbor_overlap": "neighbors kept from the layer before",
    "half_match": "whether halves of a text find each other",
}


def main() -> None:
    kept = [pl.read_csv(path) for path in FRAMES if path.is_file()]
    rows = pl.concat(frame.select("model", "dataset", "layer", "name", "value") for frame in kept)
    rows = rows.filter(pl.col("model").str.contains("SmolLM2") & pl.col("dataset").str.contains("wikitext"))
    drawn = [name for name in METRICS if name in SHOWS and not rows.filter(name=name).is_empty()]
    columns = 3
    figure, axes = plt.subplots(
        -(-len(drawn) // columns), columns, figsize=(9.6, 2.35 * -(-len(drawn) // columns)), layout="constrained"
    )
    for name, box in zip(drawn, axes.flat, strict=False):
        curve = rows.filter(name=name).unique("layer", keep="first", maintain_order=True).sort("layer")
        box.axvline(12, color=LIGHT["rule"], linewidth=5, zorder=0)
        box.plot(curve["layer"], curve["value"], color=SERIES[0], linewidth=1.8)
        box.set_title(f"{name}\n", loc="left", fontsize=10.5, fontweight="bold", color=LIGHT["ink"])
        box.text(0, 1.03, SHOWS[name], transform=box.transAxes, fontsize=8.5, color=LIGHT["soft"])
        box.tick_params(labelsize=8, colors=LIGHT["soft"])
        box.spines[["top", "right"]].set_visible(False)
        box.set_xlim(0, 30)
    for box in axes.flat[len(drawn) :]:
        box.set_axis_off()
    figure.supxlabel(
        "layer of SmolLM2-135M (the gray line: block 12, which makes the first token enormous)",
        fontsize=9,
        color=LIGHT["soft"],
    )
    figure.savefig(OUT, dpi=90)


if __name__ == "__main__":
    main()
