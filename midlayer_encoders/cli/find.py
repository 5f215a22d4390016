"""``midlayer demo``, ``select``, ``sweep`` and ``board``: find the layer that embeds best."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command, parse_sizes
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import check_output_folder, read_lines, write_file
from midlayer_encoders.recipes import PLAIN, Recipe

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.extras.boards import Board
    from midlayer_encoders.frame.summaries import Curve, Gain
    from midlayer_encoders.selection import Selection
    from midlayer_encoders.sweeping import SweepResult
    from midlayer_encoders.sweeping.sweeps import Sweep

_CENTER_FILE = "center.txt"
#: The paper's metrics that compare no views of a text.
_DEFAULT_METRICS = "prompt_entropy,dataset_entropy,effective_rank,curvature"
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
    "labels": "tokens of labeled texts read",
}


@command("Try it")
def demo(out: Annotated[Path, Option(help="Folder for the results.")] = Path("midlayer-results/demo")) -> None:
    """Compare the built-in model (SmolLM2-135M) as it comes, at its best layer and with a prompt, offline.

    Examples:
        midlayer demo
        midlayer demo --out runs/demo
    """
    from midlayer_encoders.models.hub import BUILT_IN
    from midlayer_encoders.sweeping.request import SweepSettings
    from midlayer_encoders.sweeping.sweeps import Sweep

    # On tasks this small, worker processes would import mteb for longer than they score.
    settings = SweepSettings(workers=1)
    recipes = [PLAIN, "word-echo"]
    request = Sweep(BUILT_IN, "builtin-small", recipes=recipes, out=out, settings=settings, device="cpu")
    _arguments.check_model(BUILT_IN, EncoderOptions())  # refuses missing weights before anything is read
    with _progress.show_progress(STAGES) as progress:
        result = request.change(progress=progress).run()
    print_sweep(result, by_layer=False)


@command("Find the layer", name="select")
def select_command(
    *,
    model: _arguments.Model,
    texts: _arguments.TextsFile,
    labels: Annotated[Path | None, Option(help="File with the label of each text per line; or blank.")] = None,
    data: _arguments.Data,
    rule: Annotated[str, Option(help="auto, few-labels, half-match, valley-midpoint, fixed-depth, last …")] = "auto",
    recipes: _arguments.RecipeNames = None,
    all_rules: Annotated[bool, Option(help="Measure what every rule needs, in 3 passes.")] = False,
    out: Annotated[Path | None, Option(help="Folder for the table, the frame and the figure.")] = None,
    limit: _arguments.Limit = None,
    max_texts: Annotated[int, Option(min=1, help="Maximum number of texts, evenly spaced.")] = 500,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Choose a prompt and a layer of a model; show what the other recipes or rules would choose.

    Examples:
        midlayer select MODEL --texts texts.txt
        midlayer select MODEL --texts texts.txt --labels labels.txt --recipes all
    """
    from midlayer_encoders.arguments import RULE_NAMES
    from midlayer_encoders.tasks.sources import has_labels, own_labels
    from midlayer_encoders.validation import check_choice

    check_choice("rule", rule, RULE_NAMES)
    if labels is not None and data.label_column is not None:
        raise OptionError("`--label-column` cannot be combined with `--labels`, which is another file of labels.")
    recipe_list, options = _arguments.parse_recipes(recipes, options)
    is_table = _arguments.is_table(texts)
    if is_table and out is None and any(recipe.center for recipe in recipe_list or ()):
        raise OptionError("`--out` must be given with a table and a recipe that centers: it stores the texts.")
    if out is not None:
        check_output_folder(out)
    inputs = data.read_texts(texts)
    label_list = None if labels is None else _read_labels(labels, len(inputs))
    if data.label_column is not None:
        label_list = own_labels(texts, data.columns())
    elif labels is None and has_labels(texts, data.columns()):
        _output.print_text(f"{texts} has a column label, which is not read. Pass --label-column label to choose by it.")
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders.selection import select

    used_labels = None if label_list is None else label_list[:limit]
    arguments: dict[str, Any] = {"rule": rule, "recipes": recipe_list, "all_rules": all_rules, "max_texts": max_texts}
    with _progress.show_progress(STAGES) as progress:
        selection = select(encoder, inputs[:limit], used_labels, seed=seed, progress=progress, **arguments)
    chosen = selection.recipe if selection.parts else selection.rule
    choices = selection.choices_table()
    _output.print_table(choices, selection.title, best=chosen, left=(choices[0][0], "reason"))
    for sentence in (selection.verdict, *selection.notes):
        _output.print_text(sentence, wrap=False)
    is_center_file = out is None and not is_table and len(inputs) <= min(limit or max_texts, max_texts)
    center = texts if is_center_file else (out or Path()) / _CENTER_FILE
    lines = encoder_lines(encoder, selection.keywords, center)
    names = ("model", "layer", "num_layers", "rule", "recipe", "reason", "confidence")
    _output.print_outcome(
        report=None if out is None else _write_selection(selection, out, lines),
        **{name: getattr(selection, name) for name in names},
        kind=None if selection.kind is None else asdict(selection.kind),
        tokens=selection.tokens.get(selection.recipe),
        choices=selection.to_frame().to_dicts(),
        folder=out,
        lines=lines,
    )
    if out is None and not is_center_file and "center" in selection.keywords:
        _output.print_text(f"Pass --out FOLDER to store {_CENTER_FILE}, the texts that the recipe centers on.")


