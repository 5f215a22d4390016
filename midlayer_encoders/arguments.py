"""Names and settings that Python functions and commands share, checked without torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from midlayer_encoders.errors import OptionError, short_repr
from midlayer_encoders.validation import check_choice, check_count, check_fields, check_number

#: The seven metrics of "Layer by Layer" (Skean et al., 2025).
PAPER_METRICS = ("prompt_entropy", "dataset_entropy", "effective_rank", "curvature", "infonce", "lidar", "dime")
#: All metrics by the name that the function, command-line option and log key share.
METRIC_NAMES = (
    *PAPER_METRICS,
    *("matrix_entropy", "prompt_effective_rank", "anisotropy", "intrinsic_dimension", "alpha_req", "logdet_entropy"),
    *("first_token_share", "cka", "block_influence", "neighbor_overlap", "half_match", "alignment", "uniformity"),
)
#: Names of a metric with other options.
METRIC_ALIASES = ("rankme", "exp_lidar", "raw_uniformity")
_NOT_COMPARABLE = ("matrix_entropy", "cka", "block_influence", "neighbor_overlap", "half_match")
#: Metrics that are defined for one layer and any subset of the texts.
COMPARABLE = tuple(name for name in METRIC_NAMES if name not in _NOT_COMPARABLE)

#: Every rule that chooses a layer.
RULE_NAMES = (
    *("last", "fixed-depth", "min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy"),
    *("valley-midpoint", "half-match", "few-labels", "auto"),
)

TokenBudget: TypeAlias = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class IntervalSettings:
    """Settings of the intervals of :func:`~midlayer_encoders.compare`.

    Attributes:
        resamples: Random halves of the texts, for the intervals. At least 2.
        confidence: of the intervals, from 0.001 to 0.999.
    """

    resamples: int = 50
    confidence: float = 0.95

    def __post_init__(self) -> None:
        check_fields(
            self,
            resamples=partial(check_count, minimum=2),
            confidence=partial(check_number, minimum=0.001, maximum=0.999),
        )


def metric_names(
    metrics: str | Sequence[str], known: Sequence[str] = METRIC_NAMES, aliases: Sequence[str] = METRIC_ALIASES
) -> tuple[str, ...]:
    """Return the names of metrics, each once, or raise an :class:`OptionError` if one is unknown.

    Args:
        metrics: ``"all"``, ``"paper"`` (the paper's seven), one name, or several.
        known: the names that ``"all"`` stands for.
        aliases: other names that may be requested.

    Example:
        >>> metric_names("paper")
        ('prompt_entropy', 'dataset_entropy', 'effective_rank', 'curvature', 'infonce', 'lidar', 'dime')
    """
    groups = {"all": tuple(known), "paper": PAPER_METRICS}
    names = [*known, *aliases]
    if isinstance(metrics, str):
        check_choice("metrics", metrics, [*groups, *names])
        return groups.get(metrics, (metrics,))
    if not isinstance(metrics, list | tuple) or not metrics:
        got = "none" if isinstance(metrics, list | tuple) else f"{short_repr(metrics)}. Write a list of names"
        raise OptionError(f"`metrics` must be 'all', 'paper', or some of {', '.join(names)}, but got {got}.")
    for name in metrics:
        check_choice("metrics", name, names)
    return tuple(dict.fromkeys(metrics))


def check_budget(token_budget: TokenBudget) -> TokenBudget:
    """Validate a number of tokens or ``"auto"``."""
    return "auto" if token_budget == "auto" else check_count("token_budget", token_budget, "tokens")
