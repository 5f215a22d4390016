"""``midlayer embed``: write vectors at many layers to a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Context, Option

from midlayer_encoders.cli import _arguments, _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli._progress import show_progress
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError


@command(
    "Use it",
    "midlayer embed MODEL --texts texts.txt --out vectors.parquet",
    "midlayer embed MODEL --texts texts.txt --layers 0,0.5,-1 --out v.npy",
)
def embed(
    *,
    context: Context,
    model: _arguments.Model,
    out: Annotated[Path, Option(help="vectors.npy, .safetensors or .parquet; with --tokens a new folder.")],
    texts: _arguments.OptionalTexts = None,
    images: _arguments.OptionalImages = None,
    audio: _arguments.OptionalAudio = None,
    skip_bad: _arguments.SkipBad = False,
    layers: _arguments.LayersWords = "all",
    site: _arguments.Site = "block",
    tokens: Annotated[bool, Option(help="Write the states of every token, in shards, not vectors.")] = False,
    from_sweep: Annotated[Path | None, Option("--from", help="Sweep whose vectors to read, not run the model.")] = None,
    field: _arguments.FieldName = None,
    limit: _arguments.Limit = None,
    token_budget: Annotated[str, Option(help="Tokens in a batch; auto finds the fastest size.")] = "auto",
    options: EncoderOptions,
) -> None:
    """Write the vectors of texts, images or audio at many layers to a file, from one pass of the model."""
    from midlayer_encoders import vectors

    vectors.check_out(out, tokens=tokens)  # before anything is loaded
    paths = {"texts": texts, "images": images, "audio": audio}
    kind, _, inputs = _arguments.read_inputs(context, paths, field=field, skip_bad=skip_bad)
    inputs = inputs[:limit]
    if token_budget != "auto" and not token_budget.lstrip("-").isdigit():
        raise OptionError(f"`--token-budget` must be auto or a number of tokens, but got {token_budget!r}.")
    encoder = _arguments.load_model(model, options)
    unit = "waveforms" if kind == "audio" else kind
    with show_progress({"embedding": f"Embedding {unit}", "writing": "Writing vectors"}) as progress:
        written = vectors.embed(
            encoder,
            inputs,
            out,
            layers=_arguments.parse_layers(layers),
            site=site,
            tokens=tokens,
            from_sweep=from_sweep,
            token_budget="auto" if token_budget == "auto" else int(token_budget),
            progress=progress,
        )
    _output.print_result(path=written, inputs=len(inputs), kind=kind)
    _output.print_text(f"{'States' if tokens else 'Vectors'} of {len(inputs):,} {unit} are in {written}.", wrap=False)
