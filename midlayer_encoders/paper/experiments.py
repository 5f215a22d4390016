"""The paper's figures, tables and theorems: claims, runs and charts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from midlayer_encoders.paper.depth_figures import (
    Rows,
    chosen_layers,
    chosen_table,
    chosen_words,
    correlation_table,
    correlation_words,
    correlations,
    metrics_beside,
    score_words,
    scores_by_depth,
    training,
    training_words,
    tuned_beside_base,
    tuned_words,
    valley_words,
)
from midlayer_encoders.paper.renyi_orders import order_entropies
from midlayer_encoders.paper.setting import Setting
from midlayer_encoders.paper.theorems import STATEMENTS, check_theorems
from midlayer_encoders.paper.token_figures import (
    along_solutions,
    along_words,
    changed_prompts,
    inside_blocks,
    inside_words,
    order_words,
    prompt_words,
    theorem_table,
    theorem_words,
)
from midlayer_encoders.report import plot_metrics, plot_steps_curves
from midlayer_encoders.report.layer_charts import plot_correlations
from midlayer_encoders.report.paper_page import (
    plot_along,
    plot_orders,
    plot_prompts,
    plot_rules,
    plot_score_curves,
    plot_subblocks,
    plot_theorems,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PaperExperiment:
    """One figure, table or theorem of the paper.

    Attributes:
        title: title of the figure.
        claim: claim of the paper.
        run: computes the frame.
        words: returns sentences that compare the frame with the claim.
        draw: returns the figure.
        table: returns table rows, headings first.
    """

    title: str
    claim: str
    run: Callable[[Setting], pl.DataFrame]
    words: Callable[[pl.DataFrame], list[str]]
    draw: Callable[[pl.DataFrame], Figure]
    table: Callable[[pl.DataFrame], Rows] | None = None


_VALLEY = "autoregressive models compress prompts at mid-depth, BERT hardly, Mamba evenly."
_GO_WITH = "metrics go with scores over layers: distance correlation, Spearman and Kendall are high."

EXPERIMENTS: dict[str, PaperExperiment] = {
    "fig1": PaperExperiment(
        "Scores by depth", "an intermediate layer beats the last by 2 to 16 points, at mid-depth.",
        scores_by_depth, score_words, plot_score_curves,
    ),
    "fig2": PaperExperiment(
        "Metrics by depth of three architectures", _VALLEY,
        metrics_beside(["Pythia-410m", "mamba-370m", "bert-base"]), valley_words, plot_metrics,
    ),
    "fig3": PaperExperiment(
        "Metrics against scores", _GO_WITH, correlations(["Pythia-410m"]), correlation_words,
        lambda frame: plot_correlations(frame, statistics=["dcor"]),
        table=lambda frame: correlation_table(frame, ["dcor"]),
    ),
    "fig4": PaperExperiment(
        "Metrics while a model learns", "middle layers change most, early ones settle first.",
        training(["prompt_entropy", "curvature", "lidar"]), training_words, plot_steps_curves,
    ),
    "fig5": PaperExperiment(
        "Entropy along the sequence", "tuning on chains of thought keeps prompt entropy higher, with less variance.",
        along_solutions, along_words, plot_along,
    ),
    "fig6": PaperExperiment(
        "Extreme prompts",
        "repetition lowers entropy at mid-depth, random tokens raise it in early layers, length raises it in nats.",
        changed_prompts, prompt_words, plot_prompts,
    ),
    "fig7": PaperExperiment(
        "Orders of the entropy on power laws", "the larger the order, the more small eigenvalues contribute.",
        lambda _: order_entropies(), order_words, plot_orders,
    ),
    "fig8": PaperExperiment(
        "Metrics against scores, three measures", _GO_WITH, correlations(["Pythia-410m"]), correlation_words,
        plot_correlations, table=correlation_table,
    ),
    "fig9": PaperExperiment(
        "Metrics against scores of BERT", _GO_WITH, correlations(["bert-base", "bert-large"]), correlation_words,
        plot_correlations, table=correlation_table,
    ),
    "fig10": PaperExperiment(
        "All metrics by depth, Pythia and Mamba", _VALLEY,
        metrics_beside(["Pythia-410m", "mamba-370m"]), valley_words, plot_metrics,
    ),
    "fig11": PaperExperiment(
        "All metrics while a model learns", "middle layers change most, early ones settle first.",
        training(["prompt_entropy", "dataset_entropy", "curvature", "infonce", "lidar", "dime"]), training_words,
        plot_steps_curves,
    ),
    "fig12": PaperExperiment(
        "Metrics by depth and size", "larger models have a deeper valley.",
        metrics_beside([f"Pythia-{size}" for size in ("14m", "70m", "160m", "410m", "1b", "1.4b", "2.8b")]),
        valley_words, plot_metrics,
    ),
    "fig13": PaperExperiment(
        "Fine-tuning", "tuning for embeddings raises invariance; unsupervised raises, supervised lowers entropy.",
        tuned_beside_base, tuned_words, plot_metrics,
    ),
    "fig15": PaperExperiment(
        "Inside the blocks", "the residual stream has the valley, what stands before each sum has not.",
        inside_blocks, inside_words, plot_subblocks,
    ),
    "table2": PaperExperiment(
        "A layer without labels", "metrics choose a layer that beats the last.",
        chosen_layers, chosen_words, plot_rules, table=chosen_table,
    ),
    "theorems": PaperExperiment(
        "Theorems 1 to 3", "EffRank <= exp S1; prompt entropy bounds the growth of dataset entropy; InfoNCE bounds H.",
        lambda setting: check_theorems(seed=setting.seed), theorem_words,
        lambda frame: plot_theorems(frame, STATEMENTS), table=theorem_table,
    ),
}  # fmt: skip
"""By the name that ``midlayer reproduce`` takes."""
