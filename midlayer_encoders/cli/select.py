"""``midlayer select``: which layer of a model to take, from your texts and a few labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midlayer_encoders.cli._app import (
    FieldName,
    Model,
    RecipeNames,
    Seed,
    TextsFile,
    app,
    asked_recipes,
    console,
    make_table,
    print_lines,
    quieten,
    read_own,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result, shown
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import exists, read_lines
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.validation import check_count, check_seed

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.selection import RecipeSelection, Selection

_CENTER = "center.txt"


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
    recipes: RecipeNames = None,
    all_rules: Annotated[bool, typer.Option(help="Measure what every rule needs: 3 passes, not 1.")] = False,
    mixture: Annotated[bool, typer.Option("--mixture", help="Learn a mean of several layers from the labels.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the table, the frame and the figure.")] = None,
    field: FieldName = None,
    max_texts: Annotated[int, typer.Option(help="Look at so many texts, at equal steps.")] = 500,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Choose a layer of a model, and with --recipes how it is asked; show what every other rule would have chosen."""
    quieten()
    from midlayer_encoders.selection import RecipeSelection, select, selection_passes

    check_count("--max-texts", max_texts)
    check_seed(seed)
    selection_passes(rule, all_rules=all_rules)  # a wrong name is refused before the model is loaded
    if mixture and labels is None:
        raise OptionError("`--mixture` must be left out without --labels, from which its weights are learned.")
    asked, options = asked_recipes(recipes, options)
    if field is not None and out is None and any(recipe.center for recipe in asked or ()):
        raise OptionError("`--out` must be given with `--field` and a recipe that centers: it keeps the texts for it.")
    lines = read_own(texts, field=field)
    known = _read_labels(labels, len(lines)) if labels is not None else None
    encoder = whole_model(model, options)
    with shown({"measuring": "texts measured", "labels": "labeled texts read"}) as progress:
        found = select(
            encoder, lines, known, rule=rule, recipes=asked, all_rules=all_rules, mixture=mixture,
            max_texts=max_texts, seed=seed, progress=progress,
        )  # fmt: skip
    if isinstance(found, RecipeSelection):
        _print_recipes(found)
    else:
        _print(found)
    if out is not None:
        _write(found, out)
    if isinstance(found, RecipeSelection):
        lines_made = _print_made(found, encoder, texts if out is None else out / _CENTER)
    else:
        lines_made = print_lines(encoder, **found.keywords)
    print_result(
        model=found.model, layer=found.layer, num_layers=found.num_layers, rule=found.rule, reason=found.reason,
        recipe=found.recipe if isinstance(found, RecipeSelection) else None, confidence=found.confidence,
        choices=found.to_frame().to_dicts(), folder=out, export=lines_made,
    )  # fmt: skip


def _read_labels(path: Path, count: int) -> list[str | None]:
    if not exists(path):
        raise OptionError(f"`--labels` must be a file, but there is none at {path}.")
    found = [line.strip() or None for line in read_lines(path, OptionError)]
    if len(found) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} texts not blank, but {path} has {len(found)}."
        )
    return found


def _print_made(found: RecipeSelection, encoder: LayerEncoder, center: Path) -> dict[str, str | None]:
    """Print the command and the Python line that make the encoder of a recipe and a layer; return both."""
    from midlayer_encoders.sweeping.sweep_result import Notes, export_lines

    name = encoder.source if isinstance(encoder.source, str) else encoder.name
    recipe = found.asked.changed() if found.asked is not None else {"recipe": found.recipe}
    made = {**encoder.options.changed(), **recipe} if found.recipe != PLAIN else encoder.options.changed()
    made = {key: value for key, value in made.items() if key not in ("center", "layer")}
    vectors = {} if found.center is None else {"center": str(center)}
    lines = export_lines(Notes(title="", model=name, how={}, options=made, vectors=vectors), found.layer)
    for title, line in (("Export it:", lines["shell"]), ("In Python:", lines["Python"])):
        console().print(title, line, soft_wrap=True, highlight=False, markup=False)
    return {"shell": lines["shell"], "python": lines["Python"]}


def _print_recipes(found: RecipeSelection) -> None:
    title = f"{found.recipe} at layer {found.layer} of {found.num_layers} of {found.model}"
    table = make_table("recipe", "layer", "accuracy", "why", title=title, left=("recipe", "why"))
    for row in found.to_frame().iter_rows(named=True):
        score = "" if row["score"] is None else f"{100 * row['score']:.1f}"
        table.add_row(
            row["recipe"], str(row["layer"]), score, row["reason"], style="bold green" if row["chosen"] else None
        )
    console().print(table)
    console().print(f"{found.recipe}: {found.reason}.", highlight=False, soft_wrap=True)
    console().print(found.confidence, highlight=False, soft_wrap=True)


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
    from midlayer_encoders.files import write_file
    from midlayer_encoders.report import write_figure
    from midlayer_encoders.report.results import write_frame
    from midlayer_encoders.selection import RecipeSelection

    write_frame(found.to_frame(), out / "selection.csv")
    write_frame(found.frame, out / "frame.parquet")
    write_figure(found.plot(), out / "selection.png")
    if isinstance(found, RecipeSelection) and found.center is not None:
        write_file(out / _CENTER, ("\n".join(found.center) + "\n").encode())
    console().print(f"Written to {out}: selection.csv, frame.parquet, selection.png")
