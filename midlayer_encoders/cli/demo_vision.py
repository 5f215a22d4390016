"""``midlayer demo-vision``: images from end to end, offline, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli._app import app, console, progress_bars, quieten
from midlayer_encoders.cli.probe import bars, print_probe

if TYPE_CHECKING:
    import polars as pl

    from midlayer_encoders.analysis.probing import ProbeResult


@app.command("demo-vision")
def demo_vision(
    out: Annotated[Path, typer.Option(help="Folder for what it finds.")] = Path("midlayer-results/demo-vision"),
    epochs: Annotated[int, typer.Option(help="Of the model that is trained on the spot.")] = 40,
) -> None:
    """Train a small image model on handwritten digits, probe and measure every layer, and write a report; offline."""
    quieten()
    import polars as pl

    from midlayer_encoders.analysis.probing import probe
    from midlayer_encoders.demo_vision import read_digits, train_digit_model
    from midlayer_encoders.encoder import LayerEncoder
    from midlayer_encoders.measuring import measure, num_passes

    train, test = read_digits()
    console().print(
        f"No model is downloaded: a masked autoencoder of 6 blocks is trained here, on {len(train.images)} digits "
        "without their labels. It is small and serves to show the way, not to be used."
    )
    with progress_bars() as progress:
        bar = progress.add_task("epochs of the model", total=epochs)
        told = lambda epoch, total, _: progress.update(bar, completed=epoch, total=total)  # noqa: E731
        folder = train_digit_model(out / "model", train.images, epochs=epochs, progress=told)
    encoder = LayerEncoder(folder, -1, device="cpu")
    results = []
    for kind in ("attentive", "linear", "knn"):
        with progress_bars() as progress:
            given: dict[str, Any] = {"test_inputs": test.images, "test_labels": test.labels, "kind": kind}
            results.append(
                probe(encoder, train.images, train.labels, dataset="digits", progress=bars(progress), **given)
            )
        print_probe(results[-1])
    with progress_bars() as progress:
        bar = progress.add_task("images measured", total=len(test.images) * num_passes("paper", views=4))
        metrics = measure(
            encoder, test.images, metrics="paper", views=4, dataset="digits",
            advance=lambda count: progress.advance(bar, count),
        )  # fmt: skip
    frame = pl.concat([*(result.frame for result in results), metrics])
    console().print(f"The report: {_write(out, frame, results, epochs)}", soft_wrap=True)


def _write(out: Path, frame: pl.DataFrame, results: list[ProbeResult], epochs: int) -> Path:
    """Write frame, figures and page, and return where the page lies."""
    from midlayer_encoders.report import write_metrics_figure, write_report
    from midlayer_encoders.report.probes import plot_probes

    frame.write_parquet(out / "frame.parquet")
    tables = {f"{result.kind} probe": result.table for result in results}
    figure = plot_probes(tables, num_layers=results[0].num_layers, chance=results[0].chance, title="digits")
    figure.savefig(out / "probes.png", dpi=150)
    write_metrics_figure(frame, out / "metrics.png")
    how = {
        "Model": f"a masked autoencoder of 6 blocks, 96 wide, trained by this demo for {epochs} epochs without labels",
        "Images": "scikit-learn's handwritten digits, 8 x 8 enlarged to 16 x 16; 1437 to train, 360 to test",
        "Probes": "on frozen layers, all layers together; the best epoch of each by a fifth of the training digits",
        "Metrics": "of the 360 test digits on raw states, mean of the patches; 4 views each",
    }
    gain, low, high = (100 * value for value in results[0].gain())
    notes = [
        "The model was trained on the spot and is small: the page shows the way, not what image models do.",
        f"Chosen by validation, layer {results[0].best_layer} is best for the attentive probe: {gain:+.1f} points from "
        f"the last layer on the test digits (95 % interval {low:+.1f} to {high:+.1f}).",
    ]
    baselines = {result.frame["dataset"][0]: result.chance for result in results}
    return write_report(
        frame, out / "report.html", title="Every layer of a small image model", how=how, notes=notes,
        baselines=baselines, baseline_name="Guessing",
    )  # fmt: skip
