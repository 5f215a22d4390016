"""``midlayer metrics``, ``probe``, ``compare`` and ``progression``: what the layers of models hold."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Option

from midlayer_encoders.arguments import COMPARABLE, IntervalSettings, metric_names
from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import pluralize
from midlayer_encoders.extras.settings import UNUSED_SETTINGS, ProbeSettings
from midlayer_encoders.validation import check_effect


@command("Look inside", norm="none")
def metrics(
    *,
    model: _arguments.Model,
    out: _arguments.Out = None,
    inputs: _arguments.Inputs,
    metric_names: _arguments.MetricNames = "paper",
    layers: _arguments.Layers = "all",
    wikitext: Annotated[bool, Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Measure every layer of a model on your texts, images or audio.

    Examples:
        midlayer metrics MODEL --texts texts.txt --out runs/metrics
        midlayer metrics MODEL --images photos/ --metrics all --out runs/m
    """
    from midlayer_encoders import arguments

    out = _arguments.results_folder(out, "metrics", model)
    arguments.metric_names(metric_names)
    kind, path, items = inputs.read(wikitext=wikitext)
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders import measure, report
    from midlayer_encoders.frame.tidy_result import write_frame
    from midlayer_encoders.metrics.feeding import num_passes
    from midlayer_encoders.report.pages import write_page
    from midlayer_encoders.report.results import versions
    from midlayer_encoders.tasks.text_lists import wikitext_paragraphs

    if wikitext:  # counts the tokens of the whole paragraph, whatever --max-length is
        items = wikitext_paragraphs(items, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    items = items[: inputs.limit]
    number, unit = pluralize(len(items), kind.removesuffix("s")), "tokens" if kind == "texts" else kind
    measured = f"{number} in {pluralize(num_passes(metric_names), 'pass', 'passes')}"
    titles = {"measuring": f"{unit} of {measured}", "computing": "metrics computed"}
    settings: dict[str, Any] = {"metrics": metric_names, "layers": layers, "seed": seed, "dataset": path.stem}
    with _progress.show_progress(titles) as progress:
        frame = measure(encoder, items, progress=progress, **settings)
    write_frame(frame, out / "metrics.parquet")
    write_frame(frame, out / "metrics.csv")
    report.write_figure(report.plot_metrics(frame), out / "metrics.png")
    title = f"Metrics of every layer of {options.shown_name(model)}"
    how = {"inputs": f"{number} of {path.name}", **options.non_defaults(), "seed": str(seed), **versions()}
    page = report.report_html(frame, title=title, how=how, sentences=[f"Measured on {measured}."])
    values = frame.select("layer", "name", "value")
    _print_by_layer([(layer, name, f"{value:.4g}") for layer, name, value in values.iter_rows()], title)
    files = ["metrics.parquet", "metrics.csv", "metrics.png", "report.html"]
    page_file = write_page(page, out / "report.html")
    _output.print_outcome(report=page_file, folder=out, files=files, values=values.to_dicts())


@command("Look inside", without=["patience", "weight_decay", "heads"])
def probe(
    *,
    model: _arguments.Model,
    data: Annotated[Path, Option(help="A folder for each class, or a file with the columns text and label.")],
    out: _arguments.Out = None,
    test: Annotated[Path | None, Option(help="Test data; by default a fifth of each class.")] = None,
    labeled: _arguments.Data,
    kind: Annotated[Literal["attentive", "linear"], Option(help="The classifier.")] = "attentive",
    layers: _arguments.Layers = "all",
    settings: ProbeSettings,
    skip_bad: _arguments.SkipBad = False,
    options: EncoderOptions,
) -> None:
    """Train a small classifier on every frozen layer and show which layer separates the classes best.

    Examples:
        midlayer probe MODEL --data classes/ --out runs/probe
        midlayer probe MODEL --data train.csv --kind linear --out runs/probe
    """
    from midlayer_encoders.cli._labeled_examples import read_examples

    out = _arguments.results_folder(out, "probe", model)
    reason, unused = UNUSED_SETTINGS[kind]
    check_effect(
        ProbeSettings, f"with --kind {kind}, which {reason}", **{name: getattr(settings, name) for name in unused}
    )
    if kind == "attentive":
        unpooled = {name: getattr(options, name) for name in ("pooling", "truncate_dim")}
        check_effect(EncoderOptions, f"with --kind {kind}, which {reason}", **unpooled)
    read = partial(read_examples, bad="skip" if skip_bad else "refuse", columns=labeled.columns())
    paths = [path for path in (data, test) if path is not None]
    tables = {path: read(path, ()) for path in paths if not path.is_dir()}  # before the model is loaded
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders.extras import probing

    examples = [tables[path] if path in tables else read(path, encoder.media) for path in paths]
    test_inputs, test_labels = examples[1] if test is not None else ([], [])
    arguments: dict[str, Any] = {"kind": kind, "layers": layers, "settings": settings, "dataset": data.stem}
    arguments |= {"test_inputs": test_inputs, "test_labels": test_labels}
    titles = {"reading": "examples read", "training": "epochs, all layers together"}
    with _progress.show_progress(titles) as progress:
        result = probing.probe(encoder, *examples[0], progress=progress, **arguments)
    result.save(out)
    rows = [["layer", "accuracy", "95 % interval", "validation", "best epoch"]]
    for layer, accuracy, low, high, validation, epoch in result.table.iter_rows():
        shares = f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * validation:.1f}"
        rows.append([str(layer), *shares, str(epoch)])
    title = f"{result.dataset}: {result.kind} probe, accuracy in percent"
    _output.print_table(rows, title, best=str(result.best_layer))
    _output.print_outcome(
        [f"{result.verdict()} Guessing gives {100 * result.chance:.1f}."],
        report=out / "report.html",
        folder=out,
        **{name: getattr(result, name) for name in ("dataset", "kind", "best_layer", "chance")},
        words=result.verdict(),
        layers=result.table.to_dicts(),
    )


