"""The paper's experiments: run them, those over depth included, save their frames and figures, and write a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import polars as pl

from benchmarks.paper import charts, findings
from benchmarks.paper import token_experiments as tokens
from benchmarks.paper.charts import plot_correlations
from benchmarks.paper.setting import MissingInputError, Setting
from midlayer_encoders.comparing.correlation import correlate
from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError, error_summary, pluralize
from midlayer_encoders.files import folder_lock, read_artifact, write_file
from midlayer_encoders.frame.curves import curves
from midlayer_encoders.frame.schema import NamedSubject, read_parquet, tidy_frame, tidy_rows
from midlayer_encoders.frame.tidy_result import kept_frame, write_frame
from midlayer_encoders.report import plot_metrics, plot_steps_curves, write_figure
from midlayer_encoders.report.labels import number
from midlayer_encoders.report.pages import render, write_page
from midlayer_encoders.report.results import versions
from midlayer_encoders.selection import CannotChooseError, choose
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from matplotlib.figure import Figure


#: The template of the report.
TEMPLATE = Path(__file__).with_name("paper.html")
#: Rows of a table, the headings first.
Rows: TypeAlias = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class PaperExperiment:
    """One figure or table of the paper.

    Attributes:
        title: title of the figure.
        claim: claim of the paper.
        run: computes the frame.
        draw: returns the figure.
        describe: returns sentences that place the models beside the claim.
        table: returns table rows, headings first.
        inputs: what it reads, texts or solutions, and how many times ``limit`` of them; ``None`` for neither.
    """

    title: str
    claim: str
    run: Callable[[Setting], pl.DataFrame]
    draw: Callable[[pl.DataFrame], Figure]
    describe: Callable[[pl.DataFrame], list[str]]
    table: Callable[[pl.DataFrame], Rows] | None = None
    inputs: tuple[Literal["texts", "solutions"], int] | None = None


# --- Figure 1: scores by depth --------------------------------------------------------------------------------------


def scores_by_depth(setting: Setting) -> pl.DataFrame:
    """Return scores on the tasks by depth."""
    return pl.concat(frame.filter(kind="score") for frame in setting.sweeps())


# --- Figures 2, 10, 12: metrics by depth ----------------------------------------------------------------------------


def metrics_by_depth(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the models."""
    return pl.concat(setting.metrics(model) for model in setting.required_models())


# --- Figures 3, 8, 9: correlations ----------------------------------------------------------------------------------


def correlations(setting: Setting) -> pl.DataFrame:
    """Return the correlations of metrics with scores; they are saved because three figures use them."""
    return pl.concat(
        kept_frame(setting.out / "correlations" / f"sweep{index}-{setting.digest}.parquet", partial(correlate, frame))
        for index, frame in enumerate(setting.sweeps())
    )


def correlation_table(frame: pl.DataFrame, statistics: Sequence[str]) -> Rows:
    """Return a row for each model and metric: the correlations with ``p`` and threshold."""
    average = frame.filter(pl.col("task") == "average", pl.col("statistic") != "signed_dcor")
    rows: list[tuple[str, ...]] = [("model", "metric", *statistics)]
    for (model, metric), part in average.group_by("model", "metric", maintain_order=True):
        columns = part.select("statistic", "value", "p", "threshold")
        cells = {name: _correlation(*numbers) for name, *numbers in columns.iter_rows()}
        rows.append((str(model), str(metric), *(cells.get(name, "–") for name in statistics)))
    return tuple(rows)


def _correlation(value: float | None, p: float | None, threshold: float | None) -> str:
    if value is None or p is None:
        return "–"
    return (
        f"{number(value, 2)} (p {number(p, 2)}"
        + ("" if threshold is None else f", threshold {number(threshold, 2)}")
        + ")"
    )


# --- Figures 4 and 11: training -------------------------------------------------------------------------------------


