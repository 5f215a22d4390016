"""``midlayer embed``: write vectors at many layers to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders._types import READ_SITES
from midlayer_encoders.cli import _arguments, _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli._progress import show_progress
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_choice


@command(
    "Use it",
    "midlayer embed MODEL --texts texts.txt --out vectors.parquet",
    "midlayer embed MODEL --texts texts.txt --layers 0,0.5,-1 --out v.npy",
)
def embed(
    *,
    context: typer.Context,
    model: _arguments.Model,
    out: Annotated[Path, typer.Option(help="vectors.npy, .safetensors or .parquet; with --tokens a new folder.")],
    texts: _arguments.OptionalTexts = None,
    images: _arguments.OptionalImages = None,
    audio: _arguments.OptionalAudio = None,
    skip_bad: _arguments.SkipBad = False,
    layers: _arguments.LayersWords = "all",
    site: _arguments.SiteName = "block",
    tokens: Annotated[bool, typer.Option(help="Write the states of every token, in shards, not vectors.")] = False,
    from_sweep: Annotated[
        Path | None, typer.Option("--from", help="Folder of a sweep: read its vectors without running the model.")
    ] = None,
    field: _arguments.FieldName = None,
    limit: _arguments.Limit = None,
    token_budget: Annotated[
        str, typer.Option(help="Tokens in a batch; auto finds the fastest size for the device.")
    ] = "auto",
    options: EncoderOptions,
) -> None:
    """Write the vectors of texts, images or audio at many layers to a file, from one pass of the model."""
    _arguments.silence_libraries()
    from midlayer_encoders import vectors

    check_choice("--site", site, READ_SITES)
    _arguments.take_first([], limit)
    vectors.check_out(out, tokens=tokens)  # before anything is loaded
    kind, path = _arguments.single_source(context, {"texts": texts, "images": images, "audio": audio})
    inputs = _arguments.take_first(_arguments.read_source(kind, path, field=field, skip_bad=skip_bad), limit)
    budget = _parse_budget(token_budget)
    encoder = _arguments.load_model(model, options)
    unit = "waveforms" if kind == "audio" else kind
    with show_progress({"embedding": f"Embedding {unit}", "writing": "Writing vectors"}) as progress:
        written = vectors.embed(
            encoder,
            inputs,
            out,
            layers=_arguments.parse_layers(layers),
            site=site,  # type: ignore[arg-type]
            tokens=tokens,
            from_sweep=from_sweep,
            token_budget=budget,  # type: ignore[arg-type]
            progress=progress,
        )
    _output.print_result(path=written, inputs=len(inputs), kind=kind)
    _output.print_text(f"{'States' if tokens else 'Vectors'} of {len(inputs):,} {unit} are in {written}.", wrap=False)


def _parse_budget(word: str) -> int | str:
    if word != "auto" and not word.lstrip("-").isdigit():
        raise OptionError(f"`--token-budget` must be auto or a number of tokens, but got {word!r}.")
    return word if word == "auto" else int(word)
