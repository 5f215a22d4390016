"""``midlayer export``: a model cut at a layer, as a folder."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

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
from midlayer_encoders.cli._progress import long_running, print_result
from midlayer_encoders.encoder.options import NO_SITE, EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    import polars as pl

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.export import Exported, Target


@app.command()
@long_running
@model_options(device="cpu")
def export(
    *,
    model: Model,
    layer: LayerText,
    out: Annotated[Path | None, typer.Option(help="Folder to write; it must be new or empty.")] = None,
    target: Annotated[
        str,
        typer.Option("--for", help="sentence-transformers, vllm, tei, onnx, openvino or gguf; see docs/export.md."),
    ] = "sentence-transformers",
    push: Annotated[str | None, typer.Option(help="Upload it to the hub, as OWNER/NAME.")] = None,
    scores: Annotated[Path | None, typer.Option(help="With --push: the --out of a sweep, for the card.")] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="With --push: by default the one of the model.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="With --push: others do not see it.")] = False,
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
    """Write a model cut at a layer to a folder that any SentenceTransformer loads, or for an engine, or to the hub."""
    if site not in (None, "block"):  # as `sweep` reads it: say why not, instead of that there is no such flag
        raise OptionError(NO_SITE)
    quieten()
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.export import (
        PUSHED,
        TARGETS,
        check_out,
        check_repository,
        export_for,
        push_to_hub,
        serving_line,
    )
    from midlayer_encoders.media.text_lists import read_texts

    check_choice("--for", target, TARGETS)
    if push is not None and target not in PUSHED:
        raise OptionError(f"`--push` must be left out with --for {target}: the hub's card is about a plain folder.")
    if push is None and out is None:
        raise OptionError("`--out` must name a folder to write, unless --push names a repository.")
    if push is None and (scores is not None or license_ is not None or private):
        raise OptionError("`--scores`, `--license` and `--private` must be left out without --push.")
    if out is not None:
        check_out(out, overwrite, "--out", "--overwrite")
    for flag, given, about in (("--int8", int8, ("onnx", "gguf")), ("--optimize", optimize, ("onnx",))):
        if given and target not in about:
            raise OptionError(f"`{flag}` must be left out without --for {' or '.join(about)}, which it is about.")
    if push is not None:  # a token that is not taken costs a second, not the export
        check_repository(push, argument="--push", private=private, overwrite=overwrite)
    if center is not None:
        options = replace(options, center=tuple(read_texts(center)))
    encoder = LayerEncoder(model, _layers(layer), **options.changed())
    found = None if scores is None else _scores(scores, encoder)
    with tempfile.TemporaryDirectory() as scratch:
        home = out if out is not None else Path(scratch) / "encoder"
        made = export_for(encoder, cast("Target", target), home, overwrite=overwrite, int8=int8, optimize=optimize)
        parameters = sum(parameter.numel() for parameter in encoder.parameters())
        towers = ", ".join(f"{name} {number}" for name, number in encoder.tower_layers.items())
        several = ", ".join(str(number) for number, _ in encoder.mixture)
        which = towers or f"{several or encoder.layer} of {encoder.num_layers}"
        place = out if out is not None else push
        address = None
        if push is not None:
            address = push_to_hub(
                encoder, push, exported=made, scores=found, license=license_, private=private or None,
                overwrite=overwrite,
            )  # fmt: skip
            console().print(f"Uploaded: {address}", highlight=False, soft_wrap=True)
    print_result(
        folder=out, repository=push, address=address, target=target, layer=towers or several or encoder.layer,
        num_layers=encoder.num_layers, parameters=parameters, engine=made.engine, error=made.error,
        int8_cosine=made.int8_cosine,
    )  # fmt: skip
    console().print(f"Layer {which}, {parameters / 1e6:.1f}M parameters, is in {place}.{_compared(made)}")
    if target in ("vllm", "tei"):
        console().print("Serve it with:")
        console().print(f"  {serving_line(encoder, target, str(place))}", highlight=False, soft_wrap=True)
    if target != "sentence-transformers":
        return
    console().print("Load it with:")
    trusted = ", trust_remote_code=True" if options.trust_remote_code else ""
    console().print(f'  SentenceTransformer("{place}"{trusted})', highlight=False)


def _scores(folder: Path, encoder: LayerEncoder) -> pl.DataFrame:
    """Return the frame of a sweep, or raise where its texts were put to the model in another way."""
    from midlayer_encoders.sweeping.sweep_result import RecipesResult, SweepResult

    result, own = SweepResult.load(folder), _of_texts(encoder.options.recreating())
    parts = list(result.parts.values()) if isinstance(result, RecipesResult) else [result]
    swept = [_of_texts({**one.notes.options, **one.notes.vectors, "site": one.notes.site}) for one in parts]
    for part, options in zip(parts, swept, strict=True):
        if options == own:
            return part.frame
    raise OptionError(
        f"`--scores` must be a sweep with the options of this encoder ({own}), but {folder} was swept with "
        f"{' and '.join(map(str, swept))}."
    )


def _of_texts(options: dict[str, Any]) -> dict[str, Any]:
    """Return options in a form that can be compared: of texts whose mean is subtracted, that there are some."""
    return {"site": "block", **options, "center": bool(options.get("center"))}


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