def training(setting: Setting, names: Sequence[str]) -> pl.DataFrame:
    """Return metrics at every checkpoint of the first model."""
    from midlayer_encoders.comparing import progression

    if not setting.revisions:
        raise MissingInputError("It needs checkpoints of the first model: pass --revisions step1,step512,…")
    options = {
        **setting.options.non_defaults(),
        "max_length": setting.max_length,
        "revision": None,
        "seed": setting.seed,
    }
    texts = setting.required_texts(4)
    model = setting.required_models()[0]
    return progression(
        model, setting.revisions, texts=texts, metrics=list(names), views=4, progress=setting.progress, **options
    ).frame


# --- Figure 13: fine-tuning -----------------------------------------------------------------------------------------


def tuned_beside_base(setting: Setting) -> pl.DataFrame:
    """Return the metrics of the base model and of the tuned models on the same texts."""
    from midlayer_encoders.comparing import IntervalSettings, compare

    base, *tuned = (setting.load(model) for model in setting.required_models(2))
    intervals = IntervalSettings(resamples=20)
    texts = setting.required_texts(4)
    options: dict[str, Any] = {"views": 4, "seed": setting.seed, "intervals": intervals, "progress": setting.progress}
    return compare(base, *tuned, texts=texts, **options).frame


# --- Table 2: selection ---------------------------------------------------------------------------------------------

_RULES = ("last", "fixed-depth", "min-dime", "min-infonce", "min-dataset-entropy", "min-prompt-entropy")


def chosen_layers(setting: Setting) -> pl.DataFrame:
    """Return the chosen layer and its score for each model, task and rule."""
    parts = [part for frame in setting.sweeps() for part in frame.partition_by("model", maintain_order=True)]
    return pl.concat(_chosen_by_rules(part) for part in parts)


