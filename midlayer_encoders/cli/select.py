"""``midlayer select``: choose a layer of a model from your texts and a few labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli import _arguments, _output
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli._progress import show_progress
from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import exists, read_lines, write_file
from midlayer_encoders.recipes import PLAIN
from midlayer_encoders.validation import check_count, check_seed

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.selection import RecipeSelection, Selection

_CENTER_FILE = "center.txt"


@command(
    "Find the layer",
    "midlayer select MODEL --texts texts.txt",
    "midlayer select MODEL --texts texts.txt --labels labels.txt --recipes all",
    name="select",
)
def select_command(
    *,
    model: _arguments.Model,
    texts: _arguments.TextsFile,
    labels: Annotated[Path | None, typer.Option(help="File with the label of each text per line; or blank.")] = None,
    rule: Annotated[
        str, typer.Option(help="auto, few-labels, half-match, valley-midpoint, fixed-depth, last, or min-METRIC.")
    ] = "auto",
    recipes: _arguments.RecipeNames = None,
    all_rules: Annotated[bool, typer.Option(help="Apply every rule, in 3 passes instead of 1.")] = False,
    mixture: Annotated[
        bool, typer.Option("--mixture", help="Learn a weighted mean of several layers from the labels.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the table, the frame and the figure.")] = None,
    field: _arguments.FieldName = None,
    max_texts: Annotated[int, typer.Option(help="Maximum number of texts, evenly spaced.")] = 500,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Choose a layer of a model, and with --recipes a prompt; show what every other rule would choose."""
    _arguments.silence_libraries()
    from midlayer_encoders.selection import RecipeSelection, select, selection_passes

    check_count("--max-texts", max_texts)
    check_seed(seed)
    selection_passes(rule, all_rules=all_rules)  # refuses an unknown rule before the model is loaded
    if mixture and labels is None:
        raise OptionError("`--mixture` must be left out without --labels, from which its weights are learned.")
    recipe_list, options = _arguments.parse_recipes(recipes, options)
    if field is not None and out is None and any(recipe.center for recipe in recipe_list or ()):
        raise OptionError("`--out` must be given with `--field` and a recipe that centers: it stores the texts.")
    lines = _arguments.read_texts(texts, field=field)
    label_list = _read_labels(labels, len(lines)) if labels is not None else None
    encoder = _arguments.load_model(model, options)
    with show_progress({"measuring": "texts measured", "labels": "labeled texts read"}) as progress:
        selection = select(
            encoder,
            lines,
            label_list,
            rule=rule,
            recipes=recipe_list,
            all_rules=all_rules,
            mixture=mixture,
            max_texts=max_texts,
            seed=seed,
            progress=progress,
        )
    recipe = selection.recipe if isinstance(selection, RecipeSelection) else None
    if isinstance(selection, RecipeSelection):
        _print_recipes(selection)
    else:
        _print_rules(selection)
    if out is not None:
        _write(selection, out)
    if isinstance(selection, RecipeSelection):
        encoder_lines = _recipe_lines(selection, encoder, texts if out is None else out / _CENTER_FILE)
    else:
        encoder_lines = layer_lines(encoder, **selection.keywords)
    printed = _output.print_encoder_lines(encoder_lines)
    _output.print_result(
        model=selection.model,
        layer=selection.layer,
        num_layers=selection.num_layers,
        rule=selection.rule,
        reason=selection.reason,
        recipe=recipe,
        confidence=selection.confidence,
        choices=selection.to_frame().to_dicts(),
        folder=out,
        export=printed,
    )


def _read_labels(path: Path, count: int) -> list[str | None]:
    if not exists(path):
        raise OptionError(f"`--labels` must be a file, but there is none at {path}.")
    labels = [line.strip() or None for line in read_lines(path, OptionError)]
    if len(labels) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} nonblank texts, but {path} has {len(labels)}."
        )
    return labels


def layer_lines(
    encoder: LayerEncoder, layer: int | list[int], layer_weights: list[float] | None = None
) -> dict[str, str | None]:
    """Return the command and the Python expression that create the encoder of a layer, or of a mean of several."""
    name = encoder.source if isinstance(encoder.source, str) else encoder.name
    options = encoder.options
    if layer_weights is not None:
        options = replace(options, layer_weights=tuple(layer_weights))
    shell = None
    if layer_weights is None or encoder.norm == "none" or not encoder.anatomy.final:
        out = "layer-" + str(layer).strip("[]").replace(", ", "-")
        shell = shell_line(name, layer, options, out=out)
    else:
        _output.print_text("It cannot be exported: no plain folder applies the final norm to each layer.")
    return {"shell": shell, "Python": python_line(name, layer, options)}


def _recipe_lines(selection: RecipeSelection, encoder: LayerEncoder, center: Path) -> dict[str, Any]:
    """Return the command and the Python expression that create the encoder of a recipe and a layer."""
    from midlayer_encoders.sweeping.sweep_result import Notes, export_lines

    name = encoder.source if isinstance(encoder.source, str) else encoder.name
    options = encoder.options.changed()
    if selection.recipe != PLAIN:
        options |= selection.asked.changed() if selection.asked is not None else {"recipe": selection.recipe}
    options = {key: value for key, value in options.items() if key not in ("center", "layer")}
    vectors = {} if selection.center is None else {"center": str(center)}
    notes = Notes(title="", model=name, how={}, options=options, vectors=vectors)
    return dict(export_lines(notes, selection.layer))


def _print_recipes(selection: RecipeSelection) -> None:
    title = f"{selection.recipe} at layer {selection.layer} of {selection.num_layers} of {selection.model}"
    table = _output.make_table("recipe", "layer", "accuracy", "why", title=title, left=("recipe", "why"))
    for row in selection.to_frame().iter_rows(named=True):
        score = "" if row["score"] is None else f"{100 * row['score']:.1f}"
        style = "bold green" if row["chosen"] else None
        table.add_row(row["recipe"], str(row["layer"]), score, row["reason"], style=style)
    _output.console().print(table)
    _output.print_text(f"{selection.recipe}: {selection.reason}.", wrap=False)
    _output.print_text(selection.confidence, wrap=False)


def _print_rules(selection: Selection) -> None:
    title = f"Layer {selection.layer} of {selection.num_layers} of {selection.model}, by {selection.rule}"
    table = _output.make_table("rule", "layer", "why, or why not", title=title, left=("rule", "why, or why not"))
    for choice in selection.choices:
        style = "bold green" if choice.rule == selection.rule else "dim" if choice.layer is None else None
        table.add_row(choice.rule, "" if choice.layer is None else str(choice.layer), choice.reason, style=style)
    _output.console().print(table)
    _output.print_text(selection.confidence, wrap=False)
    if selection.mixture is not None:
        _output.print_text(selection.mixture.verdict(), wrap=False)


def _write(selection: Selection, out: Path) -> None:
    from midlayer_encoders.report import write_figure
    from midlayer_encoders.report.results import write_frame
    from midlayer_encoders.selection import RecipeSelection

    write_frame(selection.to_frame(), out / "selection.csv")
    write_frame(selection.frame, out / "frame.parquet")
    write_figure(selection.plot(), out / "selection.png")
    if isinstance(selection, RecipeSelection) and selection.center is not None:
        write_file(out / _CENTER_FILE, ("\n".join(selection.center) + "\n").encode())
    _output.print_text(f"Written to {out}: selection.csv, frame.parquet, selection.png")
