"""``midlayer export``: a model cut at a layer, as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.cli._app import (
    Dtype,
    GgufFile,
    LayerText,
    MaxLength,
    Model,
    NormText,
    Revision,
    TowerText,
    app,
    console,
    parse_layer,
    resolve_model,
)
from midlayer_encoders.errors import MidlayerError


@app.command()
def export(
    model: Model,
    layer: LayerText,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    norm: NormText = "final",
    pooling: Annotated[str | None, typer.Option(help="mean (the default), last, cls, max or weightedmean.")] = None,
    revision: Revision = None,
    dtype: Dtype = None,
    max_length: MaxLength = None,
    bidirectional: Annotated[bool, typer.Option(help="Turn a causal model's mask off, as LLM2Vec does.")] = False,
    adapter: Annotated[list[str] | None, typer.Option(help="PEFT adapter to merge before the cut; repeatable.")] = None,
    gguf_file: GgufFile = None,
    tower: TowerText = None,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write a model cut at a layer to a folder that any SentenceTransformer loads."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise MidlayerError(
            f"`--out` must be a new or empty folder, but {out} is not. Name another, or pass --overwrite."
        )
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

    model, gguf_file = resolve_model(model, gguf_file)
    encoder = LayerEncoder(
        model, _layers(layer), norm=norm, pooling=pooling, revision=revision, dtype=dtype, device="cpu",  # type: ignore[arg-type]
        max_length=max_length, bidirectional=bidirectional, adapters=adapter or (), gguf_file=gguf_file,
        tower=tower,  # type: ignore[arg-type]
    )  # fmt: skip
    encoder.save_pretrained(str(out))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    towers = ", ".join(f"{name} {number}" for name, number in encoder.layers.items())
    told = towers or f"{encoder.layer} of {encoder.num_layers}"
    console().print(f"Layer {told}, {parameters / 1e6:.1f}M parameters, is in {out}. Load it with:")
    console().print(f'  SentenceTransformer("{out}")', highlight=False)


def _layers(text: str) -> int | float | dict[str, int | float]:
    """Return a layer, or one for each tower of a joint model.

    Example:
        >>> _layers("17"), _layers("text=6,image=0.5")
        (17, {'text': 6, 'image': 0.5})
    """
    if "=" not in text:
        return parse_layer(text)
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): parse_layer(number.strip()) for name, _, number in pairs}
