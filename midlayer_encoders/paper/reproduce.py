"""Run the paper's experiments, save their frames and figures, and write a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import polars as pl

from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError, error_summary
from midlayer_encoders.files import check_links, folder_lock, read_artifact, write_file
from midlayer_encoders.frame.schema import read_parquet
from midlayer_encoders.paper import depth_figures as depth
from midlayer_encoders.paper import token_experiments as tokens
from midlayer_encoders.paper.setting import MissingInputError, Setting
from midlayer_encoders.report import paper_page as page
from midlayer_encoders.report import plot_metrics, plot_steps_curves, write_figure
from midlayer_encoders.report.layer_charts import plot_correlations
from midlayer_encoders.report.pages import render, write_page
from midlayer_encoders.report.results import versions, write_frame
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PaperExperiment:
    """One figure or table of the paper.

    Attributes:
        title: title of the figure.
        claim: claim of the paper.
        run: computes the frame.
        draw: returns the figure.
        table: returns table rows, headings first.
    """

    title: str
    claim: str
    run: Callable[[Setting], pl.DataFrame]
    draw: Callable[[pl.DataFrame], Figure]
    table: Callable[[pl.DataFrame], depth.Rows] | None = None


_VALLEY = "autoregressive models compress prompts at mid-depth, BERT hardly, Mamba evenly."
_GO_WITH = "metrics go with scores over layers: distance correlation, Spearman and Kendall are high."
_LEARN = "middle layers change most, early ones settle first."
_STATISTICS = ("spearman", "kendall", "dcor")
_ALL_METRICS = ("prompt_entropy", "dataset_entropy", "curvature", "infonce", "lidar", "dime")


def _depth_experiment(title: str, claim: str, draw: Callable[[pl.DataFrame], Figure]) -> PaperExperiment:
    """Return an experiment on metrics by depth."""
    return PaperExperiment(title, claim, depth.metrics_by_depth, draw)


def _correlation_experiment(title: str, *statistics: str) -> PaperExperiment:
    """Return an experiment on correlations of metrics with scores."""
    draw = partial(plot_correlations, statistics=statistics)
    table = partial(depth.correlation_table, statistics=statistics)
    return PaperExperiment(title, _GO_WITH, depth.correlations, draw, table)


def _training_experiment(title: str, *names: str) -> PaperExperiment:
    """Return an experiment on metrics by training step."""
    return PaperExperiment(title, _LEARN, partial(depth.training, names=names), plot_steps_curves)


EXPERIMENTS: dict[str, PaperExperiment] = {
    "fig1": PaperExperiment(
        "Scores by depth", "an intermediate layer beats the last by 2 to 16 points, at mid-depth.",
        depth.scores_by_depth, page.plot_score_curves,
    ),
    "fig2": _depth_experiment("Entropy by depth", _VALLEY, page.plot_entropies),
    "fig3": _correlation_experiment("Metrics against scores", "dcor"),
    "fig4": _training_experiment("Metrics while a model learns", "prompt_entropy", "curvature", "lidar"),
    "fig5": PaperExperiment(
        "Entropy along the sequence", "tuning on chains of thought keeps prompt entropy higher, with less variance.",
        tokens.along_solutions, page.plot_along,
    ),
    "fig6": PaperExperiment(
        "Extreme prompts",
        "repetition lowers entropy at mid-depth, random tokens raise it in early layers, length raises it in nats.",
        tokens.changed_prompts, page.plot_prompts,
    ),
    "fig7": PaperExperiment(
        "Orders of the entropy on power laws", "the larger the order, the more small eigenvalues contribute.",
        lambda _: tokens.order_entropies(), page.plot_orders,
    ),
    "fig8": _correlation_experiment("Metrics against scores, three measures", *_STATISTICS),
    "fig9": _correlation_experiment("Metrics against scores of BERT", *_STATISTICS),
    "fig10": _depth_experiment("All metrics by depth", _VALLEY, plot_metrics),
    "fig11": _training_experiment("All metrics while a model learns", *_ALL_METRICS),
    "fig12": _depth_experiment("Entropy by depth and size", "larger models have a deeper valley.", page.plot_entropies),
    "fig13": PaperExperiment(
        "Fine-tuning", "tuning for embeddings raises invariance; unsupervised raises, supervised lowers entropy.",
        depth.tuned_beside_base, plot_metrics,
    ),
    "fig15": PaperExperiment(
        "Inside the blocks", "the residual stream has the valley, what stands before each sum has not.",
        tokens.inside_blocks, page.plot_subblocks,
    ),
    "table2": PaperExperiment(
        "A layer without labels", "metrics choose a layer that beats the last.",
        depth.chosen_layers, page.plot_rules, depth.chosen_table,
    ),
}  # fmt: skip
"""By the name that ``midlayer reproduce`` takes."""


_SETTING = "setting"  # metadata key of the digest of the setting

Status: TypeAlias = Literal["done", "kept", "left out", "failed"]
"""Measured now, measured by an earlier run, missing an input, or stopped by an error."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one experiment.

    Attributes:
        name: name of the experiment.
        status: see :data:`Status`.
        reason: why there is no result; empty if there is one.
        seconds: duration.
    """

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0


def resolve_experiments(name: str) -> list[str]:
    """Return the experiments in a comma-separated list, or all for ``"all"``.

    Example:
        >>> resolve_experiments("fig6,fig7")
        ['fig6', 'fig7']
        >>> resolve_experiments("all")[:2]
        ['fig1', 'fig2']
    """
    if name == "all":
        return list(EXPERIMENTS)
    names = name.split(",")
    if "fig14" in names:
        raise OptionError("`figure` must not be fig14: it is `midlayer probe` that shows it, see docs/vision.md.")
    for experiment in names:
        check_choice("figure", experiment, ["all", *EXPERIMENTS])
    return names


def reproduce(
    names: Sequence[str], setting: Setting, *, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run experiments, write their frames and figures into the output folder, and return the outcomes.

    Experiments with a saved frame of the same setting do not run again. A missing input or an error does not stop the
    other experiments.

    Args:
        names: keys of :data:`~midlayer_encoders.paper.reproduce.EXPERIMENTS`.
        setting: models, texts and options.
        report: called with each outcome.
    """
    for name in names:
        check_choice("names", name, EXPERIMENTS)
    check_links(setting.out, [setting.out / name for name in ("sweeps", "metrics", "correlations")])
    outcomes = []
    with folder_lock(setting.out):
        for name in names:
            outcome = _outcome(name, setting)
            report(outcome)
            outcomes.append(outcome)
    return outcomes


