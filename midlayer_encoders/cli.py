"""``midlayer …``: the package from a shell. Words only; what is done lives in the other rooms."""

from __future__ import annotations

import os
import re
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
    from midlayer_encoders.sweeping import Progress as SweepProgress
    from midlayer_encoders.sweeping import SweepResult

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[
    str, typer.Argument(help="Folder or name on the hub of a transformers model, or built-in (SmolLM2-135M).")
]
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
        from rich.markup import escape

        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
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

    model, gguf_file = _resolved(model, gguf_file)
    encoder = LayerEncoder(
        model, parse_layer(layer), norm=norm, pooling=pooling, revision=revision, dtype=dtype, device="cpu",  # type: ignore[arg-type]
        max_length=max_length, bidirectional=bidirectional, adapters=adapter or (), gguf_file=gguf_file,
    )  # fmt: skip
    encoder.save_pretrained(str(out))
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    console = _console()
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
    _quieten()
    from midlayer_encoders.measuring import count_tokens, measure, num_passes
    from midlayer_encoders.report import write_metrics_figure
    from midlayer_encoders.texts import read_texts, wikitext_paragraphs

    wanted = _names(names)
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
    from midlayer_encoders.encoder import LayerEncoder

    folder, gguf_file = _resolved(model, gguf_file)
    with _console().status(f"Loading {model}"):
        encoder = LayerEncoder(folder, -1, gguf_file=gguf_file, **options)
    encoder.source = model
    return encoder


def _resolved(model: str, gguf_file: str | None) -> tuple[str, str | None]:
    """Return the folder and file that a model's name on the command line stands for."""
    if model != "built-in":
        return model, gguf_file
    from midlayer_encoders.demo import built_in_model

    return built_in_model()


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
        for title in ("layer", *(name.replace("_", " ") for name in shown)):  # words can wrap
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
def sweep(
    model: Model,
    tasks: Annotated[
        str, typer.Option(help="Names of mteb tasks or benchmarks, paper, builtin, or paths, with commas.")
    ],
    layers: Annotated[str, typer.Option(help="all, or layers with commas: 0,6,0.5,-1.")] = "all",
    names: Annotated[str, typer.Option("--metrics", help="none, paper, all, or names with commas.")] = "paper",
    out: Annotated[Path | None, typer.Option(help="Folder for frame, results and page.")] = None,
    store: Annotated[Path | None, typer.Option(help="Folder of embeddings, which sweeps may share.")] = None,
    half: Annotated[bool, typer.Option(help="Keep the embeddings in float16: half the room.")] = False,
    workers: Annotated[int | None, typer.Option(help="Processes that score layers; all cores by default.")] = None,
    norm: NormText = "final",
    pooling: PoolingText = "mean",
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    max_length: MaxLength = None,
    gguf_file: GgufFile = None,
    devices: Annotated[int, typer.Option(help="Processes on this machine that share the embedding.")] = 1,
    num_nodes: Annotated[int, typer.Option(help="Machines that share it (torchrun or SLURM start them).")] = 1,
) -> None:
    """Score every layer of a model on mteb tasks from one forward pass over each text."""
    _quieten()
    from midlayer_encoders.tasks import task_sources

    task_sources(tasks.split(","))  # a wrong name is said before the model is loaded
    options = {"revision": revision, "dtype": dtype, "device": device, "max_length": max_length}
    encoder = _whole_model(model, gguf_file=gguf_file, **options)
    _sweep(
        encoder, tasks.split(","), layers=parse_layers(layers), metrics=_names(names), out=out, store=store,
        store_dtype="float16" if half else "float32", workers=workers, norm=norm, pooling=pooling, devices=devices,
        num_nodes=num_nodes,
    )  # fmt: skip


def _names(text: str) -> str | list[str]:
    return [] if text == "none" else text if text in ("all", "paper") else text.split(",")


def _sweep(encoder: LayerEncoder, tasks: list[str], **options: Any) -> None:
    """Run a sweep with its bars, print the table and where the page lies; exit with 1 where a task failed."""
    from midlayer_encoders import sweeping

    with _progress() as progress:
        result = sweeping.sweep(encoder, tasks, progress=_bars(progress), **options)
    _print_scores(result)
    for task, error in result.failures.items():
        _console().print(f"{task} failed, {error}", style="bold red", highlight=False, markup=False)
    if not result.frame.is_empty():  # where every task failed there is nothing to report
        _console().print(f"The report: {result.to_html()}", soft_wrap=True)
    if result.failures:
        raise typer.Exit(1)


