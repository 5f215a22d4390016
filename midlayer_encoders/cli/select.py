"""``midlayer select``: choose a layer of a model from your texts and a few labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.markup import escape
from typer import Option

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import check_output_folder, read_lines, shell_path, write_file
from midlayer_encoders.recipes import Recipe

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.selection import Selection

_CENTER_FILE = "center.txt"
_STAGES = {
    "kind": "tokens read to tell the kind of the model",
    "measuring": "tokens measured",
    "computing": "metrics computed",
    "labels": "tokens of labeled texts read",
    "scoring": "label scores computed",
}


@command("Find the layer", name="select")
def select_command(
    *,
    model: _arguments.Model,
    texts: _arguments.TextsFile,
    labels: Annotated[Path | None, Option(help="File with the label of each text per line; or blank.")] = None,
    data: _arguments.Data,
    rule: Annotated[str, Option(help="auto, few-labels, half-match, valley-midpoint, fixed-depth, last …")] = "auto",
    recipes: _arguments.RecipeNames = None,
    all_rules: Annotated[bool, Option(help="Measure what every rule needs, in 3 passes.")] = False,
    out: Annotated[Path | None, Option(help="Folder for the table, the frame and the figure.")] = None,
    limit: _arguments.Limit = None,
    max_texts: Annotated[int, Option(min=1, help="Maximum number of texts, evenly spaced.")] = 500,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Choose a prompt and a layer of a model; show what the other recipes or rules would choose.

    Examples:
        midlayer select MODEL --texts texts.txt
        midlayer select MODEL --texts texts.txt --labels labels.txt --recipes all
    """
    from midlayer_encoders.arguments import RULE_NAMES
    from midlayer_encoders.tasks.sources import has_labels, own_labels
    from midlayer_encoders.validation import check_choice

    check_choice("rule", rule, RULE_NAMES)
    if labels is not None and data.label_column is not None:
        raise OptionError("`--label-column` cannot be combined with `--labels`, which is another file of labels.")
    recipe_list, options = _arguments.parse_recipes(recipes, options)
    is_table = _arguments.is_table(texts)
    if is_table and out is None and any(recipe.center for recipe in recipe_list or ()):
        raise OptionError("`--out` must be given with a table and a recipe that centers: it stores the texts.")
    if out is not None:
        check_output_folder(out)
    inputs = _arguments.read_texts(texts, data)
    label_list = None if labels is None else _read_labels(labels, len(inputs))
    if data.label_column is not None:
        label_list = own_labels(texts, data.columns())
    elif labels is None and has_labels(texts, data.columns()):
        _output.print_text(f"{texts} has a column label, which is not read. Pass --label-column label to choose by it.")
    encoder = _arguments.load_model(model, options)
    from midlayer_encoders.selection import select

    with _progress.show_progress(_STAGES) as progress:
        selection = select(
            encoder,
            inputs[:limit],
            None if label_list is None else label_list[:limit],
            rule=rule,
            recipes=recipe_list,
            all_rules=all_rules,
            max_texts=max_texts,
            seed=seed,
            progress=progress,
        )
    _print_choices(selection)
    is_center_file = out is None and not is_table and len(inputs) <= min(limit or max_texts, max_texts)
    lines = encoder_lines(encoder, selection.keywords, texts if is_center_file else (out or Path()) / _CENTER_FILE)
    if out is not None:
        _write(selection, out, lines)
    names = ("model", "layer", "num_layers", "rule", "recipe", "reason", "confidence")
    _output.print_result(
        **{name: getattr(selection, name) for name in names},
        kind=None if selection.kind is None else asdict(selection.kind),
        tokens=selection.tokens.get(selection.recipe),
        choices=selection.to_frame().to_dicts(),
        folder=out,
        export=_output.print_encoder_lines(lines),
    )
    if out is None and not is_center_file and "center" in selection.keywords:
        _output.print_text(f"Pass --out FOLDER to store {_CENTER_FILE}, the texts that the recipe centers on.")


