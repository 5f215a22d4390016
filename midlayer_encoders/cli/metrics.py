"""``midlayer metrics``: measure every layer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders._types import READ_SITES
from midlayer_encoders.cli import _arguments, _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli._progress import show_progress
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.validation import check_choice, check_seed

_FILES = ["metrics.parquet", "metrics.csv", "metrics.png"]


@command(
    "Look inside",
    "midlayer metrics MODEL --texts texts.txt --out runs/metrics",
    "midlayer metrics MODEL --images photos/ --metrics all --out runs/m",
    norm="none",
)
def metrics(
    *,
    context: typer.Context,
    model: _arguments.Model,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the frame (parquet and CSV) and the figure.", show_default="midlayer-results/metrics-MODEL"
        ),
    ] = None,
    texts: _arguments.OptionalTexts = None,
    images: _arguments.OptionalImages = None,
    audio: _arguments.OptionalAudio = None,
    sounds: Annotated[Path | None, typer.Option(hidden=True)] = None,
    skip_bad: _arguments.SkipBad = False,
    metric_names: _arguments.MetricNames = "paper",
    layers: _arguments.LayersWords = "all",
    site: _arguments.SiteName = "block",
    field: _arguments.FieldName = None,
    wikitext: Annotated[bool, typer.Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    limit: _arguments.Limit = None,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Measure every layer of a model on your texts, images or audio."""
    _arguments.silence_libraries()
    from midlayer_encoders import measure
    from midlayer_encoders.measuring import num_passes
    from midlayer_encoders.media.text_lists import wikitext_paragraphs
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.report.results import write_frame

    out = out or _arguments.results_folder("metrics", model)
    check_choice("--site", site, READ_SITES)
    _arguments.take_first([], limit)
    check_seed(seed)
    names = _arguments.parse_metrics(metric_names)
    passes = num_passes(names)  # refuses an unknown name before the model is loaded
    paths = {"texts": texts, "images": images, "audio": audio, "sounds": sounds}
    kind, path = _arguments.single_source(context, paths)
    inputs = _arguments.read_source(kind, path, field=field, skip_bad=skip_bad)
    encoder = _arguments.load_model(model, options)
    if wikitext:  # counts the tokens of the whole paragraph, whatever --max-length is
        inputs = wikitext_paragraphs(inputs, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    inputs = _arguments.take_first(inputs, limit)
    unit = "waveforms" if kind == "audio" else kind
    with show_progress({"measuring": f"{len(inputs)} {unit}, {passes} passes"}) as progress:
        frame = measure(
            encoder,
            inputs,
            metrics=names,
            layers=_arguments.parse_layers(layers),
            site=site,  # type: ignore[arg-type]
            seed=seed,
            dataset=path.stem,
            progress=progress,
        )
    for name in ("metrics.parquet", "metrics.csv"):
        write_frame(frame, out / name)
    write_metrics_figure(frame, out / "metrics.png")
    values = frame.select("layer", "name", "value")
    _output.print_result(folder=out, files=_FILES, values=values.to_dicts())
    _output.print_by_layer({(layer, name): f"{value:.4g}" for layer, name, value in values.iter_rows()})
    _output.print_text(f"Written to {out}: {', '.join(_FILES)}", wrap=False)
