"""Metrics of a model's layers: each is a pure function and a torchmetrics class that is updated layer by layer."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from midlayer_encoders.arguments import METRIC_NAMES, PAPER_METRICS, metric_names
from midlayer_encoders.metrics._layer_metric import CLASSES, Kind, LayerMetric, Normalization, TooFewTextsError
from midlayer_encoders.metrics.row_metrics import (
    AlphaReQ,
    Anisotropy,
    DatasetEntropy,
    EffectiveRank,
    LogdetEntropy,
    MatrixEntropy,
    alpha_req,
    anisotropy,
    dataset_entropy,
    effective_rank,
    logdet_entropy,
    matrix_entropy,
)
from midlayer_encoders.metrics.sample_metrics import (
    CKA,
    HalfMatch,
    IntrinsicDimension,
    NeighborOverlap,
    Uniformity,
    cka,
    half_match,
    intrinsic_dimension,
    neighbor_overlap,
    uniformity,
)
from midlayer_encoders.metrics.token_metrics import (
    BlockInfluence,
    Curvature,
    FirstTokenShare,
    PromptEffectiveRank,
    PromptEntropy,
    block_influence,
    curvature,
    first_token_share,
    prompt_effective_rank,
    prompt_entropy,
)
from midlayer_encoders.metrics.view_metrics import Alignment, DiME, InfoNCE, LiDAR, alignment, dime, infonce, lidar

__all__ = [
    "ALIASES",
    "CKA",
    "METRICS",
    "PAPER_METRICS",
    "Alignment",
    "AlphaReQ",
    "Anisotropy",
    "BlockInfluence",
    "Curvature",
    "DatasetEntropy",
    "DiME",
    "EffectiveRank",
    "FirstTokenShare",
    "HalfMatch",
    "InfoNCE",
    "IntrinsicDimension",
    "Kind",
    "LayerMetric",
    "LiDAR",
    "LogdetEntropy",
    "MatrixEntropy",
    "NeighborOverlap",
    "Normalization",
    "PromptEffectiveRank",
    "PromptEntropy",
    "TooFewTextsError",
    "Uniformity",
    "alignment",
    "alpha_req",
    "anisotropy",
    "block_influence",
    "cka",
    "curvature",
    "dataset_entropy",
    "dime",
    "effective_rank",
    "first_token_share",
    "half_match",
    "infonce",
    "intrinsic_dimension",
    "lidar",
    "logdet_entropy",
    "make_metrics",
    "matrix_entropy",
    "metric_names",
    "neighbor_overlap",
    "prompt_effective_rank",
    "prompt_entropy",
    "uniformity",
]

#: All metrics by the name that the function, command-line option and log key share.
METRICS: dict[str, type[LayerMetric]] = {name: CLASSES[name] for name in METRIC_NAMES}

#: Names of a metric with other options: RankMe (Garrido et al., 2023), exp-LiDAR (Thilak et al., 2024), and the
#: uniformity of Wang & Isola (2020), who do not subtract the mean.
ALIASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "rankme": ("effective_rank", {"epsilon": 1e-7}),
    "exp_lidar": ("lidar", {"exponential": True}),
    "raw_uniformity": ("uniformity", {"center": False}),
}


def make_metrics(
    metrics: Literal["all", "paper"] | str | Sequence[str], layers: Sequence[int], *, views: int = 16
) -> dict[str, LayerMetric]:
    """Return a new metric, with its default options, for each name.

    Args:
        metrics: ``"all"``, ``"paper"`` (the paper's seven), one name of :data:`METRICS` or :data:`ALIASES`, or several.
        layers: layer numbers that ``update`` will be called with.
        views: number of views of each text for LiDAR.

    Example:
        >>> list(make_metrics(["curvature", "lidar"], layers=[0, 1, 2]))
        ['curvature', 'lidar']
    """
    made = {}
    for name in metric_names(metrics):
        metric, options = ALIASES.get(name, (name, {}))
        if metric == "lidar":
            options = {**options, "views": views}
        made[name] = METRICS[metric](layers, **options)
    return made
