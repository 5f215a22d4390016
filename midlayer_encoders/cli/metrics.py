"""``midlayer metrics``: every layer of a model measured on your texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders._types import READ_SITES
from midlayer_encoders.cli._app import (
    FieldName,
    LayersText,
    Limit,
    MetricNames,
    Model,
    Seed,
    SiteName,
    SkipBad,
    SomeAudio,
    SomeImages,
    SomeTexts,
    app,
    console,
    first_of,
    one_source,
    parse_layers,
    parse_names,
    print_by_layer,
    quieten,
    read_source,
    results_folder,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.validation import check_choice, check_seed


@app.command()
@long_running
@model_options(norm="none")
def metrics(
    *,
    context: typer.Context,
    model: Model,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the frame (parquet and CSV) and the figure.", show_default="midlayer-results/metrics-MODEL"
        ),
    ] = None,
    texts: SomeTexts = None,
    images: SomeImages = None,
    audio: SomeAudio = None,
    sounds: Annotated[Path | None, typer.Option(hidden=True)] = None,
    skip_bad: SkipBad = False,
    names: MetricNames = "all",
    layers: LayersText = "all",
    site: SiteName = "block",
    field: FieldName = None,
    wikitext: Annotated[bool, typer.Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    limit: Limit = None,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Measure every layer of a model on your texts, images or audio: one pass over them, and one for each view."""
    quieten()
    from midlayer_encoders.measuring import measure, num_passes
    from midlayer_encoders.media.text_lists import wikitext_paragraphs
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.report.results import write_frame

    out = out or results_folder("metrics", model)
    check_choice("--site", site, READ_SITES)
    first_of([], limit)
    check_seed(seed)
    wanted = parse_names(names)
    passes = num_passes(wanted)  # a wrong name is refused before the model is loaded
    kind, source = one_source(context, {"texts": texts, "images": images, "audio": audio, "sounds": sounds})
    lines = read_source(kind, source, field=field, skip_bad=skip_bad)
    encoder = whole_model(model, options)
    if wikitext:
        # Of the whole paragraph: --max-length must not make it a short one.
        lines = wikitext_paragraphs(lines, lambda line: len(encoder.tokenizer(line, verbose=False)["input_ids"]))
    lines = first_of(lines, limit)
    unit = "waveforms" if kind == "audio" else kind
    with shown({"measuring": f"{len(lines)} {unit}, {passes} passes"}) as progress:
        frame = measure(
            encoder, lines, metrics=wanted, layers=parse_layers(layers), site=site, seed=seed,  # type: ignore[arg-type]
            dataset=source.stem, progress=progress,
        )  # fmt: skip
    for suffix in ("parquet", "csv"):
        write_frame(frame, out / f"metrics.{suffix}")
    write_metrics_figure(frame, out / "metrics.png")
    names_of_files = ["metrics.parquet", "metrics.csv", "metrics.png"]
    print_result(folder=out, files=names_of_files, values=frame.select("layer", "name", "value").to_dicts())
    cells = frame.select("layer", "name", "value").iter_rows()
    print_by_layer({(layer, name): f"{value:.4g}" for layer, name, value in cells})
    console().print(f"Written to {out}: {', '.join(names_of_files)}", soft_wrap=True)