def _chosen_by_rules(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the chosen layer and its score for each task and rule, from metrics of the task's own texts if available.

    ``best`` is the one layer with the highest mean score. A layer that was not scored counts as the nearest that was.
    Tasks on which some rule lacks its metric are left out, so that the rules' means are over the same tasks.
    """
    scores, measured = (frame.filter(pl.col("kind") == kind) for kind in ("score", "metric"))
    mean_scores = curves(frame).score
    best = max(mean_scores, key=lambda layer: mean_scores[layer])
    rows: list[dict[str, Any]] = []
    for (task,), part in scores.group_by("dataset", maintain_order=True):
        task_metrics = measured.filter(pl.col("dataset") == task)
        task_curves = curves(pl.concat([part, measured if task_metrics.is_empty() else task_metrics]))
        subject = NamedSubject(task_curves.model, task_curves.revision, task_curves.num_layers)
        for rule in ("best", *_RULES):
            try:
                layer = best if rule == "best" else choose(task_curves, rule)[0]
            except CannotChooseError:
                continue
            nearest = min(task_curves.score, key=lambda scored: (abs(scored - layer), scored))
            values = {nearest: task_curves.score[nearest]}
            rows += tidy_rows(values, subject, kind="score", dataset=str(task), name=rule)
    chosen = tidy_frame(rows)
    common = chosen.filter(pl.len().over("dataset") == chosen["name"].n_unique())
    return chosen if common.is_empty() else common


def chosen_table(frame: pl.DataFrame) -> Rows:
    """Return the mean score of each rule, a column for each model."""
    models = frame["model"].unique(maintain_order=True).to_list()
    means = frame.group_by("model", "name").agg(pl.col("value").mean(), pl.len())
    cells = {
        (model, rule): f"{100 * value:.1f} ({pluralize(count, 'task')})"
        for model, rule, value, count in means.iter_rows()
    }
    rows = [(rule, *(cells.get((model, rule), "–") for model in models)) for rule in ("best", *_RULES)]
    return (("rule", *models), *rows)


# --- all experiments --------------------------------------------------------------------------------------------------

_VALLEY = "autoregressive models compress prompts at mid-depth, BERT hardly, Mamba evenly."
_GO_WITH = "metrics go with scores over layers: distance correlation, Spearman and Kendall are high."
_LEARN = "middle layers change most, early ones settle first."
_STATISTICS = ("spearman", "kendall", "dcor")
_ALL_METRICS = ("prompt_entropy", "dataset_entropy", "curvature", "infonce", "lidar", "dime")


def _depth_experiment(
    title: str, claim: str, draw: Callable[[pl.DataFrame], Figure], describe: Callable[[pl.DataFrame], list[str]]
) -> PaperExperiment:
    """Return an experiment on metrics by depth."""
    return PaperExperiment(title, claim, metrics_by_depth, draw, describe, inputs=("texts", 4))


def _correlation_experiment(title: str, *statistics: str) -> PaperExperiment:
    """Return an experiment on correlations of metrics with scores."""
    draw = partial(plot_correlations, statistics=statistics)
    describe = partial(findings.describe_correlations, statistics=statistics)
    table = partial(correlation_table, statistics=statistics)
    return PaperExperiment(title, _GO_WITH, correlations, draw, describe, table)


def _training_experiment(title: str, *names: str) -> PaperExperiment:
    """Return an experiment on metrics by training step."""
    run = partial(training, names=names)
    return PaperExperiment(title, _LEARN, run, plot_steps_curves, findings.describe_training, inputs=("texts", 4))


#: By the name that ``python -m benchmarks.paper`` takes.
EXPERIMENTS: dict[str, PaperExperiment] = {
    "fig1": PaperExperiment(
        "Scores by depth", "an intermediate layer beats the last by 2 to 16 points, at mid-depth.",
        scores_by_depth, charts.plot_score_curves, findings.describe_scores,
    ),
    "fig2": _depth_experiment("Entropy by depth", _VALLEY, charts.plot_entropies, findings.describe_valley),
    "fig3": _correlation_experiment("Metrics against scores", "dcor"),
    "fig4": _training_experiment("Metrics while a model learns", "prompt_entropy", "curvature", "lidar"),
    "fig5": PaperExperiment(
        "Entropy along the sequence", "tuning on chains of thought keeps prompt entropy higher, with less variance.",
        tokens.along_solutions, charts.plot_along, findings.describe_solutions, inputs=("solutions", 2),
    ),
    "fig6": PaperExperiment(
        "Extreme prompts",
        "repetition lowers entropy at mid-depth, random tokens raise it in early layers, length raises it in nats.",
        tokens.changed_prompts, charts.plot_prompts, findings.describe_prompts, inputs=("texts", 1),
    ),
    "fig7": PaperExperiment(
        "Orders of the entropy on power laws", "the larger the order, the more small eigenvalues contribute.",
        lambda _: tokens.order_entropies(), charts.plot_orders, findings.describe_orders,
    ),
    "fig8": _correlation_experiment("Metrics against scores, three measures", *_STATISTICS),
    "fig9": _correlation_experiment("Metrics against scores of BERT", *_STATISTICS),
    "fig10": _depth_experiment("All metrics by depth", _VALLEY, plot_metrics, findings.describe_valley),
    "fig11": _training_experiment("All metrics while a model learns", *_ALL_METRICS),
    "fig12": _depth_experiment(
        "Entropy by depth and size", "larger models have a deeper valley.", charts.plot_entropies, findings.describe_sizes
    ),
    "fig13": PaperExperiment(
        "Fine-tuning", "tuning for embeddings raises invariance; unsupervised raises, supervised lowers entropy.",
        tuned_beside_base, plot_metrics, findings.describe_tuning, inputs=("texts", 4),
    ),
    "fig15": PaperExperiment(
        "Inside the blocks", "the residual stream has the valley, what stands before each sum has not.",
        tokens.inside_blocks, charts.plot_subblocks, findings.describe_blocks, inputs=("texts", 1),
    ),
    "table2": PaperExperiment(
        "A layer without labels", "metrics choose a layer that beats the last.",
        chosen_layers, charts.plot_rules, findings.describe_rules, chosen_table,
    ),
}  # fmt: skip


_SETTING = "setting"  # metadata key of the digest of the setting

#: Measured now, measured by an earlier run, missing an input, or stopped by an error.
Status: TypeAlias = Literal["done", "kept", "left out", "failed"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one experiment.

    Attributes:
        name: name of the experiment.
        status: see :data:`Status`.
        reason: why there is no result; empty if there is one.
        seconds: duration.
        findings: sentences that place the models beside the claim.
        inputs: how many texts or solutions were used, and why; empty without any.
    """

    name: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    findings: tuple[str, ...] = ()
    inputs: str = ""


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


def reproduce(names: Sequence[str], setting: Setting) -> list[Outcome]:
    """Run experiments, write their frames and figures into the output folder, and return the outcomes.

    Experiments with a saved frame of the same setting do not run again. A missing input or an error does not stop the
    other experiments.

    Args:
        names: keys of :data:`~benchmarks.paper.reproduce.EXPERIMENTS`.
        setting: models, texts and options.
    """
    for name in names:
        check_choice("names", name, EXPERIMENTS)
    with folder_lock(setting.out):
        return [_outcome(name, setting) for name in names]


def _outcome(name: str, setting: Setting) -> Outcome:
    start = time.perf_counter()
    experiment = EXPERIMENTS[name]
    try:
        saved = _saved_frame(name, setting)
        frame = _measure(name, setting) if saved is None else saved
        sentences = tuple(experiment.describe(setting.with_typed_names(frame)))
        seconds = time.perf_counter() - start
        used = setting.used_inputs(*experiment.inputs) if experiment.inputs else ""
        return Outcome(name, "done" if saved is None else "kept", "", seconds, sentences, used)
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


def _measure(name: str, setting: Setting) -> pl.DataFrame:
    """Run an experiment, write figure, table and frame, and return the frame.

    The old frame is deleted first, and the new one, with the digest of the setting, is written last: an interrupted
    run never leaves a frame next to the figure of another.
    """
    digest = setting.digest
    frame = EXPERIMENTS[name].run(setting)
    if setting.digest != digest:
        raise MidlayerError("The files of the model or of the tasks changed while it ran: run it again.")
    (setting.out / f"{name}.parquet").unlink(missing_ok=True)
    write_figure(EXPERIMENTS[name].draw(setting.with_typed_names(frame)), setting.out / f"{name}.png", dpi=110)
    write_frame(frame, setting.out / f"{name}.csv")
    write_frame(frame, setting.out / f"{name}.parquet", metadata={_SETTING: digest})
    return frame


def write_experiments(outcomes: Sequence[Outcome], setting: Setting) -> Path:
    """Write ``report.html`` into the output folder and return its path.

    The page includes earlier experiments of the same setting.
    """
    by_name = {outcome.name: outcome for outcome in outcomes}
    for name in EXPERIMENTS:
        if name not in by_name and _saved_frame(name, setting) is not None:
            by_name[name] = _outcome(name, setting)
    outcomes = [by_name[name] for name in EXPERIMENTS if name in by_name]
    sections = []
    for outcome in outcomes:
        if outcome.status in ("done", "kept"):
            experiment = EXPERIMENTS[outcome.name]
            frame = setting.with_typed_names(pl.read_parquet(setting.out / f"{outcome.name}.parquet"))
            table = experiment.table(frame) if experiment.table is not None else ()
            section = {**asdict(outcome), "title": experiment.title, "claim": experiment.claim}
            sections.append({**section, "figure": experiment.draw(frame), "table": table})
    verbs = {"left out": "was left out", "failed": "failed"}
    notes = [
        f"{outcome.name} {verb}: {outcome.reason}"
        for status, verb in verbs.items()
        for outcome in outcomes
        if outcome.status == status
    ]
    how = {
        "Models": ", ".join(setting.models) or "none",
        **{f"Texts, {outcome.name}": outcome.inputs for outcome in outcomes if outcome.inputs},
        "Longest text": f"{setting.max_length} tokens, solutions twice that",
        "Tasks": setting.tasks,
        "Seed": str(setting.seed),
        **{f"Seconds, {outcome.name}": f"{outcome.seconds:.1f}" for outcome in outcomes if outcome.status == "done"},
        **versions(),
    }
    title = "The paper's experiments" + (f" on {', '.join(setting.models)}" if setting.models else "")
    write_file(setting.out / "outcomes.json", json.dumps([asdict(outcome) for outcome in outcomes], indent=2).encode())
    text = render(TEMPLATE, title=title, notes=notes, sections=sections, how=how)
    return write_page(text, setting.out / "report.html")