def _read_labels(path: Path, count: int) -> list[str | None]:
    labels = [line.strip() or None for line in read_lines(path, OptionError)]
    if len(labels) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} nonblank texts, but {path} has {len(labels)}."
        )
    return labels


def encoder_lines(encoder: LayerEncoder, keywords: dict[str, Any], center: Path) -> dict[str, str]:
    """Return the command and the Python expression that create the encoder of a selection.

    Args:
        encoder: the encoder of the whole model.
        keywords: of the selection.
        center: file with the texts that a recipe centers on.
    """
    from midlayer_encoders.sweeping.best_layer import Notes, export_lines

    options = encoder.options.non_defaults() | keywords
    if isinstance(options.get("recipe"), Recipe):
        options |= options.pop("recipe").non_defaults()
    options = {key: value for key, value in options.items() if key not in ("center", "layer")}
    vectors = {"center": str(center)} if "center" in keywords else {}
    notes = Notes(title="", model=encoder.source, how={}, options=options, vectors=vectors)
    return export_lines(notes, keywords["layer"])


def selection_html(selection: Selection, lines: Mapping[str, str]) -> str:
    """Return the self-contained page of a selection, with the lines that create the encoder, by language."""
    from midlayer_encoders.report.pages import block, figure_html, page_html
    from midlayer_encoders.report.results import versions

    sections: dict[str, list[str]] = {
        "What each would choose": [
            figure_html(selection.plot()),
            block("text_table", selection.choices_table(), "Choices"),
        ],
        "Use this layer": [block("code", lines)],
        "How it was measured": [block("facts", {"Model": selection.model.removeprefix("local/"), **versions()})],
    }
    return page_html(selection.title, [selection.verdict], sections, notes=selection.notes)


