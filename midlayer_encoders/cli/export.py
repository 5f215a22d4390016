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
    PoolingText,
    Revision,
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
    pooling: PoolingText = "mean",
    revision: Revision = None,
    dtype: Dtype = None,
    max_length: MaxLength = None,
    bidirectional: Annotated[bool, typer.Option(help="Turn a causal model's mask off, as LLM2Vec does.")] = False,
    adapter: Annotated[list[str] | None, typer.Option(help="PEFT adapter to merge before the cut; repeatable.")] = None,
    gguf_file: GgufFile = None,
    overwrite: Annotated[bool, typer.Option(help="Write into a folder that is not empty.")] = False,
) -> None:
    """Write a model cut at a layer to a folder that any SentenceTransformer loads."""
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not overwrite):
        raise MidlayerError(
            f"`--out` must be a new or empty folder, but {out} is not. Name another, or pass --overwrite."
        )
    from midlayer_encoders.encoder import LayerEncoder

    model, gguf_file = resolve_model(model, gguf_file)
    encoder = LayerEncoder(
        model, parse_layer(layer), norm=norm, pooling=pooling, revision=revision, dtype=dtype, device="cpu",  # type: ignore[arg-type]
        max_length=max_length, bidirectional=bidirectional, adapters=adapter or (), gguf_file=gguf_file,
    )  # fmt: skip
    encoder.save_pretrained(str(out))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    console().print(
        f"Layer {encoder.layer} of {encoder.num_layers}, {parameters / 1e6:.1f}M parameters, is in {out}. Load it with:"
    )
    console().print(f'  SentenceTransformer("{out}")', highlight=False)
