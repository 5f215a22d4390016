"""``midlayer demo-vision``: images from end to end, offline, in minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli._app import app, console, print_report, quieten
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.cli.probe import PROBE_STAGES, print_probe, probe_found

if TYPE_CHECKING:
    import polars as pl

    from midlayer_encoders.probing import ProbeResult

_KNOWN, _NEW = range(5), range(5, 10)


@app.command("demo-vision")
@long_running
def demo_vision(
    out: Annotated[Path, typer.Option(help="Folder for what it finds.")] = Path("midlayer-results/demo-vision"),
    epochs: Annotated[int, typer.Option(help="Of the model that is trained on the spot.")] = 25,
) -> None:
    """Train a small image model on some digits, probe every layer on others, measure, and write a report; offline."""
    quieten()
    import polars as pl

    from midlayer_encoders.cli._demo_digits import read_digits, train_digit_model
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.measuring import measure_layers
    from midlayer_encoders.probing import probe

    train, test = read_digits()
    known, (new, asked) = train.only(_KNOWN), (digits.only(_NEW) for digits in (train, test))
    console().print(
        "No model is downloaded: a transformer of 6 blocks is trained here to name the digits 0 to 4, on "
        f"{len(known.images)} images, then every layer is probed on 5 to 9, which it has never seen. It is small: it "
        "shows the way, no more."
    )
    with shown() as progress:
        folder = train_digit_model(
            out / "model", known, epochs=epochs,
            progress=lambda epoch, total, _: progress("epochs of the model", epoch, total),
        )  # fmt: skip
    encoder = LayerEncoder(folder, -1, device="cpu")
    results = []
    for kind in ("attentive", "linear", "knn"):
        with shown(PROBE_STAGES) as progress:
            given: dict[str, Any] = {"test_inputs": asked.images, "test_labels": asked.labels, "kind": kind}
            given |= {"dataset": "digits 5 to 9", "progress": progress}
            given |= {} if kind == "knn" else {"batch_size": 64}  # the neighbors are not trained
            results.append(probe(encoder, new.images, new.labels, **given))
        print_probe(results[-1])
    with shown({"measuring": "images measured"}) as progress:
        metrics = measure_layers(
            encoder, asked.images, metrics="paper", views=4, dataset="digits 5 to 9", progress=progress
        )
    frame = pl.concat([*(result.frame for result in results), metrics])
    page = _write(out, frame, results, epochs)
    print_result(folder=out, report=page, probes=[probe_found(result) for result in results])
    print_report(page)


def _write(out: Path, frame: pl.DataFrame, results: list[ProbeResult], epochs: int) -> Path:
    """Write frame, figures and page, and return where the page lies."""
    from midlayer_encoders.report import write_figure, write_metrics_figure, write_report
    from midlayer_encoders.report.layer_charts import plot_probes
    from midlayer_encoders.report.results import write_frame

    write_frame(frame, out / "frame.parquet")
    tables = {f"{result.kind} probe": result.table for result in results}
    title = "digits 5 to 9, a model trained on 0 to 4"
    figure = plot_probes(tables, num_layers=results[0].num_layers, chance=results[0].chance, title=title)
    write_figure(figure, out / "probes.png")
    write_metrics_figure(frame, out / "metrics.png")
    first = results[0]
    how = {
        "Trained": f"a vision transformer of 6 blocks, 96 wide, by this demo, {epochs} epochs on the digits 0 to 4",
        "Images": "scikit-learn's handwritten digits, 8 x 8 enlarged to 16 x 16",
        "Probes": f"of frozen layers, all layers together, on the digits 5 to 9: {first.num_train} train, "
        f"{first.right.shape[1]} test; each layer at its best epoch on others",
        "Metrics": "of the test digits on raw states, mean of the tokens; 4 views each",
    }
    notes = [
        "The model was trained on the spot to name 0 to 4 and is asked about 5 to 9, which it has never seen. "
        "It is small: the page shows the way, not what image models do."
    ]
    notes += [result.verdict() for result in results]
    guessing = {result.frame["dataset"][0]: result.chance for result in results}
    return write_report(
        frame, out / "report.html", title="Every layer of a small image model", how=how, notes=notes,
        baselines={"Guessing": guessing},
    )  # fmt: skip
