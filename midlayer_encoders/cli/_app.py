"""What the commands share: the application, its options, how words become values, and tables."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midlayer_encoders.cli._progress import json_asked, waiting
from midlayer_encoders.errors import OptionError
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.validation import check_count

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from midlayer_encoders.encoder.options import EncoderOptions
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

__all__ = [
    "FieldName",
    "LayerText",
    "LayersText",
    "Limit",
    "MetricNames",
    "Model",
    "RecipeNames",
    "Seed",
    "SiteName",
    "SkipBad",
    "SomeAudio",
    "SomeImages",
    "SomeTexts",
    "TextsFile",
    "Views",
    "app",
    "asked_recipes",
    "console",
    "first_of",
    "make_table",
    "one_source",
    "parse_layer",
    "parse_layers",
    "parse_names",
    "print_by_layer",
    "print_lines",
    "print_report",
    "print_table",
    "quieten",
    "read_own",
    "read_source",
    "refuse_given",
    "results_folder",
    "whole_model",
]

_EXACT: dict[str, Any] = {"highlight": False, "markup": False, "soft_wrap": True}  # a line to be copied

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)

Model = Annotated[
    str,
    typer.Argument(
        help="Folder or name on the hub of a transformers model; built-in is SmolLM2-135M, built-in-minilm MiniLM."
    ),
]
LayerText = Annotated[
    str, typer.Option("--layer", help="17, -1 (the last), 0.7 (a fraction of the depth), or several: 8,12,16.")
]
LayersText = Annotated[str, typer.Option("--layers", help="all, or layers with commas: 0,6,0.5,-1.")]
MetricNames = Annotated[str, typer.Option("--metrics", help="paper, all, or names with commas.")]
_TEXTS_HELP = "A text a line; or your own data (JSONL, CSV, parquet, a folder), with --field for another column."
TextsFile = Annotated[Path, typer.Option("--texts", help=_TEXTS_HELP)]
FieldName = Annotated[str | None, typer.Option("--field", help="Field of each JSON line that holds the text.")]
Limit = Annotated[int | None, typer.Option("--limit", help="Use the first LIMIT inputs only.")]
RecipeNames = Annotated[
    str | None,
    typer.Option(
        "--recipes", help="Recipes to compare, with commas (plain,one-word+center), or all; --template adds yours."
    ),
]
SiteName = Annotated[str, typer.Option("--site", help="block, or what attention or mlp add in each block.")]
SkipBad = Annotated[bool, typer.Option(help="Leave out files that cannot be read, and name them.")]
SomeAudio = Annotated[Path | None, typer.Option("--audio", help="Folder of audio files, for an audio model.")]
SomeImages = Annotated[Path | None, typer.Option("--images", help="Folder of images, for an image model.")]
SomeTexts = Annotated[Path | None, typer.Option("--texts", help=_TEXTS_HELP)]
Views = Annotated[int, typer.Option("--views", help="Augmented views of each text, for LiDAR.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of every random draw.")]


@app.callback(invoke_without_command=True)
def _callback(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="With --version: all that an issue report needs.")] = False,
) -> None:
    """Embeddings from the layer of a model that embeds best."""
    if version:
        from midlayer_encoders.cli._versions import report_lines, version_line

        # Not by the console, which wraps lines: they are to be copied.
        typer.echo("\n".join(report_lines() if verbose else [version_line()]))
        raise typer.Exit
    if verbose:
        raise typer.BadParameter("it goes with --version: midlayer --version --verbose", param_hint="--verbose")


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


def parse_layers(text: str) -> str | list[int | float]:
    """Return layers from a shell's word.

    Example:
        >>> parse_layers("all"), parse_layers("0,6,0.5,-1")
        ('all', [0, 6, 0.5, -1])
    """
    return "all" if text == "all" else [parse_layer(part.strip()) for part in text.split(",")]


def parse_names(text: str) -> str | list[str]:
    return [] if text == "none" else text if text in ("all", "paper") else text.split(",")


def first_of(lines: list[Any], limit: int | None) -> list[Any]:
    """Return the first inputs, as ``--limit`` says; a negative one would leave out the last."""
    return lines[: None if limit is None else check_count("--limit", limit, "inputs")]


def refuse_given(context: typer.Context, why: str, *names: str) -> None:
    """Raise an :class:`OptionError` where one of these parameters was given as a flag, which would have no effect.

    Args:
        context: of the command.
        why: end of the sentence, as ``"for texts"``.
        names: of the command's parameters.
    """
    flags = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for name in filter(flags.__contains__, names):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise OptionError(f"`{flags[name]}` must be left out {why}.")


def one_source(context: typer.Context, given: dict[str, Path | None]) -> tuple[str, Path]:
    """Return the one source that was named and its kind, or refuse flags that are about another."""
    named = [(kind, path) for kind, path in given.items() if path is not None]
    if len(named) != 1:
        raise typer.BadParameter(f"name one of --texts, --images, --audio, but got {len(named)}")
    kind, path = named[0]
    if kind == "sounds":
        typer.echo("--sounds is deprecated and removed in 0.3: write --audio.", err=True)
        kind = "audio"
    if kind == "texts":
        refuse_given(context, "for texts: it is about files of images and audio", "skip_bad")
    else:
        refuse_given(context, f"for {kind}: it is about texts", "field", "wikitext")
    return kind, path


def read_source(kind: str, source: Path, *, field: str | None, skip_bad: bool) -> list[Any]:
    """Return the texts of a file, or the paths of a folder's images or audio files."""
    from midlayer_encoders.media import media_files

    if kind == "texts":
        return read_own(source, field=field)
    return list(media_files(source, "image" if kind == "images" else "audio", bad="skip" if skip_bad else "refuse"))


