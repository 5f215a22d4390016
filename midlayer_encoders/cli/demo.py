"""``midlayer demo`` and ``demo-vision``: texts and images from end to end, offline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions

_DATASET = "digits 5 to 9"


@command("Try it")
def demo(out: Annotated[Path, Option(help="Folder for the results.")] = Path("midlayer-results/demo")) -> None:
    """Score all 31 layers of the built-in model (SmolLM2-135M) with two prompts on the built-in tasks, offline.

    Examples:
        midlayer demo
        midlayer demo --out runs/demo
    """
    from midlayer_encoders.cli.sweep import ONE_PASS_METRICS, run_sweep
    from midlayer_encoders.files import check_output_folder
    from midlayer_encoders.models.hub import BUILT_IN, check_model

    check_output_folder(out)
    check_model(BUILT_IN)  # refuses missing weights before anything is read
    encoder = _arguments.load_model(BUILT_IN, EncoderOptions(device="cpu"))
    run_sweep(encoder, ["builtin"], recipes=["plain", "one-word"], metrics=list(ONE_PASS_METRICS), out=out)


@command("Try it", name="demo-vision")
def demo_vision(
    out: Annotated[Path, Option(help="Folder for the results.")] = Path("midlayer-results/demo-vision"),
    epochs: Annotated[int, Option(help="Epochs of training of the small model.")] = 25,
) -> None:
    """Train a small image model on some digits, probe every layer on others, and write a report; offline.

    Examples:
        midlayer demo-vision
        midlayer demo-vision --out runs/digits --epochs 5
    """
    import polars as pl

    from midlayer_encoders.cli import probe as probe_command
    from midlayer_encoders.cli._demo_digits import read_digits, train_digit_model
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.files import folder_lock
    from midlayer_encoders.measuring import measure_layers
    from midlayer_encoders.probing import ProbeSettings, probe
    from midlayer_encoders.report import write_figure, write_metrics_figure, write_report
    from midlayer_encoders.report.layer_charts import plot_probes
    from midlayer_encoders.report.results import write_frame

    with folder_lock(out):  # refuses a folder of other files
        pass
    train_set, test_set = read_digits()
    pretraining = train_set.only(range(5))
    images, labels = train_set.only(range(5, 10))
    test_images, test_labels = test_set.only(range(5, 10))
    _output.print_text(
        "No model is downloaded: this demo trains a transformer of 6 blocks to recognize the digits 0 to 4 on "
        f"{len(pretraining.images)} images, then probes every layer on 5 to 9, which it has never seen. The model is "
        "small and only illustrates the method."
    )
    with _progress.show_progress() as progress:
        folder = train_digit_model(out / "model", pretraining, epochs=epochs, progress=progress)
    encoder = LayerEncoder(folder, -1, device="cpu")
    results = []
    for kind in ("attentive", "linear", "knn"):
        with _progress.show_progress(probe_command.STAGES) as progress:
            result = probe(
                encoder,
                images,
                labels,
                test_inputs=test_images,
                test_labels=test_labels,
                kind=kind,
                dataset=_DATASET,
                progress=progress,
                settings=ProbeSettings() if kind == "knn" else ProbeSettings(batch_size=64),
            )
        results.append(result)
        probe_command.print_probe(result)
    with _progress.show_progress({"measuring": "images measured"}) as progress:
        metrics = measure_layers(encoder, test_images, views=4, dataset=_DATASET, progress=progress)
    frame = pl.concat([*(result.frame for result in results), metrics])
    first = results[0]
    write_frame(frame, out / "frame.parquet")
    tables = {f"{result.kind} probe": result.table for result in results}
    title = f"{_DATASET}, a model trained on 0 to 4"
    figure = plot_probes(tables, num_layers=first.num_layers, chance=first.chance, title=title)
    write_figure(figure, out / "probes.png")
    write_metrics_figure(frame, out / "metrics.png")
    setup = {
        "Model": f"a vision transformer with 6 blocks of width 96, trained for {epochs} epochs on the digits 0 to 4",
        "Images": "scikit-learn's handwritten digits, 8 x 8 enlarged to 16 x 16",
        "Probes": f"on the frozen layers, for the digits 5 to 9: {first.num_train} training and "
        f"{first.right.shape[1]} test images; each layer at its best validation epoch",
        "Metrics": "test images, raw states, mean pooling, 4 views each",
    }
    note = "The model is small: this page illustrates the method, not the quality of image models."
    notes = [note, *(result.verdict() for result in results)]
    baselines = {"Guessing": {result.frame["dataset"][0]: result.chance for result in results}}
    title = "Every layer of a small image model"
    page = write_report(frame, out / "report.html", title=title, how=setup, notes=notes, baselines=baselines)
    _output.print_result(folder=out, report=page, probes=[probe_command.probe_values(result) for result in results])
    _output.print_report(page)
