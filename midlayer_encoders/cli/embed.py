"""``midlayer embed``: the vectors of your inputs at many layers, in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders._types import READ_SITES
from midlayer_encoders.cli._app import (
    FieldName,
    LayersText,
    Limit,
    Model,
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
    quieten,
    read_source,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.validation import check_choice


@app.command()
@long_running
@model_options()
def embed(
    *,
    context: typer.Context,
    model: Model,
    out: Annotated[Path, typer.Option(help="vectors.npy, .safetensors or .parquet; with --tokens a new folder.")],
    texts: SomeTexts = None,
    images: SomeImages = None,
    audio: SomeAudio = None,
    skip_bad: SkipBad = False,
    layers: LayersText = "all",
    site: SiteName = "block",
    tokens: Annotated[bool, typer.Option(help="The states of every token, in shards, instead of vectors.")] = False,
    stored: Annotated[
        Path | None, typer.Option("--from", help="Folder of a sweep: read its vectors, and run nothing.")
    ] = None,
    field: FieldName = None,
    limit: Limit = None,
    token_budget: Annotated[int | None, typer.Option(help="Tokens in a batch; by default what runs best.")] = None,
    options: EncoderOptions,
) -> None:
    """Write the vectors of your texts, images or audio at many layers to a file: one pass over them for all layers."""
    quieten()
    from midlayer_encoders.vectors import check_out
    from midlayer_encoders.vectors import embed as write

    check_choice("--site", site, READ_SITES)
    first_of([], limit)
    check_out(out, tokens=tokens)  # before anything is loaded
    kind, source = one_source(context, {"texts": texts, "images": images, "audio": audio})
    inputs = first_of(read_source(kind, source, field=field, skip_bad=skip_bad), limit)
    encoder = whole_model(model, options)
    unit = "waveforms" if kind == "audio" else kind
    with shown({"embedding": f"Embedding {unit}", "writing": "Writing vectors"}) as progress:
        path = write(
            encoder, inputs, out, layers=parse_layers(layers), site=site, tokens=tokens,  # type: ignore[arg-type]
            from_sweep=stored, token_budget="auto" if token_budget is None else token_budget, progress=progress,
        )  # fmt: skip
    print_result(path=path, inputs=len(inputs), kind=kind)
    what = "States" if tokens else "Vectors"
    console().print(f"{what} of {len(inputs):,} {unit} are in {path}.", soft_wrap=True, highlight=False)