def _write_selection(selection: Selection, out: Path, lines: Mapping[str, str]) -> Path:
    """Write a selection into a folder, and return the path of its page."""
    from midlayer_encoders.frame.tidy_result import write_frame
    from midlayer_encoders.report import write_figure
    from midlayer_encoders.report.pages import write_page

    write_frame(selection.frame, out / "frame.parquet")
    write_frame(selection.to_frame(), out / "selection.csv")
    write_figure(selection.plot(), out / "selection.png")
    if selection.center is not None:
        rows = [" ".join(text.splitlines()) for text in selection.center]
        write_file(out / _CENTER_FILE, ("\n".join(rows) + "\n").encode())
    return write_page(selection_html(selection, lines), out / "report.html")


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
    metrics: _arguments.MetricNames = _DEFAULT_METRICS,
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
    from midlayer_encoders.models.hub import name_and_revision
    from midlayer_encoders.sweeping.request import SweepSettings
    from midlayer_encoders.sweeping.sweeps import Sweep

    is_alone = len(models) == 1 and execution.executor is None
    model, revision = name_and_revision(models[0])
    if is_alone and revision is not None:
        options = replace(options, revision=revision)
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
        precisions=[] if precisions is None else precisions.split(","),
        metrics=metrics,
        baselines=not no_baselines,
        out=out if is_alone else None,
        store=store,
        settings=settings,
        **options.non_defaults(),
    )
    if is_alone:
        _sweep_model(request, model, options)
    else:
        _sweep_models(request, models, out or Path("midlayer-results"), execution)


def _sweep_model(request: Sweep, model: str, options: EncoderOptions) -> None:
    """Sweep one model in this process, and print its table."""
    _arguments.check_model(model, options)  # before mteb and torch are imported
    with _progress.show_waiting("Reading the tasks"):
        sources = request.sources
    if request.out is None or not request.out.is_dir():
        from midlayer_encoders.sweeping.mteb_jobs import check_data  # imports mteb and torch

        check_data(sources)  # before the model is loaded
    encoder = _arguments.load_model(model, options)
    request = request.change(model=encoder, options={})
    if request.metrics == _DEFAULT_METRICS.split(","):
        try:
            encoder.check_one_stack("metrics")
        except OptionError as reason:
            request = request.change(metrics=())
            _output.print_text(f"No metrics: {reason}")
    with _progress.show_progress(STAGES) as progress:
        result = request.change(progress=progress).run()
    print_sweep(result)


def _sweep_models(request: Sweep, models: list[str], out: Path, execution: _arguments.Execution) -> None:
    """Sweep several models, or one on an executor, and print its table or the board of all."""
    from midlayer_encoders import board
    from midlayer_encoders.sweeping.sweeps import sweep_models

    titles = {**STAGES, "units": "units done"}
    with _progress.show_progress(titles) as progress, execution.open(out / "jobs") as executor:
        results = sweep_models(request.change(progress=progress, executor=executor), models, out)
    if len(results) == 1:
        print_sweep(*results.values())
        return
    for result in results.values():
        if not result.frame.is_empty():
            result.to_html()
    failures = {f"{name}, {task}": error for name, result in results.items() for task, error in result.failures.items()}
    _print_board(board([result.folder for result in results.values()]), out / "board.html", failures)


def print_sweep(result: SweepResult, *, by_layer: bool = True) -> None:
    """Print the tables of a sweep, what they say, and where its page is; exit with 1 if a task failed.

    Args:
        result: of the sweep.
        by_layer: whether to print the score of every layer, too.
    """
    from midlayer_encoders.report.layer_charts import recipe_rows
    from midlayer_encoders.report.sweep_page import confirmed_words
    from midlayer_encoders.sweeping.best_layer import export_lines
    from midlayer_encoders.sweeping.sweep_result import task_labels
    from midlayer_encoders.tasks import task_label

    notes, num_scores = result.notes, result.frame.filter(kind="score").height
    if num_scores and result.parts:
        head, *rows = recipe_rows(result.summaries(), notes.baselines, result.gains())
        _output.print_table([list(map(task_label, head)), *rows], "Recipes at their best layers", best=result.recipe)
    if num_scores and by_layer:
        _print_scores(result)
    labels = task_labels(result.frame["dataset"].unique().to_list())
    labeled = result.frame.with_columns(result.frame["dataset"].replace(labels))
    sentences = [*result.verdict(), *notes.remarks, confirmed_words(labeled)]
    if num_scores:
        sentences += result.sample_words()
    elif not result.failures:
        sentences.append("Nothing was scored. `midlayer select` chooses a layer without labels.")
    if result.num_kept:
        sentences.append(f"{result.num_kept} of {num_scores} scores were there from an earlier run.")
    values = result_values(result)
    best = None if values["best_layer"] is None else result.best()
    _output.print_outcome(
        [*filter(None, sentences)],
        failures=result.failures,
        report=None if result.frame.is_empty() else result.to_html(),  # empty if every task failed
        lines=None if best is None else export_lines(notes, best),
        what=f"layer {best}",
        folder=result.folder,
        **values,
    )


