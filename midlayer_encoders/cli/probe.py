"""``midlayer probe``: how well each layer separates labeled classes."""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Context, Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions

STAGES = {"reading": "examples read", "training": "epochs, all layers together"}


@command("Look inside")
def probe(
    *,
    context: Context,
    model: _arguments.Model,
    data: Annotated[Path, Option(help="A folder for each class, or a file with the columns text and label.")],
    out: _arguments.Out = None,
    test: Annotated[Path | None, Option(help="Test data; by default a fifth of each class.")] = None,
    text_column: _arguments.TextColumn = None,
    label_column: _arguments.LabelColumn = None,
    kind: Annotated[Literal["attentive", "linear"], Option(help="The classifier.")] = "attentive",
    layers: _arguments.Layers = "all",
    epochs: Annotated[int, Option(help="Maximum number of epochs; each layer keeps its best.")] = 30,
    batch_size: Annotated[int, Option(help="Examples per step.")] = 256,
    learning_rate: Annotated[float, Option(help="Initial learning rate of AdamW.")] = 1e-3,
    keep_gb: Annotated[float, Option(help="Memory for token states; beyond it each epoch runs again.")] = 4.0,
    skip_bad: _arguments.SkipBad = False,
    seed: _arguments.Seed = 0,
    shared: _arguments.Sharing,
    options: EncoderOptions,
) -> None:
    """Train a small classifier on every frozen layer and show which layer separates the classes best.

    Examples:
        midlayer probe MODEL --data classes/ --out runs/probe
        midlayer probe MODEL --data train.csv --kind linear --out runs/probe
    """
    from midlayer_encoders import probing
    from midlayer_encoders.probing.examples import check_examples_path, read_examples
    from midlayer_encoders.probing.probe import UNUSED_SETTINGS
    from midlayer_encoders.tasks.table_files import Columns

    is_first = shared.writes_results()
    out = _arguments.results_folder(out, "probe", model)
    reason, names = UNUSED_SETTINGS[kind]
    names += ("pooling", "truncate_dim") if kind == "attentive" else ()
    _arguments.refuse_flags(context, f"with `--kind {kind}`, which {reason}", *names)
    settings = probing.ProbeSettings(
        epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, keep_gb=keep_gb, seed=seed
    )
    for path in (data, test):
        if path is not None:
            check_examples_path(path)
    encoder = _arguments.load_model(model, options, **asdict(shared))
    bad = "skip" if skip_bad else "refuse"
    read = partial(read_examples, media=encoder.media, bad=bad, columns=Columns(text_column, label_column))
    inputs, labels = read(data)
    test_inputs, test_labels = read(test) if test is not None else ([], [])
    with _progress.show_progress(STAGES) as progress:
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
            **asdict(shared),
        )
    if not is_first:
        return
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
