"""``midlayer probe``: how well each layer tells your classes apart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli._app import (
    LayersText,
    Model,
    Seed,
    SiteName,
    app,
    console,
    make_table,
    parse_layers,
    quieten,
    refuse_given,
    results_folder,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.encoder.options import EncoderOptions

if TYPE_CHECKING:
    from midlayer_encoders.probing import ProbeResult

_OF_VECTORS = ("pooling", "truncate_dim")
"""Options of the encoder without effect on a probe that pools the tokens by itself."""

PROBE_STAGES = {"reading": "examples read", "training": "epochs, all layers together"}


@app.command()
@long_running
@model_options()
def probe(
    *,
    context: typer.Context,
    model: Model,
    data: Annotated[Path, typer.Option(help="A folder for each class, or a file with the columns text and label.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for frame, table, figure and page.", show_default="midlayer-results/probe-MODEL"),
    ] = None,
    test: Annotated[Path | None, typer.Option(help="The same to test on; else a fifth of each class is.")] = None,
    kind: Annotated[str, typer.Option(help="attentive, linear or knn.")] = "attentive",
    layers: LayersText = "all",
    site: SiteName = "block",
    mixture: Annotated[bool, typer.Option("--mixture", help="Also learn a mean of layers from the labels.")] = False,
    epochs: Annotated[int, typer.Option(help="At the most; each layer keeps its best.")] = 30,
    batch_size: Annotated[int, typer.Option(help="Examples in a step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Of AdamW, at the first step.")] = 1e-3,
    keep_gb: Annotated[float, typer.Option(help="Memory for tokens; above it each epoch reads them again.")] = 4.0,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out files that cannot be read.")] = False,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Train a small classifier on every frozen layer, all together, and say which layer tells the classes apart."""
    quieten()
    from midlayer_encoders._types import READ_SITES
    from midlayer_encoders.probing import probe as probe_layers
    from midlayer_encoders.probing.examples import Examples, check_path, read_examples
    from midlayer_encoders.probing.heads import KINDS
    from midlayer_encoders.probing.settings import WITHOUT_EFFECT, ProbeTraining
    from midlayer_encoders.validation import check_choice, check_number

    out = out or results_folder("probe", model)
    check_choice("--site", site, READ_SITES)
    check_choice("kind", kind, KINDS)  # a wrong option is refused before the model is loaded
    why, names = WITHOUT_EFFECT[kind]
    refuse_given(context, f"with `--kind {kind}`, which {why}", *names, *(_OF_VECTORS if kind == "attentive" else ()))
    check_number("--keep-gb", keep_gb)
    ProbeTraining(epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, seed=seed)
    for path in (data, test):
        if path is not None:
            check_path(path)
    encoder = whole_model(model, options)
    bad = "skip" if skip_bad else "refuse"
    train = read_examples(data, encoder.media, bad=bad)
    tested = read_examples(test, encoder.media, bad=bad) if test is not None else Examples([], [])
    with shown(PROBE_STAGES) as progress:
        result = probe_layers(
            encoder, train.inputs, train.labels, test_inputs=tested.inputs, test_labels=tested.labels, kind=kind,  # type: ignore[arg-type]
            layers=parse_layers(layers), site=site, mixture=mixture, epochs=epochs,  # type: ignore[arg-type]
            batch_size=batch_size, learning_rate=learning_rate, keep_gb=keep_gb, seed=seed, dataset=data.stem,
            progress=progress,
        )  # fmt: skip
    result.save(out)
    print_result(folder=out, report=out / "report.html", **probe_found(result))
    print_probe(result)
    written = ", ".join([*result.tables(), "probe.png", "report.html"])
    console().print(f"Written to {out}: {written}", soft_wrap=True)


def probe_found(result: ProbeResult) -> dict[str, Any]:
    """Return what a probe found, as ``--json`` prints it."""
    about = {"dataset": result.dataset, "kind": result.kind, "best_layer": result.best_layer}
    return {**about, "chance": result.chance, "words": result.verdict(), "layers": result.table.to_dicts()}


def print_probe(result: ProbeResult) -> None:
    """Print a row for each layer, and what the best one gains over the last."""
    best = result.best_layer
    title = f"{result.dataset}: {result.kind} probe, accuracy in per cent"
    table = make_table("layer", "accuracy", "95 % interval", "validation", "best epoch", title=title)
    for layer, accuracy, low, high, validation, epoch in result.table.iter_rows():
        cells = (f"{100 * accuracy:.1f}", f"{100 * low:.1f} to {100 * high:.1f}", f"{100 * validation:.1f}")
        style = "bold green" if layer == best else None
        table.add_row(str(layer), *cells, str(epoch) if epoch else "", style=style)
    console().print(table)
    console().print(f"{result.verdict()} Guessing gives {100 * result.chance:.1f}.")
    if result.mixture is not None:
        console().print(result.mixture.verdict(), highlight=False)
