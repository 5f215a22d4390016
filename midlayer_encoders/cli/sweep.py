"""``midlayer sweep`` and ``board``: score every layer of a model on tasks, and write the pages."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.markup import escape
from typer import Argument, Exit, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command, parse_sizes
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from midlayer_encoders.extras.boards import Board
    from midlayer_encoders.sweeping import SweepResult
    from midlayer_encoders.sweeping.request import Sweep

#: The paper's metrics that compare no views of a text.
ONE_PASS_METRICS = ("prompt_entropy", "dataset_entropy", "effective_rank", "curvature")
_DEFAULT_METRICS = ",".join(ONE_PASS_METRICS)

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9}

STAGES = {
    "reading": "tasks read",
    "planning": "tasks planned",
    "embedding": "texts embedded",
    "scoring": "layers scored",
    "comparing": "texts embedded by all-MiniLM-L6-v2",
    "confirming": "layers confirmed by mteb",
    "measuring": "tokens measured",
    "computing": "metrics computed",
}


@command("Find the layer")
def sweep(
    *,
    models: Annotated[
        list[str], Argument(metavar="MODEL...", help="Folders, llama.cpp files, hub names, name@revision, or built-in.")
    ],
    tasks: Annotated[str, Option(help="mteb tasks or benchmarks, paper, builtin, or paths, separated by commas.")],
    data: _arguments.Data,
    limit: Annotated[int | None, Option(help="Score a sample of at most LIMIT rows of each split.")] = None,
    layers: _arguments.Layers = "all",
    recipes: _arguments.RecipeNames = None,
    dims: Annotated[str | None, Option(help="64,128: also score vectors of these sizes.")] = None,
    precisions: Annotated[str | None, Option(help="int8,binary: quantize vectors, with each of --dims.")] = None,
    metrics: Annotated[str, Option(help="none, paper, all, or names.")] = _DEFAULT_METRICS,
    no_baselines: Annotated[bool, Option("--no-baselines", help="Do not score TF-IDF and MiniLM.")] = False,
    out: Annotated[Path | None, Option(help="Folder for frame, results and page.")] = None,
    store: Annotated[Path | None, Option(help="Folder of embeddings, which sweeps can share.")] = None,
    half: Annotated[bool, Option("--half", help="Store vectors in float16, in half the disk space.")] = False,
    scoring: Annotated[Literal["together", "mteb"], Option(help="mteb scores each layer by itself.")] = "together",
    workers: Annotated[int | None, Option(help="Processes for scoring with mteb; by default one per core.")] = None,
    execution: _arguments.Execution,
    options: EncoderOptions,
) -> None:
    """Score every layer of a model on tasks, from one forward pass over each text.

    Examples:
        midlayer sweep MODEL --tasks ./reviews.jsonl --out runs/reviews
        midlayer sweep built-in --tasks builtin --recipes plain,one-word
    """
    from midlayer_encoders.files import folder_lock
    from midlayer_encoders.models.hub import name_and_revision
    from midlayer_encoders.sweeping.request import Sweep, SweepSettings

    model, *others = models
    is_alone = not others and execution.executor is None
    if is_alone:
        model, revision = name_and_revision(model)
        options = options if revision is None else replace(options, revision=revision)
    settings = SweepSettings(scoring=scoring, workers=workers, store_dtype="float16" if half else "float32")
    recipe_list, options = _arguments.parse_recipes(recipes, options)
    request = Sweep(
        model,
        tasks.split(","),
        **asdict(data),
        limit=limit,
        layers=layers,
        recipes=recipe_list,
        dims=parse_sizes("dims", dims),
        precisions=[] if precisions is None else precisions.split(","),  # type: ignore[arg-type]  # validated
        metrics=_arguments.parse_metrics(metrics),
        baselines=not no_baselines,
        out=out if is_alone else None,
        store=store,
        settings=settings,
        **options.changed(),
    )
    if not is_alone:
        _sweep_models(request, models, out or Path("midlayer-results"), execution)
        return
    _arguments.check_model(model, options)  # before mteb and torch are imported
    with _progress.show_waiting("tasks", "Reading the tasks"):
        sources = request.sources
    if out is None or not out.is_dir():
        from midlayer_encoders.sweeping.mteb_jobs import check_data  # imports mteb and torch

        check_data(sources)
    else:
        with folder_lock(out):  # refuses a folder that another sweep is writing
            pass
    encoder = _arguments.load_model(model, options)
    request = request.change(model=encoder, options={})
    if metrics == _DEFAULT_METRICS:
        try:
            encoder.check_one_stack("metrics")
        except OptionError as reason:
            request = request.change(metrics=())
            _output.print_text(f"No metrics: {reason}")
    from midlayer_encoders.sweeping import layer_sweep

    with _progress.show_progress(STAGES) as progress:
        result = layer_sweep.run_sweep(request.change(progress=progress))
    print_sweep(result, request)


def _sweep_models(request: Sweep, models: list[str], out: Path, execution: _arguments.Execution) -> None:
    """Sweep several models, or one on an executor, and print its table or the board of all."""
    from midlayer_encoders import board
    from midlayer_encoders.sweeping.sweeps import sweep_models

    titles = {**STAGES, "units": "units done"}
    with _progress.show_progress(titles) as progress, execution.open(out / "jobs") as executor:
        results = sweep_models(request.change(progress=progress, executor=executor), models, out)
    if len(results) == 1:
        (result,) = results.values()
        print_sweep(result, request)
        return
    failures = {f"{name}, {task}": error for name, result in results.items() for task, error in result.failures.items()}
    _output.print_failures(failures)
    for result in results.values():
        if not result.frame.is_empty():
            result.to_html()
    _print_board(board([result.folder for result in results.values()]), out / "board.html")
    if failures:
        raise Exit(1)


def print_sweep(result: SweepResult, request: Sweep) -> None:
    """Print the table of a sweep, and where its page is; exit with 1 if a task failed."""
    from midlayer_encoders.files import shell_path
    from midlayer_encoders.sweeping.best_layer import export_lines

    _print_scores(result)
    _output.print_failures(result.failures)
    page = None
    if not result.frame.is_empty():  # empty if every task failed
        page = result.to_html()
        _output.print_report(page)
    export = None
    if set(result.frame["kind"]) == {"metric"} and not result.failures:
        line = f"midlayer select {shell_path(result.notes.model)} --texts {shell_path(request.tasks[0])}"
        if request.columns.text_column is not None:
            line += f" --text-column {shell_path(request.columns.text_column)}"
        advice = f"Nothing was scored: there are no labels. To choose a layer without labels: {line}"
        _output.print_text(advice, wrap=False)
    elif _has_best(result):
        export = _output.print_encoder_lines(export_lines(result.notes, result.best()), f"layer {result.best()}")
    values = result_values(result)
    _output.print_result(**values, folder=result.folder, report=page, failures=result.failures, export=export)
    if result.failures:
        raise Exit(1)


def _has_best(result: SweepResult) -> bool:
    """Return True if a layer was scored on every task."""
    return bool(result.frame.filter(kind="score").height) and result.curves.average is not None


def result_values(result: SweepResult) -> dict[str, Any]:
    """Return the best layer of a sweep, on average and for each task, in points."""
    from midlayer_encoders.sweeping.sweep_result import task_labels

    if not _has_best(result):
        return {"model": result.notes.model, "best_layer": None}
    recipe = {"recipe": result.recipe, **result.notes.compression} if result.parts else {}
    summary = result.curves
    labels = task_labels([curve.name for curve in summary.tasks])
    points = {
        labels.get(curve.name, curve.name): {
            "best_layer": curve.best_layer,
            "best": curve.best,
            "last": curve.last,
            "layers": curve.points,
        }
        for curve in (*summary.tasks, summary.average)
        if curve is not None
    }
    average = points.pop("average")
    baselines = {
        name: {labels.get(task, task): 100 * score for task, score in scores.items()}
        for name, scores in result.notes.baselines.items()
    }
    revision = None if summary.revision == "default" else summary.revision
    model = {"model": result.notes.model, "revision": revision, "num_layers": summary.num_layers}
    gain = result.gain()
    gains = {"gain": gain.points, "interval": gain.interval}
    rows = {labels.get(task, task): counts for task, counts in result.notes.rows.items()}
    sampled = {"rows": rows} if rows else {}
    leads = {name: {"gain": lead.points, "interval": lead.interval} for name, lead in result.baseline_gains().items()}
    words = {"verdict": result.verdict(), "baseline_gains": leads}
    return {**words, **model, **recipe, **average, **gains, "tasks": points, "baselines": baselines, **sampled}


def _print_scores(result: SweepResult) -> None:
    """Print a row for each layer, and a column for each task."""
    import polars as pl

    from midlayer_encoders.frame.summaries import average_baseline
    from midlayer_encoders.report.sweep_page import confirmed_words
    from midlayer_encoders.sweeping.sweep_result import task_labels

    if result.frame.filter(kind="score").is_empty():
        return
    notes, verdict = result.notes, result.verdict()
    num_kept, num_scores = result.num_kept, result.frame.filter(kind="score").height
    title = notes.title
    if result.parts:
        _print_recipes(result)
        title += f" under {result.recipe}"
    result = result.winner
    summary = result.curves
    average = summary.average
    mean = average if len(summary.tasks) > 1 else None
    labels = task_labels([curve.name for curve in summary.tasks])
    headings = [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", labels[curve.name]) for curve in summary.tasks]
    curves = [*summary.tasks, *([mean] if mean else [])]
    layers = sorted(result.frame.filter(kind="score")["layer"].unique().to_list())
    rows = [[str(layer), *(_points(curve.points.get(layer)) for curve in curves)] for layer in layers]
    for name, scores in notes.baselines.items():
        task_scores = [scores.get(curve.name) for curve in summary.tasks]
        points = [None if score is None else 100 * score for score in task_scores]
        points += [average_baseline(summary, scores)] if mean else []
        rows.append([name, *map(_points, points)])
    best = None if average is None else layers.index(average.best_layer)
    columns = ["layer", *headings, *(["mean"] if mean else [])]
    _output.print_table(columns, rows, title=title, bold=best, sections=[len(layers)])
    for sentence in verdict:
        _output.print_text(sentence)
    kept = f"{num_kept} of {num_scores} scores were there from an earlier run." if num_kept else ""
    failed = [remark for remark in notes.remarks if remark.startswith("mteb could not score")]
    unscored = [remark for remark in summary.remarks if remark.startswith("No layer")]
    confirmed = confirmed_words(result.frame.with_columns(pl.col("dataset").replace(labels)))
    for sentence in filter(None, [kept, confirmed, *failed, *unscored, *result.sample_words()]):
        _output.print_text(sentence)


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print_recipes(result: SweepResult) -> None:
    """Print each recipe at its best layer."""
    from midlayer_encoders.report.layer_charts import recipe_rows
    from midlayer_encoders.tasks import task_label

    summaries, gains = result.summaries(), result.gains()
    head, *rows = recipe_rows(summaries, result.notes.baselines, gains)
    best = [row[0] for row in rows].index(result.recipe)
    _output.print_table([task_label(word) for word in head], rows, title="Recipes at their best layers", bold=best)


@command("Find the layer", name="board", quiet=False)
def board_command(
    *,
    runs: Annotated[list[str], Argument(help="Folders of sweeps (their --out), or folders that hold several.")],
    out: Annotated[Path, Option(help="Page to write, or its folder.")] = Path("midlayer-results/board.html"),
    max_params: Annotated[str | None, Option(help="Maximum number of parameters: 100M, 1.5B, 22000000.")] = None,
    max_ms: Annotated[float | None, Option(help="Maximum milliseconds per text.")] = None,
    max_bytes: Annotated[float | None, Option(help="Maximum bytes per vector.")] = None,
) -> None:
    """Compare many sweeps on one page, score against cost, and print the best encoder within a budget.

    Examples:
        midlayer board runs/one runs/two
        midlayer board runs --max-params 100M --max-ms 5
    """
    from midlayer_encoders.extras.boards import board

    max_parameters = None if max_params is None else parse_amount(max_params)
    result = board(runs, max_parameters=max_parameters, max_milliseconds=max_ms, max_bytes=max_bytes)
    _print_board(result, out)


def parse_amount(text: str) -> float:
    """Return a number from a word with an optional unit.

    Example:
        >>> parse_amount("100M"), parse_amount("1.5B"), parse_amount("22_000_000")
        (100000000.0, 1500000000.0, 22000000.0)
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmbg]?)", text.strip().replace("_", "").lower())
    if match is None:
        raise OptionError(f"`--max-params` must be a number such as 100M, 1.5B or 22000000, but got {text!r}.")
    return float(match[1]) * _UNITS[match[2]]


def _print_board(result: Board, out: Path) -> None:
    """Write the page of a board, and print its table and the best encoder."""
    page = result.to_html(out if out.suffix == ".html" else out / "board.html")
    tasks = f"{len(result.tasks)} shared tasks" if len(result.tasks) > 1 else result.tasks[0]
    columns, *rows = result.table()
    cells = [[escape(cell) for cell in row] for row in rows]
    _output.print_table(columns, cells, title=f"Best layer of each run on {tasks}", left=("run",))
    for remark in result.remarks:
        _output.print_text(remark)
    _output.print_report(page)
    choice: dict[str, Any] | None = None
    try:
        point = result.chosen()
        lines = result.lines(point)
        choice = {**asdict(point), "lines": lines, "verdict": result.summary()}
    finally:  # --json lists the runs even if none is within the budget
        _output.print_result(page=page, **result.to_dict(), chosen=choice)
    _output.print_text(result.summary())
    _output.print_encoder_lines(lines)
