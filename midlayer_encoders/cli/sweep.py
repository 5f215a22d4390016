"""``midlayer sweep`` and ``report``: score every layer of a model on tasks, and write the page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from midlayer_encoders._types import READ_SITES
from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.sweeping import RecipesResult, SweepResult

ONE_PASS_METRICS = ("prompt_entropy", "dataset_entropy", "effective_rank", "curvature")
"""The paper's metrics that compare no views of a text."""

STAGES = {
    "reading": "tasks read",
    "planning": "tasks planned",
    "embedding": "texts embedded",
    "scoring": "layers scored",
    "comparing": "texts embedded by all-MiniLM-L6-v2",
    "confirming": "layers confirmed by mteb",
    "measuring": "texts measured",
}


@command(
    "Find the layer",
    "midlayer sweep MODEL --tasks ./reviews.jsonl --out runs/reviews",
    "midlayer sweep built-in --tasks builtin --recipes plain,one-word",
)
def sweep(
    *,
    model: _arguments.Model,
    tasks: Annotated[
        str, typer.Option(help="mteb tasks or benchmarks, paper, builtin, or paths of your data, separated by commas.")
    ],
    layers: _arguments.LayersWords = "all",
    recipes: _arguments.RecipeNames = None,
    site: _arguments.SiteName = "block",
    metrics: Annotated[
        str, typer.Option(help="none, paper, all, or names separated by commas; the default needs one pass.")
    ] = ",".join(ONE_PASS_METRICS),
    out: Annotated[Path | None, typer.Option(help="Folder for frame, results and page.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of embeddings, which sweeps can share.")] = None,
    store_dtype: Annotated[str, typer.Option(help="float32, or float16 to halve the disk space.")] = "float32",
    half: Annotated[bool, typer.Option("--half", help="The same as --store-dtype float16.")] = False,
    scoring: Annotated[
        str, typer.Option(help="together scores all layers at once and confirms the best with mteb; mteb uses only it.")
    ] = "together",
    workers: Annotated[
        int | None, typer.Option(help="Processes for scoring with mteb; by default one per core.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Processes per machine that share the sweep.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Machines that share the sweep, started by torchrun or SLURM.")] = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the blocks; worth it for many texts.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print how each task is read and the estimated time; write nothing.")
    ] = False,
    options: EncoderOptions,
) -> None:
    """Score every layer of a model on tasks, from one forward pass over each text."""
    _arguments.silence_libraries()
    from midlayer_encoders.files import folder_lock
    from midlayer_encoders.models.hub import check_model
    from midlayer_encoders.tasks import task_sources

    check_choice("--site", site, READ_SITES)
    check_choice("--scoring", scoring, ("together", "mteb"))
    if not dry_run:  # a dry run reports what it can without the model
        check_model(model, options.revision, gguf_file=options.gguf_file)  # before mteb and torch are imported
    first = _is_first(devices, num_nodes)
    if not first:
        _progress.silence()
    from midlayer_encoders.sweeping import SweepSettings

    arguments: dict[str, Any] = {
        "layers": _arguments.parse_layers(layers),
        "site": site,
        "metrics": _arguments.parse_metrics(metrics),
        "settings": SweepSettings(
            scoring=cast(Any, scoring),
            workers=workers,
            store_dtype="float16" if half else cast(Any, store_dtype),
            compile=compiled,
            devices=devices,
            num_nodes=num_nodes,
        ),
    }
    if dry_run:
        arguments["recipes"], options = _arguments.parse_recipes(recipes, options)
        _preview(model, tasks.split(","), **arguments, **options.changed())
        return
    with _progress.show_waiting("tasks", "Reading the tasks"):
        task_sources(tasks.split(","))  # refuses unknown tasks before the model is loaded
    arguments["recipes"], options = _arguments.parse_recipes(recipes, options)
    if first and out is not None and out.is_dir():
        with folder_lock(out):  # refuses a folder that another sweep is writing
            pass
    if first:
        _print_cost(arguments["metrics"])
    run_sweep(_arguments.load_model(model, options), tasks.split(","), out=out, store=store, **arguments)


def _preview(model: str, tasks: list[str], **arguments: Any) -> None:
    """Print what a sweep would do; exit with 1 if it would fail."""
    from midlayer_encoders.cli._dry_run import print_preview
    from midlayer_encoders.sweeping import preview

    with _progress.show_progress({"looking": "tasks read", "timing": "batches and tasks timed"}) as progress:
        result = preview(model, tasks, progress=progress, **arguments)
    print_preview(result)
    if result.error is not None or any(task.error is not None for task in result.tasks):
        raise typer.Exit(1)


def _is_first(devices: int, num_nodes: int) -> bool:
    """Return True in the process that prints the result of a shared sweep."""
    return devices * num_nodes <= 1 or _progress.is_first_process()


def _print_cost(metrics: str | list[str]) -> None:
    """Print the cost of metrics that compare views."""
    from midlayer_encoders.measuring import num_passes
    from midlayer_encoders.sweeping import SweepSettings

    passes = num_passes(metrics, views=SweepSettings.views) if metrics else 0
    texts = SweepSettings.metric_texts
    if passes > 1:
        _output.print_text(
            f"The metrics read {texts} texts {passes} times, once and as {passes - 1} views, which costs as much as "
            f"embedding {texts * passes:,} texts."
        )


