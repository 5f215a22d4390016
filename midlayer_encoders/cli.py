"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from midlayer_encoders.errors import MidlayerError

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="Folder or name on the hub of a transformers model.")]
LayerText = Annotated[str, typer.Option("--layer", help="17, -1 (the last), or 0.7 (a fraction of the depth).")]
NormText = Annotated[
    str, typer.Option("--norm", help="final: the model's own final norm is applied; none: raw states.")
]
PoolingText = Annotated[str, typer.Option("--pooling", help="mean, last, cls, max or weightedmean.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub, as step1000.")]
GgufFile = Annotated[str | None, typer.Option(help="Name of a GGUF file in MODEL to read the weights from.")]


def main() -> None:
    """Run the command line; an error of ours is one line, not a traceback."""
    try:
        app()
    except MidlayerError as error:
        from rich.console import Console

        Console(stderr=True).print(f"[bold red]Error:[/] {error}", highlight=False, markup=True, soft_wrap=True)
        sys.exit(2)


def parse_layer(text: str) -> int | float:
    """Return a layer from a shell's word: ``"17"`` is the layer 17, ``"0.7"`` a fraction of the depth.

    Example:
        >>> parse_layer("17"), parse_layer("-1"), parse_layer("0.7")
        (17, -1, 0.7)
    """
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        raise typer.BadParameter(f"must be 17, -1 or 0.7, but got {text!r}") from None


@app.callback()
def _callback() -> None:
    """Embeddings from the layer of a model that embeds best."""


@app.command()
def export(
    model: Model,
    layer: LayerText,
    out: Annotated[Path, typer.Option(help="Folder to write; it must be new or empty.")],
    norm: NormText = "final",
    pooling: PoolingText = "mean",
    revision: Revision = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; that of the files by default.")
    ] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens after which a text is cut off.")] = None,
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
    from rich.console import Console

    from midlayer_encoders.encoder import LayerEncoder

    encoder = LayerEncoder(
        model, parse_layer(layer), norm=norm, pooling=pooling, revision=revision, dtype=dtype, device="cpu",  # type: ignore[arg-type]
        max_length=max_length, bidirectional=bidirectional, adapters=adapter or (), gguf_file=gguf_file,
    )  # fmt: skip
    encoder.save_pretrained(str(out))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    console = Console()
    console.print(
        f"Layer {encoder.layer} of {encoder.num_layers}, {parameters / 1e6:.1f}M parameters, is in {out}. Load it with:"
    )
    console.print(f'  SentenceTransformer("{out}")', highlight=False)


@app.command()
def demo() -> None:
    """Cut the built-in model (SmolLM2-135M) at three depths and compare size, speed and quality, offline."""
    os.environ["TQDM_DISABLE"] = "1"  # one bar of ours instead of the loaders' many
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    from midlayer_encoders.demo import built_in_model, demo_pairs, run_depth
    from midlayer_encoders.encoder import LayerEncoder

    folder, file = built_in_model()
    pairs, depths = demo_pairs(), (0.2, 0.5, 1.0)
    with Progress() as progress:
        bar = progress.add_task("SmolLM2-135M at three depths", total=len(depths))
        results = []
        for depth in depths:
            results.append(run_depth(LayerEncoder(folder, depth, gguf_file=file, device="cpu"), pairs))
            progress.advance(bar)
    whole = results[-1]
    table = Table(title=f"SmolLM2-135M, {len(pairs)} pairs of sentences")
    for title in ("layer", "parameters", "texts/s", "speed-up", "Spearman x 100"):
        table.add_column(title, justify="right")
    for result in results:
        table.add_row(
            f"{result.layer}" + (" (last)" if result is whole else ""), f"{result.parameters / 1e6:.1f}M",
            f"{result.texts_per_second:.0f}", f"{result.texts_per_second / whole.texts_per_second:.1f}x",
            f"{100 * result.spearman:.1f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