def _outcome(name: str, setting: Setting) -> Outcome:
    start = time.perf_counter()
    try:
        saved = _saved_frame(name, setting)
        if saved is None:
            _measure(name, setting)
        return Outcome(name, "done" if saved is None else "kept", seconds=time.perf_counter() - start)
    except DiskFullError:  # the next experiment would fail too
        raise
    except MissingInputError as error:
        return Outcome(name, "left out", str(error))
    except Exception as error:  # the other experiments still run
        text = str(error) if isinstance(error, MidlayerError) else error_summary(error)
        return Outcome(name, "failed", text, time.perf_counter() - start)


def _saved_frame(name: str, setting: Setting) -> pl.DataFrame | None:
    """Return the frame of an earlier run with the same setting, if any."""
    digest = setting.digest
    frame, metadata = read_artifact(setting.out / f"{name}.parquet", read_parquet) or (None, {})
    return frame if metadata.get(_SETTING) == digest else None


def _measure(name: str, setting: Setting) -> None:
    """Run an experiment and write figure, table and frame.

    The old frame is deleted first, and the new one, with the digest of the setting, is written last: an interrupted
    run never leaves a frame next to the figure of another.
    """
    digest = setting.digest
    frame = EXPERIMENTS[name].run(setting)
    if setting.digest != digest:
        raise MidlayerError("The files of the model or of the tasks changed while it ran: run it again.")
    (setting.out / f"{name}.parquet").unlink(missing_ok=True)
    write_figure(EXPERIMENTS[name].draw(frame), setting.out / f"{name}.png", dpi=110)
    write_frame(frame, setting.out / f"{name}.csv")
    write_frame(frame, setting.out / f"{name}.parquet", metadata={_SETTING: digest})


def write_experiments(outcomes: Sequence[Outcome], setting: Setting) -> Path:
    """Write ``report.html`` into the output folder and return its path.

    The page includes earlier experiments of the same setting.
    """
    by_name = {outcome.name: outcome for outcome in outcomes}
    for name in EXPERIMENTS:
        if name not in by_name and _saved_frame(name, setting) is not None:
            by_name[name] = _outcome(name, setting)
    outcomes = [by_name[name] for name in EXPERIMENTS if name in by_name]
    findings = []
    for outcome in outcomes:
        if outcome.status in ("done", "kept"):
            experiment = EXPERIMENTS[outcome.name]
            frame = pl.read_parquet(setting.out / f"{outcome.name}.parquet")
            finding = {"name": outcome.name, "title": experiment.title, "claim": experiment.claim}
            table = experiment.table(frame) if experiment.table is not None else ()
            findings.append({**finding, "figure": experiment.draw(frame), "table": table})
    verbs = {"left out": "was left out", "failed": "failed"}
    notes = [
        f"{outcome.name} {verb}: {outcome.reason}"
        for status, verb in verbs.items()
        for outcome in outcomes
        if outcome.status == status
    ]
    how = {
        "Models": ", ".join(setting.models) or "none",
        "Texts": f"{len(setting.texts)} given; prompts take the first {setting.limit}, metrics {4 * setting.limit}",
        "Solutions": f"{len(setting.solutions)} given, the first {2 * setting.limit} used",
        "Longest text": f"{setting.max_length} tokens, solutions twice that",
        "Tasks": setting.tasks,
        "Seed": str(setting.seed),
        **{f"Seconds, {outcome.name}": f"{outcome.seconds:.1f}" for outcome in outcomes if outcome.status == "done"},
        **versions(),
    }
    title = "The paper's experiments" + (f" on {', '.join(setting.models)}" if setting.models else "")
    write_file(setting.out / "outcomes.json", json.dumps([asdict(outcome) for outcome in outcomes], indent=2).encode())
    text = render("paper.html", title=title, notes=notes, findings=findings, how=how)
    return write_page(text, setting.out / "report.html")
