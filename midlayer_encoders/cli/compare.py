"""``midlayer compare`` and ``progression``: how models, or the checkpoints of one, differ layer by layer."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from typer import Argument, Exit, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions


@dataclass(kw_only=True)
class Measured:
    """Flags that tell what is measured on which texts."""

    texts: _arguments.TextsFile
    out: _arguments.Out = None
    metrics: _arguments.MetricNames = "paper"
    layers: _arguments.Layers = "all"
    text_column: _arguments.TextColumn = None
    limit: _arguments.Limit = None
    views: Annotated[int, Option(help="Augmented views of each text, for LiDAR.")] = 16
    seed: _arguments.Seed = 0

    def arguments(self, options: EncoderOptions) -> dict[str, Any]:
        """Return the arguments of the function in Python except ``metrics`` and ``out``."""
        texts = _arguments.read_texts(self.texts, column=self.text_column)[: self.limit]
        values = {"texts": texts, "layers": self.layers, "views": self.views, "seed": self.seed}
        return {**values, "dataset": self.texts.stem, **options.changed(), "norm": options.norm}


# Each model has a revision of its own: name@revision.
@command("Look inside", without=["revision"], norm="none")
def compare(
    *,
    base: Annotated[str, Argument(help="Folder, hub name, name@revision, or built-in.")],
    tuned: Annotated[list[str], Argument(help="One or more models to compare with it.")],
    measured: Measured,
    resamples: Annotated[int, Option(help="Random halves of the texts, for the intervals.")] = 50,
    options: EncoderOptions,
) -> None:
    """Compare models with a base: metrics side by side, and differences with intervals.

    Examples:
        midlayer compare BASE TUNED --texts texts.txt --out runs/compare
        midlayer compare MODEL@step1000 MODEL --texts t.txt --out runs/compare
    """
    from midlayer_encoders import comparing
    from midlayer_encoders.comparing.compare import comparable

    out = _arguments.results_folder(measured.out, "compare", base, *tuned)
    with _progress.show_progress() as progress:
        result = comparing.compare(
            base,
            *tuned,
            metrics=comparable(_arguments.parse_metrics(measured.metrics)),
            intervals=comparing.IntervalSettings(resamples=resamples),
            out=out,
            progress=progress,
            **measured.arguments(options),
        )
    report = out / "report.html"
    findings = [*result.words(), *result.notes]
    _output.print_result(folder=out, report=report, words=findings, differences=result.differences.to_dicts())
    for (base_name, model), rows in result.differences.group_by("base", "model", maintain_order=True):
        cells = {(row["layer"], row["name"]): _cell(row) for row in rows.iter_rows(named=True)}
        _output.print_by_layer(cells, title=f"{model} minus {base_name} (dim: the interval contains zero)")
    for finding in findings:
        _output.print_text(finding)
    _output.print_report(report)


def _cell(row: Mapping[str, float]) -> str:
    text = f"{row['difference']:+.3g}" if row["difference"] else "0"
    return text if row["low"] > 0 or row["high"] < 0 else f"[dim]{text}[/]"


@command("Look inside", without=["revision"], norm="none")  # --revisions names them
def progression(
    *,
    model: Annotated[str, Argument(help="Hub name, or a folder of checkpoint-500, step500, …")],
    measured: Measured,
    revisions: Annotated[str | None, Option(help="step1,step512 …: revisions, or subfolders (all).")] = None,
    shared: _arguments.Sharing,
    submit: Annotated[Literal["slurm", "local"] | None, Option(help="Measure each checkpoint as a job.")] = None,
    submit_option: _arguments.SubmitOption = None,
    options: EncoderOptions,
) -> None:
    """Measure every layer at every step of a model's training, and show which layers settle first.

    An interrupted run continues in the same folder.

    Examples:
        midlayer progression checkpoints/ --texts texts.txt --out runs/steps
        midlayer progression MODEL --revisions step1,step512 --texts t.txt --out r
    """
    from midlayer_encoders.comparing import progression as measure_progression

    is_first = shared.writes_results()
    out = _arguments.results_folder(measured.out, "progression", model)
    with _progress.show_progress({"units": "jobs done"}) as progress:
        result = measure_progression(
            model,
            [name.strip() for name in revisions.split(",")] if revisions else None,
            metrics=_arguments.parse_metrics(measured.metrics),
            out=out,
            executor=submit,
            parameters=_arguments.parse_submit_options(submit, submit_option),
            progress=progress,
            **asdict(shared),
            **measured.arguments(options),
        )
    if not is_first:
        return
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
