"""Frames shaped like real ones: scores that peak before the last layer, metrics that bend at mid-depth."""

import math
import random
from collections.abc import Sequence

import polars as pl

from midlayer_encoders.frame.schema import FRAME_SCHEMA

TASKS = {
    "LibraryClassification": ("accuracy", 0.50, 0.18, 0.20),
    "SubmoduleClustering": ("v_measure", 0.30, 0.12, 0.35),
    "SameObjectPairClassification": ("max_ap", 0.62, 0.12, 0.55),
    "SummaryReranking": ("map_at_1000", 0.16, 0.12, 0.25),
    "DocstringSTS": ("cosine_spearman", 0.39, 0.12, 0.45),
}
METRICS = {
    "prompt_entropy": (2.0, -1.1),
    "dataset_entropy": (5.1, -0.8),
    "effective_rank": (160.0, -90.0),
    "curvature": (1.2, 0.6),
    "infonce": (0.9, -0.5),
    "lidar": (31.0, 14.0),
    "dime": (1.1, 0.4),
    "matrix_entropy": (2.6, -1.3),
    "prompt_effective_rank": (12.0, -6.0),
    "anisotropy": (0.2, 0.6),
    "intrinsic_dimension": (11.0, 6.0),
    "alpha_req": (0.9, 0.5),
    "logdet_entropy": (-1250.0, 400.0),
    "first_token_share": (0.02, 0.9),
    "block_influence": (0.6, -0.5),
    "neighbor_overlap": (0.4, 0.3),
}


def rows_frame(rows: Sequence[tuple[object, ...]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=FRAME_SCHEMA, orient="row")


def scores_frame(
    num_layers: int = 30,
    *,
    tasks: int | None = None,
    layers: Sequence[int] | None = None,
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
) -> pl.DataFrame:
    rng = random.Random(0)
    shapes = list(TASKS.items())
    if tasks is not None:
        shapes = [(f"{shapes[k % 5][0]}{k // 5 or ''}", shapes[k % 5][1]) for k in range(tasks)]
    rows = []
    for task, (measure, low, height, peak) in shapes:
        peak = peak + rng.uniform(-0.1, 0.1)
        for layer in layers if layers is not None else range(num_layers + 1):
            depth = layer / num_layers
            value = low + height * math.exp(-(((depth - peak) / 0.4) ** 2)) + rng.gauss(0, 0.004)
            rows.append((model, "main", layer, depth, "score", task, measure, value))
    return rows_frame(rows)


def metrics_frame(
    num_layers: int = 30,
    *,
    names: Sequence[str] = tuple(METRICS),
    datasets: Sequence[str] = ("WikiText-2",),
    model: str = "HuggingFaceTB/SmolLM2-135M-Instruct",
) -> pl.DataFrame:
    rng = random.Random(1)
    rows = []
    for number, dataset in enumerate(datasets):
        for name in names:
            start, bend = METRICS[name]
            for layer in range(num_layers + 1):
                depth = layer / num_layers
                value = (
                    start * (1 + 0.1 * number) + bend * math.sin(math.pi * depth) ** 2 + 0.02 * bend * rng.gauss(0, 1)
                )
                rows.append((model, "main", layer, depth, "metric", dataset, name, value))
    return rows_frame(rows)


def full_frame() -> pl.DataFrame:
    return pl.concat([scores_frame(), metrics_frame()])