def _read_labels(path: Path, count: int) -> list[str | None]:
    labels = [line.strip() or None for line in read_lines(path, OptionError)]
    if len(labels) != count:
        raise OptionError(
            f"`--labels` must have a line for each of the {count} nonblank texts, but {path} has {len(labels)}."
        )
    return labels


def encoder_lines(encoder: LayerEncoder, keywords: dict[str, Any], center: Path) -> dict[str, str]:
    """Return the command and the Python expression that create the encoder of a selection.

    Args:
        encoder: the encoder of the whole model.
        keywords: of the selection.
        center: file with the texts that a recipe centers on.
    """
    from midlayer_encoders.sweeping.best_layer import Notes, export_lines

    options = encoder.options.changed() | keywords
    if isinstance(options.get("recipe"), Recipe):
        options |= options.pop("recipe").changed()
    options = {key: value for key, value in options.items() if key not in ("center", "layer")}
    vectors = {"center": str(center)} if "center" in keywords else {}
    notes = Notes(title="", model=encoder.source, how={}, options=options, vectors=vectors)
    return export_lines(notes, keywords["layer"])


def _print_choices(selection: Selection) -> None:
    """Print the choice of every rule or recipe."""
    table = selection.to_frame()
    label = "recipe" if selection.parts else "rule"
    numbers = {"score": ("accuracy", 100), "tokens": ("tokens per text", 1)}
    number_columns = [name for name in numbers if name in table.columns and table[name].null_count() < len(table)]
    columns = [label, "layer", *(numbers[name][0] for name in number_columns), "why, or why not"]
    rows = []
    for row in table.iter_rows(named=True):
        layer = "" if row["layer"] is None else str(row["layer"])
        cells = ["" if row[name] is None else f"{numbers[name][1] * row[name]:.1f}" for name in number_columns]
        rows.append([row[label], layer, *cells, escape(row["reason"])])
    chosen = getattr(selection, label)
    title = f"{selection.title}, by {label} {chosen}"
    best = table["chosen"].to_list().index(True)
    _output.print_table(columns, rows, title=title, bold=best, left=(label, "why, or why not"))
    if selection.parts:
        _output.print_text(f"{chosen}: {selection.reason}.", wrap=False)
    for note in selection.notes:
        _output.print_text(note, wrap=False)


def selection_html(selection: Selection, lines: Mapping[str, str]) -> str:
    """Return the self-contained page of a selection, with the lines that create the encoder, by language."""
    from midlayer_encoders.report.pages import block, figure_html, page_html
    from midlayer_encoders.report.results import versions

    (_, *heads), *rows = selection.choices_table()
    choices = {
        name: ", ".join(f"{head} {cell}" for head, cell in zip(heads, cells, strict=True) if cell)
        for name, *cells in rows
    }
    sections: dict[str, list[str]] = {
        "What each would choose": [figure_html(selection.plot()), block("facts", choices)],
        "Use this layer": [block("code", lines)],
        "How it was measured": [block("facts", {"Model": selection.model.removeprefix("local/"), **versions()})],
    }
    return page_html(selection.title, [selection.verdict], sections, notes=selection.notes)


def _write(selection: Selection, out: Path, lines: Mapping[str, str]) -> None:
    from midlayer_encoders.frame.tidy_result import write_frame
    from midlayer_encoders.report import write_figure
    from midlayer_encoders.report.pages import write_page

    write_frame(selection.frame, out / "frame.parquet")
    write_frame(selection.to_frame(), out / "selection.csv")
    write_figure(selection.plot(), out / "selection.png")
    if selection.center is not None:
        rows = [" ".join(text.splitlines()) for text in selection.center]
        write_file(out / _CENTER_FILE, ("\n".join(rows) + "\n").encode())
    write_page(selection_html(selection, lines), out / "report.html")
    files = "selection.csv, frame.parquet, selection.png, report.html"
    _output.print_text(f"Written to {shell_path(out)}: {files}", wrap=False)
