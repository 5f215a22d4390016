"""``midlayer export``: a model cut at a layer, as a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

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
from midlayer_encoders.errors import OptionError, check_choice

if TYPE_CHECKING:
    from midlayer_encoders.export import Exported, Target


@app.command()
@long_running
@model_options(device="cpu")
def export(
    *,
    model: Model,
    layer: LayerText,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    target: Annotated[
        str, typer.Option("--for", help="sentence-transformers, onnx, openvino or gguf; see docs/export.md.")
    ] = "sentence-transformers",
    int8: Annotated[
        bool, typer.Option("--int8", help="With --for onnx: a graph of 8-bit integers, too. With gguf: Q8_0, not F16.")
    ] = False,
    optimize: Annotated[
        bool, typer.Option("--optimize", help="With --for onnx: a graph that onnxruntime has optimized, too.")
    ] = False,
    center: Annotated[
        Path | None, typer.Option(help="A text a line: their mean vector is subtracted from every vector.")
    ] = None,
    site: Annotated[str | None, typer.Option(hidden=True)] = None,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that is not empty.")] = False,
    options: EncoderOptions,
) -> None:
    """Write a model cut at a layer to a folder that any SentenceTransformer loads, or for an engine."""
    if site not in (None, "block"):  # as `sweep` reads it: say why not, instead of that there is no such flag
        raise OptionError(NO_SITE)
    quieten()
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.export import TARGETS, check_out, export_for
    from midlayer_encoders.media.texts import read_texts

    check_choice("--for", target, TARGETS)
    check_out(out, overwrite, "--out", "--overwrite")
    for flag, given, about in (("--int8", int8, ("onnx", "gguf")), ("--optimize", optimize, ("onnx",))):
        if given and target not in about:
            raise OptionError(f"`{flag}` must be left out without --for {' or '.join(about)}, which it is about.")
    if center is not None:
        options = replace(options, center=tuple(read_texts(center)))
    encoder = LayerEncoder(model, _layers(layer), **options.changed())
    made = export_for(encoder, cast("Target", target), out, overwrite=overwrite, int8=int8, optimize=optimize)
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    towers = ", ".join(f"{name} {number}" for name, number in encoder.layers.items())
    several = ", ".join(str(number) for number, _ in encoder.mixture)
    which = towers or f"{several or encoder.layer} of {encoder.num_layers}"
    console().print(f"Layer {which}, {parameters / 1e6:.1f}M parameters, is in {out}.{_compared(made)}")
    if target != "sentence-transformers":
        return
    console().print("Load it with:")
    trusted = ", trust_remote_code=True" if options.trust_remote_code else ""
    console().print(f'  SentenceTransformer("{out}"{trusted})', highlight=False)


def _compared(made: Exported) -> str:
    """Return in words how the engine's vectors compare with the encoder's."""
    if made.engine is None:
        return ""
    how = "one minus cosine" if made.target == "gguf" else "relative error"
    eight = "" if made.int8_cosine is None else f"; 8-bit: cosine {made.int8_cosine:.4f}"
    return f" {made.engine} gives the encoder's vectors on sample inputs ({how} {made.error:.1e}{eight})."


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
