"""``midlayer select``: which layer of a model to take, from your texts and a few labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midlayer_encoders.cli._app import (
    FieldName,
    Model,
    Seed,
    TextsFile,
    app,
    console,
    make_table,
    print_lines,
    quieten,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, shown
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError, check_count, check_seed
from midlayer_encoders.files import exists, read_lines

if TYPE_CHECKING:
    from midlayer_encoders.selection import Selection


@app.command("select")
@long_running
@model_options()
def select_command(
    *,
    model: Model,
    texts: TextsFile,
    labels: Annotated[Path | None, typer.Option(help="The label of each text, a line each; empty for none.")] = None,
    rule: Annotated[
        str, typer.Option(help="auto, few-labels, half-match, valley-midpoint, fixed-depth, last, or min-METRIC.")
    ] = "auto",
    all_rules: Annotated[bool, typer.Option(help="Measure what every rule needs: 3 passes, not 1.")] = False,
    mixture: Annotated[bool, typer.Option("--mixture", help="Learn a mean of several layers from the labels.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the table, the frame and the figure.")] = None,
    field: FieldName = None,
    max_texts: Annotated[int, typer.Option(help="Look at so many texts, at equal steps.")] = 500,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Choose a layer of a model, and show what every other rule would have chosen."""
    quieten()
    from midlayer_encoders.media.texts import read_texts
    from midlayer_encoders.selection import select, selection_passes

    check_count("--max-texts", max_texts)
    check_seed(seed)
    selection_passes(rule, all_rules=all_rules)  # a wrong name is refused before the model is loaded
    if mixture and labels is None:
        raise OptionError("`--mixture` must be left out without --labels, from which its weights are learned.")
    lines = read_texts(texts, field=field)
    known = _read_labels(labels, len(lines)) if labels is not None else None
    encoder = whole_model(model, options)
    with shown({"measuring": "texts measured", "labels": "labeled texts read"}) as progress:
        found = select(
            encoder, lines, known, rule=rule, all_rules=all_rules, mixture=mixture, max_texts=max_texts, seed=seed,
            progress=progress,
        )  # fmt: skip
    _print(found)
    if out is not None:
        _write(found, out)
    print_lines(encoder, **found.keywords)


def _read_labels(path: Path, count: int) -> list[str | None]:
    if not exists(path):
        raise OptionError(f"`--labels` must be a file, but there is none at {path}.")
    found = [line.strip() or None for line in read_lines(path, OptionError)]
    if len(found) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} texts not blank, but {path} has {len(found)}."
        )
    return found


def _print(found: Selection) -> None:
    title = f"Layer {found.layer} of {found.num_layers} of {found.model}, by {found.rule}"
    table = make_table("rule", "layer", "why, or why not", title=title, left=("rule", "why, or why not"))
    for choice in found.choices:
        style = "bold green" if choice.rule == found.rule else "dim" if choice.layer is None else None
        table.add_row(choice.rule, "" if choice.layer is None else str(choice.layer), choice.reason, style=style)
    console().print(table)
    console().print(found.confidence, highlight=False, soft_wrap=True)
    if found.mixture is not None:
        console().print(found.mixture.verdict(), highlight=False, soft_wrap=True)


def _write(found: Selection, out: Path) -> None:
    from midlayer_encoders.report import write_figure
    from midlayer_encoders.results import write_frame

    write_frame(found.to_frame(), out / "selection.csv")
    write_frame(found.frame, out / "frame.parquet")
    write_figure(found.plot(), out / "selection.png")
    console().print(f"Written to {out}: selection.csv, frame.parquet, selection.png")