def _print_scores(result: SweepResult) -> None:
    """Print a row for each layer and baseline of the best recipe, and a column for each task."""
    import polars as pl

    from midlayer_encoders.frame.summaries import summary
    from midlayer_encoders.report.sweep_page import score_columns

    labels, title = _labels(result), result.notes.title
    scores = summary(result.winner.frame.with_columns(dataset=pl.col("dataset").replace(labels)))
    baselines = {name: _relabel(by_task, labels) for name, by_task in result.notes.baselines.items()}
    best = None if scores.average is None else scores.average.best_layer
    columns = score_columns(scores, baselines)
    _output.print_layers(columns, f"{title} under {result.recipe}" if result.parts else title, best=best)


def result_values(result: SweepResult) -> dict[str, Any]:
    """Return the best layer of a sweep, on average and for each task, in points."""
    notes = result.notes
    if result.frame.filter(kind="score").is_empty() or result.curves.average is None:
        return {"model": notes.model, "best_layer": None}

    def curve_values(curve: Curve) -> dict[str, Any]:
        return {"best_layer": curve.best_layer, "best": curve.best, "last": curve.last, "layers": curve.points}

    def gain_values(gain: Gain) -> dict[str, Any]:
        return {"gain": gain.points, "interval": gain.interval}

    scores, labels = result.curves, _labels(result)
    points = {name: {task: 100 * score for task, score in by_task.items()} for name, by_task in notes.baselines.items()}
    return {
        "verdict": result.verdict(),
        "baseline_gains": {name: gain_values(lead) for name, lead in result.baseline_gains().items()},
        "model": notes.model,
        "revision": None if scores.revision == "default" else scores.revision,
        "num_layers": scores.num_layers,
        **({"recipe": result.recipe, **notes.compression} if result.parts else {}),
        **curve_values(result.curves.average),
        **gain_values(result.gain()),
        "tasks": _relabel({curve.name: curve_values(curve) for curve in scores.tasks}, labels),
        "baselines": {name: _relabel(by_task, labels) for name, by_task in points.items()},
        **({"rows": _relabel(notes.rows, labels)} if notes.rows else {}),
    }


def _labels(result: SweepResult) -> dict[str, str]:
    from midlayer_encoders.sweeping.sweep_result import task_labels

    return task_labels(result.frame["dataset"].unique().to_list())


def _relabel(by_task: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    return {labels.get(task, task): value for task, value in by_task.items()}


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
    _print_board(board(runs, max_parameters=max_parameters, max_milliseconds=max_ms, max_bytes=max_bytes), out)


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


def _print_board(result: Board, out: Path, failures: Mapping[str, str] | None = None) -> None:
    """Write the page of a board, and print its table and the best encoder."""
    page = result.to_html(out if out.suffix == ".html" else out / "board.html")
    title = f"Best layer of each run on {', '.join(result.tasks)}"
    _output.print_table(result.table(), title, left=("run",))
    outcome: dict[str, Any] = {"failures": failures, "report": page, "page": page, **result.to_dict()}
    try:
        point = result.chosen()
    except OptionError:  # --json lists the runs even if none is within the budget
        _output.print_outcome(result.remarks, chosen=None, **outcome)
        raise
    lines, verdict = result.lines(point), result.summary()
    chosen = {**asdict(point), "lines": lines, "verdict": verdict}
    _output.print_outcome([*result.remarks, verdict], lines=lines, chosen=chosen, **outcome)