def read_own(path: Path, *, field: str | None) -> list[str]:
    """Return the texts of a file of lines, or of your own data in whatever form a sweep takes it.

    Args:
        path: a text a line; or JSONL, CSV, TSV, parquet or a folder of them.
        field: the column that holds the text, where the columns are not those of a task.
    """
    from midlayer_encoders.files import expand_home
    from midlayer_encoders.media.text_lists import read_texts
    from midlayer_encoders.tasks import SUFFIXES, ColumnsError, own_texts

    path, lines = expand_home(path), (".jsonl", ".ndjson")
    if not path.is_dir() and (path.suffix.lower() not in SUFFIXES or (field and path.suffix.lower() in lines)):
        return read_texts(path, field=field)
    try:
        return own_texts(path, column=field)
    except ColumnsError:
        if path.suffix.lower() in lines:
            return read_texts(path)  # which names the fields to choose from
        raise


def asked_recipes(words: str | None, options: EncoderOptions) -> tuple[list[Recipe] | None, EncoderOptions]:
    """Return the recipes to compare, the one of ``--template`` among them, and the options of the model itself."""
    from dataclasses import replace

    if words is None:
        return None, options
    found = recipes_of("--recipes", words if words == "all" else words.split(","))
    if options.recipe is not None:
        raise OptionError("`--recipe` must be left out with `--recipes`: name it there.")
    if options.template is not None:
        yours = Recipe(name="yours", template=options.template, pooling=options.pooling or "last")
        found, options = [*found, yours], replace(options, template=None, pooling=None)
    return found, options


def whole_model(model: str, options: EncoderOptions) -> LayerEncoder:
    """Return the encoder of a whole model."""
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

    with waiting("loading", f"Loading {model}"):
        return LayerEncoder(model, -1, **options.changed())