def _bars(progress: Progress) -> SweepProgress:
    from midlayer_encoders.sweeping import Progress as SweepProgress

    class Bars(SweepProgress):
        """Three bars, each shown when there is something to do."""

        def __init__(self) -> None:
            titles = {"embedding": "texts embedded", "evaluating": "layers scored", "measuring": "texts measured"}
            self._bars = {name: progress.add_task(title, total=0, visible=False) for name, title in titles.items()}

        def _move(self, name: str, done: int, more: int) -> None:
            bar = self._bars[name]
            total = (progress.tasks[bar].total or 0) + more
            progress.update(bar, advance=done, total=total, visible=total > 0)

        def embedding(self, done: int, more: int) -> None:
            self._move("embedding", done, more)

        def evaluating(self, done: int, more: int) -> None:
            self._move("evaluating", done, more)

        def measuring(self, done: int, more: int) -> None:
            self._move("measuring", done, more)

    return Bars()


def _print_scores(result: SweepResult) -> None:
    """Print a row for each layer, a column for each task, and what the best layer gains over the last."""
    import polars as pl
    from rich.table import Table

    from midlayer_encoders.tasks import task_label

    scores = result.frame.filter(pl.col("kind") == "score")
    if scores.is_empty():
        return
    found = result.summary()
    table = Table(title=result.notes.title)
    labels = (re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", task_label(curve.name)) for curve in found.tasks)
    for title in ("layer", *labels, "mean"):
        table.add_column(title, justify="right")
    curves = [*found.tasks, *([found.average] if found.average else [])]
    for layer in sorted(scores["layer"].unique().to_list()):
        cells = (curve.points.get(layer) for curve in curves)
        best = found.average is not None and layer == found.average.best_layer
        row = ("" if value is None else f"{value:.1f}" for value in cells)
        table.add_row(str(layer), *row, style="bold green" if best else None)
    if result.notes.baselines:
        shown = [100 * result.notes.baselines.get(curve.name, float("nan")) for curve in found.tasks]
        table.add_section()
        table.add_row("TF-IDF", *(f"{value:.1f}" for value in shown), f"{sum(shown) / len(shown):.1f}")
    _console().print(table)
    if found.average is not None:
        average = found.average
        _console().print(
            f"Best layer: {average.best_layer} of {found.num_layers}, {average.best:.1f} points, "
            f"{average.gain:+.1f} over the last layer."
        )


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="The --out of a sweep.")]) -> None:
    """Write the page of a sweep again from its frame."""
    from midlayer_encoders.sweeping.result import SweepResult

    _console().print(f"The report: {SweepResult.load(folder).to_html()}", soft_wrap=True)


@app.command()
def cache(
    root: Annotated[Path, typer.Argument(help="A folder of embeddings: --store, or embeddings inside --out.")],
    remove: Annotated[list[str] | None, typer.Option(help="Key of a store to remove; repeatable.")] = None,
    unused_days: Annotated[int | None, typer.Option(help="Remove stores not used for so many days.")] = None,
    keep_gb: Annotated[float | None, typer.Option(help="Remove the longest unused until so much is left.")] = None,
    dry_run: Annotated[bool, typer.Option(help="Say what would be removed, and remove nothing.")] = False,
) -> None:
    """List the stores of embeddings in a folder, and remove what is not wanted."""
    from datetime import timedelta

    from rich.table import Table

    from midlayer_encoders.store import list_stores, prune

    if remove or unused_days is not None or keep_gb is not None:
        gone = prune(
            root, keys=remove or None, unused_for=None if unused_days is None else timedelta(days=unused_days),
            keep_bytes=None if keep_gb is None else int(keep_gb * 1e9), dry_run=dry_run,
        )  # fmt: skip
        _console().print(f"{'Would remove' if dry_run else 'Removed'} {len(gone)} stores.")
    table = Table()
    for title in ("key", "model", "texts", "layers", "MB", "last used"):
        table.add_column(title)
    for info in list_stores(root):
        cells = (info.key, str(info.description.get("model", "")), str(info.texts), str(len(info.layers)))
        table.add_row(*cells, f"{info.bytes / 1e6:.1f}", f"{info.last_used:%Y-%m-%d %H:%M}")
    _console().print(table)


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for what it finds.")] = Path("midlayer-results/demo")) -> None:
    """Score all 31 layers of the built-in model (SmolLM2-135M) on the five built-in tasks, offline, with a report."""
    _quieten()
    encoder = _whole_model("built-in", gguf_file=None, device="cpu")
    _sweep(encoder, ["builtin"], metrics="paper", metric_texts=64, views=4, out=out)


if __name__ == "__main__":
    main()
