"""``midlayer sweep``, ``report`` and ``demo``: every layer of a model scored on tasks, and its page."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from midlayer_encoders.cli._app import (
    LayersText,
    Model,
    RecipeNames,
    SiteName,
    app,
    asked_recipes,
    console,
    parse_layers,
    parse_names,
    print_report,
    print_table,
    quieten,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import (
    first_process,
    json_result,
    long_running,
    print_result,
    shown,
    silence,
    waiting,
)
from midlayer_encoders.encoder.options import EncoderOptions

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.sweeping import RecipesResult, SweepResult

# Those of the paper's metrics that compare no views of a text.
_ONE_PASS = "prompt_entropy,dataset_entropy,effective_rank,curvature"
STAGES = {
    "reading": "tasks read",
    "planning": "tasks planned",
    "embedding": "texts embedded",
    "scoring": "layers scored",
    "comparing": "texts embedded by all-MiniLM-L6-v2",
    "confirming": "layers confirmed by mteb",
    "measuring": "texts measured",
}


@app.command()
@long_running
@model_options()
def sweep(
    *,
    model: Model,
    tasks: Annotated[
        str, typer.Option(help="Names of mteb tasks or benchmarks, paper, builtin, or paths, with commas.")
    ],
    layers: LayersText = "all",
    recipes: RecipeNames = None,
    site: SiteName = "block",
    names: Annotated[
        str, typer.Option("--metrics", help="none, paper, all, or names with commas; the default takes one pass.")
    ] = _ONE_PASS,
    out: Annotated[Path | None, typer.Option(help="Folder for frame, results and page.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of embeddings, which sweeps may share.")] = None,
    half: Annotated[bool, typer.Option(help="Keep the embeddings in float16: half the room.")] = False,
    scoring: Annotated[
        str, typer.Option(help="together: all layers at once, the best and the last confirmed by mteb; or mteb alone.")
    ] = "together",
    workers: Annotated[
        int | None, typer.Option(help="Processes that score layers by mteb; all cores by default.")
    ] = None,
    devices: Annotated[int, typer.Option(help="Processes on each machine that share the sweep.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Machines that share it (torchrun or SLURM start them).")] = 1,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the blocks: pays for many texts only.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what each task is taken for and how long it all takes, and write nothing."),
    ] = False,
    options: EncoderOptions,
) -> None:
    """Score every layer of a model on mteb tasks from one forward pass over each text."""
    quieten()
    from midlayer_encoders._types import READ_SITES
    from midlayer_encoders.files import folder_lock
    from midlayer_encoders.models.hub import check_model
    from midlayer_encoders.sweeping import SweepSettings
    from midlayer_encoders.tasks import task_sources
    from midlayer_encoders.validation import check_choice

    check_choice("--site", site, READ_SITES)
    check_choice("--scoring", scoring, ("together", "mteb"))  # a wrong word is refused before the model is loaded
    if not dry_run:  # which says what it can without the model
        check_model(model, options.revision, gguf_file=options.gguf_file)  # before mteb and torch are waited for
    first = _first(devices, num_nodes)
    if not first:
        silence()
    settings = SweepSettings(
        scoring=cast(Any, scoring),
        workers=workers,
        store_dtype="float16" if half else "float32",
        compile=compiled,
        devices=devices,
        num_nodes=num_nodes,
    )
    if dry_run:
        asked, options = asked_recipes(recipes, options)
        _preview(
            model, tasks.split(","), layers=parse_layers(layers), site=site, metrics=parse_names(names),
            settings=settings, recipes=asked, **options.changed(),
        )  # fmt: skip
        return
    with waiting("tasks", "Reading the tasks"):
        task_sources(tasks.split(","))  # likewise
    asked, options = asked_recipes(recipes, options)
    if first and out is not None and out.is_dir():
        with folder_lock(out):  # likewise a folder that another sweep writes to
            pass
    if first:
        _print_price(parse_names(names))
    encoder = whole_model(model, options)
    run_sweep(
        encoder, tasks.split(","), layers=parse_layers(layers), site=site, metrics=parse_names(names), out=out,
        store=store, settings=settings, recipes=asked,
    )  # fmt: skip


def _preview(model: str, tasks: list[str], **options: Any) -> None:
    """Print what a sweep would do; exit with 1 where it would refuse something."""
    from midlayer_encoders.cli._dry_run import print_preview
    from midlayer_encoders.sweeping import preview

    with shown({"looking": "tasks looked at", "timing": "batches and tasks timed"}) as progress:
        found = preview(model, tasks, progress=progress, **options)
    print_preview(found)
    if found.error is not None or any(task.error is not None for task in found.tasks):
        raise typer.Exit(1)


def _first(devices: int, num_nodes: int) -> bool:
    """Return whether this process prints what several that share a sweep found."""
    return devices * num_nodes <= 1 or first_process()


def _print_price(metrics: str | list[str]) -> None:
    """Print what metrics that compare views cost, before it is paid; a wrong name is refused."""
    from midlayer_encoders.measuring import num_passes
    from midlayer_encoders.sweeping import SweepSettings

    if not metrics:
        return
    passes, texts = num_passes(metrics, views=SweepSettings.views), SweepSettings.metric_texts
    if passes > 1:
        console().print(
            f"The metrics read {texts} texts {passes} times, once and as {passes - 1} views: as much as embedding "
            f"{texts * passes:,} texts. Without --metrics they are read once.", highlight=False,
        )  # fmt: skip


def run_sweep(encoder: LayerEncoder, tasks: list[str], **options: Any) -> None:
    """Run a sweep with its bars, print the table and where the page lies; exit with 1 where a task failed."""
    from midlayer_encoders import sweeping

    with shown(STAGES) as progress:
        result = sweeping.sweep(encoder, tasks, progress=progress, **options)
    settings = options.get("settings")
    if settings is not None and not _first(settings.devices, settings.num_nodes):
        return
    made = options.get("site", "block") == "block" and _chosen(result)
    page = None if result.frame.is_empty() else result.to_html()  # where every task failed there is nothing to report
    print_result(
        **_found(result), folder=result.folder, report=page, failures=result.failures,
        export=made_lines(result) if made else None,
    )  # fmt: skip
    _print_scores(result)
    for task, error in result.failures.items():
        console().print(f"{task} failed, {error}", style="bold red", highlight=False, markup=False)
    if page is not None:
        print_report(page)
    if set(result.frame["kind"]) == {"metric"} and not result.failures:
        line = shlex.join(["midlayer", "select", result.notes.model, "--texts", tasks[0]])
        words = f"Nothing was scored: there are no labels. A layer chosen without them: {line}"
        console().print(words, soft_wrap=True, highlight=False, markup=False)
    elif (site := options.get("site", "block")) != "block":
        console().print(f"The {site} of a layer is read here only: no encoder of it can be exported.")
    elif made:
        print_made(result)
    if result.failures:
        raise typer.Exit(1)


def _chosen(result: SweepResult) -> bool:
    """Return whether some layer was scored on every task, so that one is the best."""
    return bool(result.frame.filter(kind="score").height) and result.summary().average is not None


def _found(result: SweepResult) -> dict[str, Any]:
    """Return the best layer of a sweep, on average and for each task, in points."""
    from midlayer_encoders.sweeping import RecipesResult

    if not _chosen(result):
        return {"model": result.notes.model, "best_layer": None}
    recipe = {"recipe": result.recipe} if isinstance(result, RecipesResult) else {}
    found = (result.winner if isinstance(result, RecipesResult) else result).summary()
    curves = {curve.name: curve for curve in (*found.tasks, found.average) if curve is not None}
    points = {
        name: {"best_layer": one.best_layer, "best": one.best, "last": one.last, "layers": one.points}
        for name, one in curves.items()
    }
    average = points.pop("average")
    baselines = {
        name: {task: 100 * score for task, score in known.items()} for name, known in result.notes.baselines.items()
    }
    about = {"model": found.model, "revision": found.revision, "num_layers": found.num_layers, **recipe}
    return {**about, **average, "tasks": points, "baselines": baselines}


def _print_scores(result: SweepResult) -> None:
    """Print a row for each layer, a column for each task, and what the best layer gains over the last."""
    import polars as pl

    from midlayer_encoders.frame import average_baseline
    from midlayer_encoders.report.sweep_page import confirmed_words
    from midlayer_encoders.sweeping import RecipesResult
    from midlayer_encoders.sweeping.sweep_result import task_labels

    if result.frame.filter(pl.col("kind") == "score").is_empty():
        return
    title, baselines, missing = result.notes.title, result.notes.baselines, result.notes.missing
    if isinstance(result, RecipesResult):
        _print_recipes(result)
        title += f" under {result.recipe}"
        result = result.winner
    scores = result.frame.filter(pl.col("kind") == "score")
    found = result.summary()
    named = task_labels([curve.name for curve in found.tasks])
    labels = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", named[curve.name]) for curve in found.tasks)
    curves = [*found.tasks, *([found.average] if found.average else [])]
    layers = sorted(scores["layer"].unique().to_list())
    rows = [[str(layer), *(_points(curve.points.get(layer)) for curve in curves)] for layer in layers]
    for name, known in baselines.items():
        shown = [known.get(curve.name) for curve in found.tasks]  # BM25 ranks, and does nothing else
        points = [_points(None if value is None else 100 * value) for value in shown]
        rows.append([name, *points, *([_points(average_baseline(found, known))] if found.average else [])])
    best = None if found.average is None else layers.index(found.average.best_layer)
    columns = ["layer", *labels, *(["mean"] if found.average else [])]
    print_table(columns, rows, title=title, bold=best, sections=[len(layers)])
    for words in missing:
        console().print(words, highlight=False, markup=False)
    if found.average is not None:
        average = found.average
        last = "the last layer" if average.last_layer == found.num_layers else f"layer {average.last_layer}"
        console().print(
            f"Best layer: {average.best_layer} of {found.num_layers}, {average.best:.1f} points, "
            f"{average.gain:+.1f} over {last}."
        )
    for line in confirmed_words(result.frame):
        console().print(line, highlight=False, markup=False)


def _points(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _print_recipes(result: RecipesResult) -> None:
    """Print each recipe at its best layer, and what the best one gains."""
    from midlayer_encoders.report.score_charts import recipe_rows, recipe_words
    from midlayer_encoders.tasks import task_label

    found = result.summaries()
    head, *rows = recipe_rows(found, result.notes.baselines)
    best = next(number for number, row in enumerate(rows) if row[0] == result.recipe)
    print_table([task_label(word) for word in head], rows, title="Recipes at their best layers", bold=best)
    console().print(recipe_words(found), highlight=False, markup=False)


def made_lines(result: SweepResult) -> dict[str, str]:
    """Return the command and the Python line that make the encoder of the best layer."""
    from midlayer_encoders.sweeping.sweep_result import export_lines

    lines = export_lines(result.notes, result.best())
    return {"shell": lines["shell"], "python": lines["Python"]}


def print_made(result: SweepResult) -> None:
    """Print the command and the Python line that make the encoder of the best layer."""
    lines = made_lines(result)
    console().print("Export it:", lines["shell"], soft_wrap=True, highlight=False, markup=False)
    console().print("In Python:", lines["python"], soft_wrap=True, highlight=False, markup=False)


@app.command()
@json_result
def report(folder: Annotated[Path, typer.Argument(help="The --out of a sweep.")]) -> None:
    """Write the page of a sweep again from its frame."""
    from midlayer_encoders.sweeping.sweep_result import SweepResult

    page = SweepResult.load(folder).to_html()
    print_result(folder=folder, report=page)
    print_report(page)


@app.command()
@long_running
def demo(out: Annotated[Path, typer.Option(help="Folder for what it finds.")] = Path("midlayer-results/demo")) -> None:
    """Score all 31 layers of the built-in model (SmolLM2-135M) under two recipes on the built-in tasks, offline."""
    from midlayer_encoders.models.hub import BUILT_IN, check_model
    from midlayer_encoders.tasks.docstrings import versions

    check_model(BUILT_IN)  # what is missing is said before anything is read
    quieten()
    sources = ", ".join(f"{name} {version}" for name, version in versions().items())
    console().print(
        f"Scores belong to these versions, whose docstrings the tasks are made of: {sources}.", highlight=False
    )
    encoder = whole_model(BUILT_IN, EncoderOptions(device="cpu"))
    # Metrics of one pass: those of views would read as many texts again as a recipe does.
    run_sweep(encoder, ["builtin"], recipes=["plain", "one-word"], metrics=parse_names(_ONE_PASS), out=out)