def print_lines(
    encoder: LayerEncoder, layer: int | list[int], layer_weights: list[float] | None = None
) -> dict[str, str | None]:
    """Print the command and the Python line that make the encoder of a layer, or of a mean of several; return both."""
    from dataclasses import replace

    from midlayer_encoders.encoder.options import python_line, shell_line

    name = encoder.source if isinstance(encoder.source, str) else encoder.name
    options = encoder.options if layer_weights is None else replace(encoder.options, layer_weights=tuple(layer_weights))
    shell, python = None, python_line(name, layer, options)
    if layer_weights is None or encoder.norm == "none" or not encoder.anatomy.final:  # else no plain folder can hold it
        out = "layer-" + str(layer).strip("[]").replace(", ", "-")
        shell = shell_line(name, layer, options, out=out)
        console().print("Export it:", shell, **_EXACT)
    else:
        console().print("It cannot be exported: the final norm is applied to each layer, which no plain folder does.")
    console().print("In Python:", python, **_EXACT)
    return {"shell": shell, "python": python}


def console() -> Console:
    """Return where words for people go: nowhere under ``--json``, whose result is printed by itself."""
    from rich.console import Console

    return Console(quiet=json_asked())


def quieten() -> None:
    """Turn off the loaders' own bars and notices, before they are imported: ours stand in for them."""
    os.environ.setdefault("TQDM_DISABLE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


def results_folder(command: str, *models: str) -> Path:
    """Return where a command writes when ``--out`` is left out, beside what ``sweep`` and ``demo`` write.

    Example:
        >>> results_folder("compare", "EleutherAI/pythia-410m@step16000", "EleutherAI/pythia-410m").as_posix()
        'midlayer-results/compare-EleutherAI_pythia-410m_step16000-EleutherAI_pythia-410m'
    """
    names = (Path(model).resolve().name if Path(model).is_dir() else model for model in models)
    words = "-".join([command, *(re.sub(r"[^\w.-]+", "_", name) for name in names)])
    return Path("midlayer-results") / words[:200]  # a file system's names end at 255 bytes


def print_report(path: Path) -> None:
    """Print where a page lies, on one line."""
    console().print(f"The report: {path}", soft_wrap=True)


def make_table(*columns: str, title: str | None = None, left: Collection[str] = ()) -> Table:
    """Return an empty table; its columns are of numbers, on the right, but for those named in ``left``."""
    from rich.table import Table

    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right")
    return table


def print_by_layer(cells: Mapping[tuple[int, str], str], *, title: str | None = None) -> None:
    """Print a row for each layer and a column for each metric."""
    names = list(dict.fromkeys(name for _, name in cells))
    layers = sorted({layer for layer, _ in cells})
    rows = [[str(layer), *(cells.get((layer, name), "") for name in names)] for layer in layers]
    print_table(["layer", *(name.replace("_", " ") for name in names)], rows, title=title)  # words can wrap


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str | None = None,
    bold: int | None = None,
    sections: Collection[int] = (),
) -> None:
    """Print a table of numbers, in several under one another where its columns do not fit the width of the terminal.

    Args:
        columns: headings, whose words may stand under one another.
        rows: cells; the first of each says what the row is, and stands in every part.
        title: over the first part.
        bold: number of the row that stands out.
        sections: numbers of the rows that a line is drawn above.
    """
    from rich.text import Text

    def width(place: int) -> int:
        words = [*columns[place].split(), *(Text.from_markup(row[place]).plain for row in rows)]
        return max((len(word) for word in words), default=0) + 3  # its border and a space on each side

    room = console().width - 1 - width(0)
    parts: list[list[int]] = [[]]
    for place in range(1, len(columns)):
        if parts[-1] and sum(map(width, [*parts[-1], place])) > room:
            parts.append([])
        parts[-1].append(place)
    for number, part in enumerate(parts):
        table = make_table(columns[0], *(columns[place] for place in part), title=None if number else title)
        for line, row in enumerate(rows):
            if line in sections:
                table.add_section()
            table.add_row(row[0], *(row[place] for place in part), style="bold green" if line == bold else None)
        console().print(table)
