"""``midlayer select``: which layer of a model to take, from your texts and a few labels."""

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
    progress_bars,
    quieten,
    whole_model,
)
from midlayer_encoders.errors import OptionError

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection


@app.command("select")
def select_command(
    model: Model,
    texts: Annotated[Path, typer.Option(help="A text a line, or JSONL with --field.")],
    labels: Annotated[Path | None, typer.Option(help="The label of each text, a line each; empty for none.")] = None,
    rule: Annotated[
        str, typer.Option(help="auto, few-labels, half-match, valley-midpoint, fixed-depth, last, or min-METRIC.")
    ] = "auto",
    all_rules: Annotated[bool, typer.Option(help="Measure what every rule needs: 3 passes, not 1.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the table, the frame and the figure.")] = None,
    field: Annotated[str | None, typer.Option(help="Field of each JSON line that holds the text.")] = None,
    max_texts: Annotated[int, typer.Option(help="Look at so many texts, at equal steps.")] = 500,
    norm: NormText = "final",
    pooling: PoolingText = "mean",
    revision: Revision = None,
    dtype: Dtype = None,
    device: Device = None,
    max_length: MaxLength = None,
    gguf_file: GgufFile = None,
    seed: Annotated[int, typer.Option(help="Of views, folds and resamples.")] = 0,
) -> None:
    """Choose a layer of a model, and show what every other rule would have chosen."""
    quieten()
    from midlayer_encoders.selection import select, selection_passes
    from midlayer_encoders.texts import read_texts

    passes = selection_passes(rule, all_rules=all_rules)  # a wrong name is said before the model is loaded
    lines = read_texts(texts, field=field)
    known = _read_labels(labels, len(lines)) if labels is not None else None
    encoder = whole_model(
        model, gguf_file=gguf_file, norm=norm, pooling=pooling, revision=revision, dtype=dtype, device=device,
        max_length=max_length,
    )  # fmt: skip
    labelled = min(max_texts, sum(label is not None for label in known or ()))
    with progress_bars() as progress:
        bar = progress.add_task("texts read", total=min(len(lines), max_texts) * passes + labelled)
        found = select(
            encoder, lines, known, rule=rule, all_rules=all_rules, max_texts=max_texts, seed=seed,
            advance=lambda count: progress.advance(bar, count),
        )  # fmt: skip
    _print(found)
    if out is not None:
        _write(found, out)
    chosen: dict[str, tuple[object, object]] = {
        "norm": (norm, "final"),
        "pooling": (pooling, "mean"),
        "revision": (revision, None),
    }
    chosen |= {"dtype": (dtype, None), "max-length": (max_length, None), "gguf-file": (gguf_file, None)}
    # The layer was chosen under these: another pooling or norm would be another encoder.
    options = "".join(f" --{name} {value}" for name, (value, default) in chosen.items() if value != default)
    command = f"midlayer export {model} --layer {found.layer}{options} --out FOLDER"
    console().print(f"Take it with: {command}", highlight=False, soft_wrap=True)


def _read_labels(path: Path, count: int) -> list[str | None]:
    if not path.is_file():
        raise OptionError(f"`--labels` must be a file, but there is none at {path}.")
    found = [line.strip() or None for line in path.read_text(encoding="utf8").splitlines()]
    if len(found) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} texts not blank, but {path} has {len(found)}."
        )
    return found


def _print(found: Selection) -> None:
    from rich.table import Table

    table = Table(title=f"Layer {found.layer} of {found.num_layers} of {found.model}, by {found.rule}")
    for title, side in (("rule", "left"), ("layer", "right"), ("why, or why not", "left")):
        table.add_column(title, justify=side)  # type: ignore[arg-type]
    for choice in found.choices:
        style = "bold green" if choice.rule == found.rule else "dim" if choice.layer is None else None
        table.add_row(choice.rule, "" if choice.layer is None else str(choice.layer), choice.reason, style=style)
    console().print(table)
    console().print(found.confidence, highlight=False, soft_wrap=True)


def _write(found: Selection, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    found.to_frame().write_csv(out / "selection.csv")
    found.frame.write_parquet(out / "frame.parquet")
    found.plot().savefig(out / "selection.png", dpi=150)
    console().print(f"Written to {out}: selection.csv, frame.parquet, selection.png")