@dataclass(kw_only=True)
class Measurement:
    """Flags that tell what is measured on which texts."""

    texts: _arguments.TextsFile
    out: _arguments.Out = None
    metrics: _arguments.MetricNames = "paper"
    layers: _arguments.Layers = "all"
    data: _arguments.TextData
    limit: _arguments.Limit = None
    views: Annotated[int, Option(help="Augmented views of each text, for LiDAR.")] = 16
    seed: _arguments.Seed = 0

    def arguments(self, options: EncoderOptions) -> dict[str, Any]:
        """Return the arguments of the function in Python except ``out``."""
        texts = self.data.read_texts(self.texts)[: self.limit]
        values = {"texts": texts, "layers": self.layers, "views": self.views, "seed": self.seed}
        values |= {"metrics": self.metrics, "dataset": self.texts.stem}
        return {**values, **options.non_defaults(), "norm": options.norm}


# Each model has a revision of its own: name@revision.
@command("Look inside", without=["revision", "confidence"], norm="none")
def compare(
    *,
    base: Annotated[str, Argument(help="Folder, hub name, name@revision, or built-in.")],
    tuned: Annotated[list[str], Argument(help="One or more models to compare with it.")],
    measurement: Measurement,
    intervals: IntervalSettings,
    options: EncoderOptions,
) -> None:
    """Compare models with a base: metrics side by side, and differences with intervals.

    Examples:
        midlayer compare BASE TUNED --texts texts.txt --out runs/compare
        midlayer compare MODEL@step1000 MODEL --texts t.txt --out runs/compare
    """
    out = _arguments.results_folder(measurement.out, "compare", base, *tuned)
    metric_names(measurement.metrics, COMPARABLE, aliases=())
    arguments = measurement.arguments(options)
    for model in (base, *tuned):
        _arguments.check_model(model, options)
    from midlayer_encoders import comparing  # imports torch
    from midlayer_encoders.comparing.compare import without_local

    with _progress.show_progress() as progress:
        result = comparing.compare(base, *tuned, intervals=intervals, out=out, progress=progress, **arguments)
    columns = ["layer", "name", "difference", "low", "high"]
    for (base_name, model), rows in without_local(result.differences).group_by("base", "model", maintain_order=True):
        cells = [
            (layer, name, f"{difference:+.3g}" if low > 0 or high < 0 else f"({difference:+.3g})")
            for layer, name, difference, low, high in rows.select(columns).iter_rows()
        ]
        _print_by_layer(cells, f"{model} minus {base_name}; in brackets: the interval contains zero")
    findings = [*result.words(), *result.notes]
    differences = result.differences.to_dicts()
    _output.print_outcome(findings, report=out / "report.html", folder=out, words=findings, differences=differences)


@command("Look inside", without=["revision"], norm="none")  # --revisions names them
def progression(
    *,
    model: Annotated[str, Argument(help="Hub name, or a folder of checkpoint-500, step500, …")],
    measurement: Measurement,
    revisions: Annotated[str | None, Option(help="step1,step512 …: revisions, or subfolders (all).")] = None,
    execution: _arguments.Execution,
    options: EncoderOptions,
) -> None:
    """Measure every layer at every step of a model's training, and show which layers settle first.

    An interrupted run continues in the same folder.

    Examples:
        midlayer progression checkpoints/ --texts texts.txt --out runs/steps
        midlayer progression MODEL --revisions step1,step512 --texts t.txt --out r
    """
    out = _arguments.results_folder(measurement.out, "progression", model)
    metric_names(measurement.metrics)
    arguments = measurement.arguments(options)
    steps = [name.strip() for name in revisions.split(",")] if revisions else None
    from midlayer_encoders import comparing  # imports torch

    titles = {"units": "checkpoints measured"}
    with _progress.show_progress(titles) as progress, execution.open(out / "jobs") as executor:
        result = comparing.progression(model, steps, out=out, executor=executor, progress=progress, **arguments)
    settled = result.settled()
    cells = [
        (layer, name, "" if step is None else str(step))
        for layer, name, step in settled.select("layer", "name", "step").iter_rows()
    ]
    _print_by_layer(cells, "settled within 10 % of the metric's range from step")
    values: dict[str, Any] = {"words": result.words(), "settled": settled.to_dicts()}
    _output.print_outcome(result.words(), failures=result.failures, report=out / "report.html", folder=out, **values)


def _print_by_layer(cells: Sequence[tuple[int, str, str]], title: str) -> None:
    """Print cells, each with its layer and metric, in a table with a row for each layer."""
    columns: dict[str, dict[int | str, str]] = {}
    for layer, name, cell in cells:
        columns.setdefault(name, {})[layer] = cell
    _output.print_layers(columns, title)
