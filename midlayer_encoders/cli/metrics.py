"""``midlayer metrics``: every layer of a model measured on your texts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midlayer_encoders.cli._app import (
    Device,
    Dtype,
    GgufFile,
    MaxLength,
    Model,
    NormText,
    PoolingText,
    Revision,
    app,
    console,
    parse_layers,
    parse_names,
    progress_bars,
    quieten,
    whole_model,
)

if TYPE_CHECKING:
    import polars as pl


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
    quieten()
    from midlayer_encoders.measuring import count_tokens, measure, num_passes
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.texts import read_texts, wikitext_paragraphs

    wanted = parse_names(names)
    passes = num_passes(wanted)  # a wrong name is said before the model is loaded
    lines = read_texts(texts, field=field)
    encoder = whole_model(
        model, revision=revision, dtype=dtype, device=device, max_length=max_length, gguf_file=gguf_file
    )
    if wikitext:
        lines = wikitext_paragraphs(lines, lambda line: count_tokens(encoder, [line])[0])
    lines = lines[:limit]
    with progress_bars() as progress:
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
    console().print(f"Written to {out}: metrics.parquet, metrics.csv, metrics.png")


def _print_by_layer(frame: pl.DataFrame) -> None:
    """Print a row for each layer, a few metrics at a time so that they fit a terminal."""
    from rich.table import Table

    names = frame["name"].unique(maintain_order=True).to_list()
    for start in range(0, len(names), 6):
        shown = names[start : start + 6]
        table = Table()
        for title in ("layer", *(name.replace("_", " ") for name in shown)):  # words can wrap
            table.add_column(title, justify="right")
        values = {(layer, name): value for layer, name, value in frame.select("layer", "name", "value").iter_rows()}
        for layer in sorted(frame["layer"].unique().to_list()):
            cells = (values.get((layer, name)) for name in shown)
            table.add_row(str(layer), *("" if value is None else f"{value:.4g}" for value in cells))
        console().print(table)
