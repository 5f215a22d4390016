"""``midlayer metrics``, ``probe``, ``compare`` and ``progression``: what the layers of models hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Argument, Context, Exit, Option

from midlayer_encoders.arguments import COMPARABLE, IntervalSettings, metric_names
from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import counted
from midlayer_encoders.extras.settings import UNUSED_SETTINGS, ProbeSettings

_PROBE_STAGES = {"reading": "examples read", "training": "epochs, all layers together"}
_METRIC_FILES = ["metrics.parquet", "metrics.csv", "metrics.png", "report.html"]


@command("Look inside", norm="none")
def metrics(
    *,
    context: Context,
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
    names = _arguments.parse_metrics(metric_names)
    arguments.metric_names(names)
    kind, path, items = inputs.read(context)
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders import measure
    from midlayer_encoders.frame.tidy_result import write_frame
    from midlayer_encoders.metrics.feeding import num_passes
    from midlayer_encoders.report import plot_metrics, report_html, write_figure
    from midlayer_encoders.report.pages import write_page
    from midlayer_encoders.report.results import versions
    from midlayer_encoders.tasks.text_lists import wikitext_paragraphs

    passes = counted(num_passes(names), "pass", "passes")
    if wikitext:  # counts the tokens of the whole paragraph, whatever --max-length is
        items = wikitext_paragraphs(items, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    items = items[: inputs.limit]
    number = counted(len(items), "waveform" if kind == "audio" else kind.removesuffix("s"))
    unit = "tokens" if kind == "texts" else kind
    measured = f"{unit} of {number}, {passes}"
    with _progress.show_progress({"measuring": measured, "computing": "metrics computed"}) as progress:
        frame = measure(encoder, items, metrics=names, layers=layers, seed=seed, dataset=path.stem, progress=progress)
    for name in ("metrics.parquet", "metrics.csv"):
        write_frame(frame, out / name)
    write_figure(plot_metrics(frame), out / "metrics.png")
    title = f"Metrics of every layer of {options.shown_name(model)}"
    how = {"inputs": f"{number} of {path.name}", **options.changed(), "seed": str(seed), **versions()}
    page = report_html(frame, title=title, how=how, sentences=[f"Measured on {number} in {passes}."])
    write_page(page, out / "report.html")
    values = frame.select("layer", "name", "value")
    _output.print_result(folder=out, files=_METRIC_FILES, values=values.to_dicts())
    _output.print_by_layer({(layer, name): f"{value:.4g}" for layer, name, value in values.iter_rows()})
    _output.print_text(f"Written to {out}: {', '.join(_METRIC_FILES)}", wrap=False)


@command("Look inside", without=["patience", "weight_decay", "heads"])
def probe(
    *,
    context: Context,
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
    from midlayer_encoders.cli._labeled_examples import check_examples_path, read_examples

    out = _arguments.results_folder(out, "probe", model)
    reason, names = UNUSED_SETTINGS[kind]
    names += ("pooling", "truncate_dim") if kind == "attentive" else ()
    _arguments.refuse_flags(context, f"with `--kind {kind}`, which {reason}", *names)
    read = partial(read_examples, bad="skip" if skip_bad else "refuse", columns=labeled.columns())
    paths = [check_examples_path(path) for path in (data, test) if path is not None]
    tables = {path: read(path, ()) for path in paths if not path.is_dir()}  # before the model is loaded
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders.extras import probing

    examples = [tables[path] if path in tables else read(path, encoder.media) for path in paths]
    inputs, labels = examples[0]
    test_inputs, test_labels = examples[1] if test is not None else ([], [])
    with _progress.show_progress(_PROBE_STAGES) as progress:
        result = probing.probe(
            encoder,
            inputs,
            labels,
            test_inputs=test_inputs,
            test_labels=test_labels,
            kind=kind,
            layers=layers,
            settings=settings,
            dataset=data.stem,
            progress=progress,
        )
    result.save(out)
    names = ("dataset", "kind", "best_layer", "chance")
    _output.print_result(
        folder=out,
        report=out / "report.html",
        **{name: getattr(result, name) for name in names},
        words=result.verdict(),
        layers=result.table.to_dicts(),
    )
    rows = []
    for layer, accuracy, low, high, validation, epoch in result.table.iter_rows():
        shares = (f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * validation:.1f}")
        rows.append([str(layer), *shares, str(epoch)])
    title = f"{result.dataset}: {result.kind} probe, accuracy in percent"
    best = result.table["layer"].to_list().index(result.best_layer)
    columns = ["layer", "accuracy", "95 % interval", "validation", "best epoch"]
    _output.print_table(columns, rows, title=title, bold=best)
    _output.print_text(f"{result.verdict()} Guessing gives {100 * result.chance:.1f}.")
    files = ", ".join([*result.tables(), "probe.png", "report.html"])
    _output.print_text(f"Written to {out}: {files}", wrap=False)


@dataclass(kw_only=True)
class Measured:
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
        """Return the arguments of the function in Python except ``metrics`` and ``out``."""
        texts = _arguments.read_texts(self.texts, self.data)[: self.limit]
        values = {"texts": texts, "layers": self.layers, "views": self.views, "seed": self.seed}
        return {**values, "dataset": self.texts.stem, **options.changed(), "norm": options.norm}


# Each model has a revision of its own: name@revision.
@command("Look inside", without=["revision", "confidence"], norm="none")
def compare(
    *,
    base: Annotated[str, Argument(help="Folder, hub name, name@revision, or built-in.")],
    tuned: Annotated[list[str], Argument(help="One or more models to compare with it.")],
    measured: Measured,
    intervals: IntervalSettings,
    options: EncoderOptions,
) -> None:
    """Compare models with a base: metrics side by side, and differences with intervals.

    Examples:
        midlayer compare BASE TUNED --texts texts.txt --out runs/compare
        midlayer compare MODEL@step1000 MODEL --texts t.txt --out runs/compare
    """
    out = _arguments.results_folder(measured.out, "compare", base, *tuned)
    names = metric_names(_arguments.parse_metrics(measured.metrics), COMPARABLE, aliases=())
    arguments = measured.arguments(options)
    for model in (base, *tuned):
        _arguments.check_model(model, options)
    from midlayer_encoders import comparing  # imports torch
    from midlayer_encoders.comparing.compare import without_local

    with _progress.show_progress() as progress:
        result = comparing.compare(
            base, *tuned, metrics=names, intervals=intervals, out=out, progress=progress, **arguments
        )
    report = out / "report.html"
    findings = [*result.words(), *result.notes]
    _output.print_result(folder=out, report=report, words=findings, differences=result.differences.to_dicts())
    for (base_name, model), rows in without_local(result.differences).group_by("base", "model", maintain_order=True):
        cells = {(row["layer"], row["name"]): _cell(row) for row in rows.iter_rows(named=True)}
        _output.print_by_layer(cells, title=f"{model} minus {base_name}; in brackets: the interval contains zero")
    for finding in findings:
        _output.print_text(finding)
    _output.print_report(report)


def _cell(row: Mapping[str, float]) -> str:
    text = f"{row['difference']:+.3g}" if row["difference"] else "0"
    return text if row["low"] > 0 or row["high"] < 0 else f"[dim]({text})[/]"


@command("Look inside", without=["revision"], norm="none")  # --revisions names them
def progression(
    *,
    model: Annotated[str, Argument(help="Hub name, or a folder of checkpoint-500, step500, …")],
    measured: Measured,
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
    out = _arguments.results_folder(measured.out, "progression", model)
    names = _arguments.parse_metrics(measured.metrics)
    metric_names(names)
    arguments = measured.arguments(options)
    from midlayer_encoders.comparing import progression as measure_progression  # imports torch

    titles = {"units": "checkpoints measured"}
    with _progress.show_progress(titles) as progress, execution.open(out / "jobs") as executor:
        result = measure_progression(
            model,
            [name.strip() for name in revisions.split(",")] if revisions else None,
            metrics=names,
            out=out,
            executor=executor,
            progress=progress,
            **arguments,
        )
    report = out / "report.html"
    settled = result.settled()
    values: dict[str, Any] = {"words": result.words(), "failures": result.failures, "settled": settled.to_dicts()}
    _output.print_result(folder=out, report=report, **values)
    steps = settled.select("layer", "name", "step").iter_rows()
    cells = {(layer, name): "" if step is None else str(step) for layer, name, step in steps}
    _output.print_by_layer(cells, title="settled within 10 % of the metric's range from step")
    _output.print_text(" ".join(result.words()))
    _output.print_failures(result.failures)
    _output.print_report(report)
    if result.failures:
        raise Exit(1)
