"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.errors import MidlayerError

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.progress import Progress

    from midlayer_encoders.encoder import LayerEncoder

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="Folder or name on the hub of a transformers model.")]
LayerText = Annotated[str, typer.Option("--layer", help="17, -1 (the last), or 0.7 (a fraction of the depth).")]
NormText = Annotated[
    str, typer.Option("--norm", help="final: the model's own final norm is applied; none: raw states.")
]
PoolingText = Annotated[str, typer.Option("--pooling", help="mean, last, cls, max or weightedmean.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub, as step1000.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default as in the files.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps; by default the best there is.")]
MaxLength = Annotated[int | None, typer.Option(help="Tokens after which a text is cut off.")]
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
def metrics(
    model: Model,
    texts: Annotated[Path, typer.Option(help="A text a line, or JSONL with --field.")],
    out: Annotated[Path, typer.Option(help="Folder for the frame (parquet and CSV) and the figure.")],
    names: Annotated[str, typer.Option("--metrics", help="paper, all, or names with commas.")] = "all",
    layers: Annotated[str, typer.Option(help="all, or layers with commas: 0,6,0.5,-1.")] = "all",
    field: Annotated[str | None, typer.Option(help="Field of each JSON line that holds the text.")] = None,
    wikitext: Annotated[bool, typer.Option(help="Drop headings and paragraphs under 30 tokens.")] = False,
    limit: Annotated[int | None, typer.Option(help="Take the first so many texts.")] = None,
    norm: NormText = "none",
    pooling: PoolingText = "mean",
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    max_length: MaxLength = None,
    gguf_file: GgufFile = None,
    seed: Annotated[int, typer.Option(help="Of the augmented views.")] = 0,
) -> None:
    """Measure every layer of a model on your texts: one pass over them, and one for each view."""
    from midlayer_encoders.measure import count_tokens, measure, num_passes
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.texts import read_texts, wikitext_paragraphs

    wanted = names if names in ("all", "paper") else names.split(",")
    passes = num_passes(wanted)  # a wrong name is said before the model is loaded
    lines = read_texts(texts, field=field)
    encoder = _whole_model(
        model, revision=revision, dtype=dtype, device=device, max_length=max_length, gguf_file=gguf_file
    )
    if wikitext:
        lines = wikitext_paragraphs(lines, lambda line: count_tokens(encoder, [line])[0])
    lines = lines[:limit]
    with _progress() as progress:
        bar = progress.add_task(f"{len(lines)} texts, {passes} passes", total=len(lines) * passes)
        frame = measure(
            encoder, lines, metrics=wanted, layers=parse_layers(layers), norm=norm, pooling=pooling, seed=seed,  # type: ignore[arg-type]
            dataset=texts.stem, advance=lambda count: progress.advance(bar, count),
        )  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    frame.write_parquet(out / "metrics.parquet")
    frame.write_csv(out / "metrics.csv")
    write_metrics_figure(frame, out / "metrics.png")
    _print_by_layer(frame)
    _console().print(f"Written to {out}: metrics.parquet, metrics.csv, metrics.png")


def _whole_model(model: str, *, gguf_file: str | None, **options: Any) -> LayerEncoder:
    """Return the encoder of a whole model; ``built-in`` is the one that the demo uses."""
    _quieten()
    from midlayer_encoders.encoder import LayerEncoder

    if model == "built-in":
        from midlayer_encoders.demo import built_in_model

        model, gguf_file = built_in_model()
    with _console().status(f"Loading {model}"):
        return LayerEncoder(model, -1, gguf_file=gguf_file, **options)


def parse_layers(text: str) -> str | list[int | float]:
    """Return layers from a shell's word.

    Example:
        >>> parse_layers("all"), parse_layers("0,6,0.5,-1")
        ('all', [0, 6, 0.5, -1])
    """
    return "all" if text == "all" else [parse_layer(part.strip()) for part in text.split(",")]


def _print_by_layer(frame: pl.DataFrame) -> None:
    """Print a row for each layer, a few metrics at a time so that they fit a terminal."""
    from rich.table import Table

    names = frame["name"].unique(maintain_order=True).to_list()
    for start in range(0, len(names), 6):
        shown = names[start : start + 6]
        table = Table()
        for title in ("layer", *shown):
            table.add_column(title, justify="right")
        values = {(layer, name): value for layer, name, value in frame.select("layer", "name", "value").iter_rows()}
        for layer in sorted(frame["layer"].unique().to_list()):
            cells = (values.get((layer, name)) for name in shown)
            table.add_row(str(layer), *("" if value is None else f"{value:.4g}" for value in cells))
        _console().print(table)


def _console() -> Console:
    from rich.console import Console

    return Console()


def _progress() -> Progress:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns)


def _quieten() -> None:
    """Turn off the loaders' own bars and notices, before they are imported: ours stand in for them."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@app.command()
def demo() -> None:
    """Cut the built-in model (SmolLM2-135M) at three depths and compare size, speed and quality, offline."""
    _quieten()
    from rich.table import Table

    from midlayer_encoders.demo import built_in_model, demo_pairs, run_depth
    from midlayer_encoders.encoder import LayerEncoder

    folder, file = built_in_model()
    pairs, depths = demo_pairs(), (0.2, 0.5, 1.0)
    with _progress() as progress:
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
    _console().print(table)


if __name__ == "__main__":
    main()
