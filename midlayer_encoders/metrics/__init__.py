"""Metrics of a model's layers: a pure function each, and a torchmetrics class that is updated layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from midlayer_encoders.errors import OptionError, check_choice
from midlayer_encoders.metrics._base.layer_metric import Kind, LayerMetric, TooFewTextsError
from midlayer_encoders.metrics.alpha_req import AlphaReQ, alpha_req
from midlayer_encoders.metrics.anisotropy import Anisotropy, anisotropy
from midlayer_encoders.metrics.block_influence import BlockInfluence, block_influence
from midlayer_encoders.metrics.cka import CKA, cka
from midlayer_encoders.metrics.curvature import Curvature, curvature
from midlayer_encoders.metrics.dataset_entropy import DatasetEntropy, dataset_entropy
from midlayer_encoders.metrics.dime import DiME, dime
from midlayer_encoders.metrics.effective_rank import EffectiveRank, effective_rank
from midlayer_encoders.metrics.half_match import HalfMatch, half_match
from midlayer_encoders.metrics.infonce import InfoNCE, infonce
from midlayer_encoders.metrics.intrinsic_dimension import IntrinsicDimension, intrinsic_dimension
from midlayer_encoders.metrics.lidar import LiDAR, lidar
from midlayer_encoders.metrics.logdet_entropy import LogdetEntropy, logdet_entropy
from midlayer_encoders.metrics.matrix_entropy import MatrixEntropy, Normalization, matrix_entropy
from midlayer_encoders.metrics.neighbor_overlap import NeighborOverlap, neighbor_overlap
from midlayer_encoders.metrics.prompt_effective_rank import PromptEffectiveRank, prompt_effective_rank
from midlayer_encoders.metrics.prompt_entropy import PromptEntropy, prompt_entropy
from midlayer_encoders.metrics.first_token_share import FirstTokenShare, first_token_share

__all__ = [
    "CKA",
    "METRICS",
    "PAPER_METRICS",
    "AlphaReQ",
    "Anisotropy",
    "BlockInfluence",
    "Curvature",
    "DatasetEntropy",
    "DiME",
    "EffectiveRank",
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
    "FirstTokenShare",
    "TooFewTextsError",
    "alpha_req",
    "anisotropy",
    "block_influence",
    "cka",
    "curvature",
    "dataset_entropy",
    "dime",
    "effective_rank",
    "half_match",
    "infonce",
    "intrinsic_dimension",
    "lidar",
    "logdet_entropy",
    "make_metrics",
    "matrix_entropy",
    "neighbor_overlap",
    "prompt_effective_rank",
    "prompt_entropy",
    "first_token_share",
]

METRICS: dict[str, type[LayerMetric]] = {
    "prompt_entropy": PromptEntropy,
    "dataset_entropy": DatasetEntropy,
    "effective_rank": EffectiveRank,
    "curvature": Curvature,
    "infonce": InfoNCE,
    "lidar": LiDAR,
    "dime": DiME,
    "matrix_entropy": MatrixEntropy,
    "prompt_effective_rank": PromptEffectiveRank,
    "anisotropy": Anisotropy,
    "intrinsic_dimension": IntrinsicDimension,
    "alpha_req": AlphaReQ,
    "logdet_entropy": LogdetEntropy,
    "first_token_share": FirstTokenShare,
    "cka": CKA,
    "block_influence": BlockInfluence,
    "neighbor_overlap": NeighborOverlap,
    "half_match": HalfMatch,
}
"""Every metric by the one name that its file, function, command-line option and log key share."""

PAPER_METRICS = ("prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "infonce", "lidar", "dime")
"""The seven metrics of "Layer by Layer" (Skean et al., 2025)."""


def make_metrics(names: Literal["all", "paper"] | str | Sequence[str], layers: Sequence[int]) -> dict[str, LayerMetric]:
    """Return a new metric, with its default options, for each name.

    Args:
        names: ``"all"``, ``"paper"`` (the paper's seven), one name, or several.
        layers: layer numbers that updates will name.

    Example:
        >>> list(make_metrics(["curvature", "lidar"], layers=[0, 1, 2]))
        ['curvature', 'lidar']
    """
    groups = {"all": tuple(METRICS), "paper": PAPER_METRICS}
    if isinstance(names, str):
        check_choice("names", names, [*groups, *METRICS])
        names = groups.get(names, (names,))
    for name in names:
        check_choice("names", name, METRICS)
    if not names:
        raise OptionError(f"`names` must be 'all', 'paper', or some of {', '.join(METRICS)}, but got none.")
    return {name: METRICS[name](layers) for name in names}
