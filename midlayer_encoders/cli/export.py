"""``midlayer export``: a model cut at a layer, as a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.cli._app import (
    LayerText,
    Model,
    app,
    console,
    parse_layer,
    quieten,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running
from midlayer_encoders.encoder.options import NO_SITE, EncoderOptions
from midlayer_encoders.errors import OptionError


@app.command()
@long_running
@model_options(device="cpu")
def export(
    *,
    model: Model,
    layer: LayerText,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    center: Annotated[
        Path | None, typer.Option(help="A text a line: their mean vector is subtracted from every vector.")
    ] = None,
    site: Annotated[str | None, typer.Option(hidden=True)] = None,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that is not empty.")] = False,
    options: EncoderOptions,
) -> None:
    """Write a model cut at a layer to a folder that any SentenceTransformer loads."""
    if site not in (None, "block"):  # as `sweep` reads it: say why not, instead of that there is no such flag
        raise OptionError(NO_SITE)
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise OptionError(
            f"`--out` must be a new or empty folder, but {out} is not. Name another, or pass --overwrite."
        )
    quieten()
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.media.texts import read_texts

    if center is not None:
        options = replace(options, center=tuple(read_texts(center)))
    encoder = LayerEncoder(model, _layers(layer), **options.changed())
    encoder.save_pretrained(str(out))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    towers = ", ".join(f"{name} {number}" for name, number in encoder.layers.items())
    several = ", ".join(str(number) for number, _ in encoder.mixture)
    which = towers or f"{several or encoder.layer} of {encoder.num_layers}"
    console().print(f"Layer {which}, {parameters / 1e6:.1f}M parameters, is in {out}. Load it with:")
    trusted = ", trust_remote_code=True" if options.trust_remote_code else ""
    console().print(f'  SentenceTransformer("{out}"{trusted})', highlight=False)


def _layers(text: str) -> int | float | list[int | float] | dict[str, int | float]:
    """Return a layer, several, or one for each tower of a joint model.

    Example:
        >>> _layers("17"), _layers("8,12,-1"), _layers("text=6,image=0.5")
        (17, [8, 12, -1], {'text': 6, 'image': 0.5})
    """
    if "=" not in text:
        found = [parse_layer(part.strip()) for part in text.split(",")]
        return found if len(found) > 1 else found[0]
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): parse_layer(number.strip()) for name, _, number in pairs}