def run_sweep(encoder: LayerEncoder, tasks: list[str], **arguments: Any) -> None:
    """Run a sweep with progress, and print its table and report; exit with 1 if a task failed."""
    from midlayer_encoders import sweeping

    with _progress.show_progress(STAGES) as progress:
        result = sweeping.sweep(encoder, tasks, progress=progress, **arguments)
    settings = arguments.get("settings")
    if settings is not None and not _is_first(settings.devices, settings.num_nodes):
        return
    site = arguments.get("site", "block")
    lines = encoder_lines(result) if site == "block" and _has_best(result) else None
    page = None if result.frame.is_empty() else result.to_html()  # empty if every task failed
    _output.print_result(
        **_result_values(result),
        folder=result.folder,
        report=page,
        failures=result.failures,
        export=None if lines is None else {"shell": lines["shell"], "python": lines["Python"]},
    )
    _print_scores(result)
    _output.print_failures(result.failures)
    if page is not None:
        _output.print_report(page)
    if set(result.frame["kind"]) == {"metric"} and not result.failures:
        line = shlex.join(["midlayer", "select", result.notes.model, "--texts", tasks[0]])
        _output.print_text(
            f"Nothing was scored: there are no labels. To choose a layer without labels: {line}", wrap=False
        )
    elif site != "block":
        _output.print_text(f"The {site} of a layer cannot be exported as an encoder.")
    elif lines is not None:
        _output.print_encoder_lines(lines)
    if result.failures:
        raise typer.Exit(1)


def _has_best(result: SweepResult) -> bool:
    """Return True if a layer was scored on every task."""
    return bool(result.frame.filter(kind="score").height) and result.summary().average is not None


def encoder_lines(result: SweepResult) -> dict[str, str]:
    """Return the command and the Python expression that create the encoder of the best layer."""
    from midlayer_encoders.sweeping.sweep_result import export_lines

    return export_lines(result.notes, result.best())


def _result_values(result: SweepResult) -> dict[str, Any]:
    """Return the best layer of a sweep, on average and for each task, in points."""
    from midlayer_encoders.sweeping import RecipesResult

    if not _has_best(result):
        return {"model": result.notes.model, "best_layer": None}
    recipe = {"recipe": result.recipe} if isinstance(result, RecipesResult) else {}
    summary = (result.winner if isinstance(result, RecipesResult) else result).summary()
    points = {
        curve.name: {"best_layer": curve.best_layer, "best": curve.best, "last": curve.last, "layers": curve.points}
        for curve in (*summary.tasks, summary.average)
        if curve is not None
    }
    average = points.pop("average")
    baselines = {
        name: {task: 100 * score for task, score in scores.items()} for name, scores in result.notes.baselines.items()
    }
    model = {"model": summary.model, "revision": summary.revision, "num_layers": summary.num_layers}
    return {**model, **recipe, **average, "tasks": points, "baselines": baselines}


def _print_scores(result: SweepResult) -> None:
    """Print a row for each layer, a column for each task, and the gain of the best layer over the last."""
    from midlayer_encoders.frame import average_baseline
    from midlayer_encoders.report.sweep_page import confirmed_words
    from midlayer_encoders.sweeping import RecipesResult
    from midlayer_encoders.sweeping.sweep_result import task_labels

    if result.frame.filter(kind="score").is_empty():
        return
    notes = result.notes
    title = notes.title
    if isinstance(result, RecipesResult):
        _print_recipes(result)
        title += f" under {result.recipe}"
        result = result.winner
    summary = result.summary()
    average = summary.average
    labels = task_labels([curve.name for curve in summary.tasks])
    headings = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", labels[curve.name]) for curve in summary.tasks]
    curves = [*summary.tasks, *([average] if average else [])]
    layers = sorted(result.frame.filter(kind="score")["layer"].unique().to_list())
    rows = [[str(layer), *(_points(curve.points.get(layer)) for curve in curves)] for layer in layers]
    for name, scores in notes.baselines.items():
        task_scores = [scores.get(curve.name) for curve in summary.tasks]  # BM25 has scores for ranking tasks only
        points = [None if score is None else 100 * score for score in task_scores]
        points += [average_baseline(summary, scores)] if average else []
        rows.append([name, *map(_points, points)])
    best = None if average is None else layers.index(average.best_layer)
    columns = ["layer", *headings, *(["mean"] if average else [])]
    _output.print_table(columns, rows, title=title, bold=best, sections=[len(layers)])
    for sentence in notes.missing:
        _output.print_text(sentence)
    if average is not None:
        last = "the last layer" if average.last_layer == summary.num_layers else f"layer {average.last_layer}"
        _output.print_text(
            f"Best layer: {average.best_layer} of {summary.num_layers}, {average.best:.1f} points, "
            f"{average.gain:+.1f} over {last}."
        )
    for sentence in confirmed_words(result.frame):
        _output.print_text(sentence)


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print_recipes(result: RecipesResult) -> None:
    """Print each recipe at its best layer, and the gain of the best recipe."""
    from midlayer_encoders.report.score_charts import recipe_rows, recipe_words
    from midlayer_encoders.tasks import task_label

    summaries = result.summaries()
    head, *rows = recipe_rows(summaries, result.notes.baselines)
    best = [row[0] for row in rows].index(result.recipe)
    _output.print_table([task_label(word) for word in head], rows, title="Recipes at their best layers", bold=best)
    _output.print_text(recipe_words(summaries))


@command("Find the layer", "midlayer report runs/reviews", "midlayer report runs/reviews --json", quiet=False)
def report(folder: Annotated[Path, typer.Argument(help="The --out of a sweep.")]) -> None:
    """Write the page of a sweep again from its results."""
    from midlayer_encoders.sweeping import SweepResult

    page = SweepResult.load(folder).to_html()
    _output.print_result(folder=folder, report=page)
    _output.print_report(page)
