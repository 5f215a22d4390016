"""Arguments that several commands share: their types, how their words are parsed, and the inputs they name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, BadParameter, Option

from midlayer_encoders._types import LayerArgument
from midlayer_encoders.cli._progress import show_waiting
from midlayer_encoders.errors import OptionError
from midlayer_encoders.files import check_output_folder, expand_home
from midlayer_encoders.recipes import Recipe, recipes_of
from midlayer_encoders.validation import check_effect, layer_number

if TYPE_CHECKING:
    from midlayer_encoders.encoder.options import EncoderOptions
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.tasks.tables import Columns

_MAX_LAYERS = 10_000
_TEXTS = Option("--texts", help="One text per line, or your data (JSONL, CSV, parquet, a folder).")

Model = Annotated[str, Argument(help="Folder, llama.cpp file, hub name, built-in (SmolLM2-135M) or built-in-minilm.")]
TextsFile = Annotated[Path, _TEXTS]
Limit = Annotated[int | None, Option("--limit", min=1, help="Use only the first LIMIT inputs.")]
Out = Annotated[Path | None, Option("--out", help="Folder; by default midlayer-results/COMMAND-MODEL.")]
RecipeNames = Annotated[str | None, Option("--recipes", help="plain,one-word …, or all; --template adds your own.")]
SkipBad = Annotated[bool, Option("--skip-bad", help="Skip files that cannot be read, and list them.")]
_ExecutorOption = Annotated[list[str] | None, Option(help="NAME=VALUE, such as gpus_per_node=1; repeatable.")]
Seed = Annotated[int, Option("--seed", min=0, help="Random seed.")]


def parse_layer(words: str) -> LayerArgument:
    """Return a layer, or a layer by name for each part of a joint model.

    Example:
        >>> parse_layer("17"), parse_layer("-1"), parse_layer("0.7"), parse_layer("text=6,image=0.5")
        (17, -1, 0.7, {'text': 6, 'image': 0.5})
    """
    pairs = [word.rpartition("=") for word in words.split(",")]
    layers = {name.strip(): number for name, _, word in pairs if (number := layer_number(word)) is not None}
    if len(layers) < len(pairs) or (len(pairs) > 1 and "" in layers):
        raise BadParameter(f"must be a layer such as 17, -1 or 0.7, but got {words!r}")
    return layers.get("", layers)


_LAYER = Option("--layer", parser=parse_layer, metavar="TEXT", help="17, -1 (the last), or 0.7 (of the depth).")
LayerNumber = Annotated[Any, _LAYER]


def parse_layers(words: str) -> str | list[int | float]:
    """Return layers from words separated by commas; ``0-6`` includes its end and ``0:6`` does not, as in Python.

    Example:
        >>> parse_layers("all"), parse_layers("0,6,0.5,-1"), parse_layers("0-3,4:9:2")
        ('all', [0, 6, 0.5, -1], [0, 1, 2, 3, 4, 6, 8])
    """
    try:
        return words if words == "all" else [layer for word in words.split(",") for layer in _layer_range(word.strip())]
    except (ValueError, OverflowError):
        expected = "all, or layers separated by commas, such as 17, -1, 0.7 (of the depth), 0-6 or 0:31:2"
        raise BadParameter(f"must be {expected}, but got {words!r}") from None


def _layer_range(word: str) -> Sequence[int | float]:
    match = re.fullmatch(r"(\d+)-(\d+)|(\d*):(\d+)(?::([1-9]\d*))?", word)
    if match is None:
        if (layer := layer_number(word)) is None:
            raise ValueError(word)
        return [layer]
    first, last, start, stop, step = (int(number or 0) for number in match.groups())
    layers = range(start, stop, step or 1) if ":" in word else range(first, last + 1)
    if not 0 < len(layers) <= _MAX_LAYERS:
        raise ValueError(word)
    return layers


_LAYERS = Option("--layers", parser=parse_layers, metavar="TEXT", help="all, or layers: 0,6,0.5,-1, or 0-6, or 0:31:2.")
Layers = Annotated[Any, _LAYERS]


def parse_metrics(words: str) -> str | list[str]:
    """Return ``"all"``, ``"paper"``, or the names of metrics."""
    if words == "none":
        return []
    return words if words in ("all", "paper") else words.split(",")


_METRICS = Option("--metrics", parser=parse_metrics, metavar="TEXT", help="paper, all, or names separated by commas.")
MetricNames = Annotated[Any, _METRICS]


def parse_recipes(words: str | None, options: EncoderOptions) -> tuple[list[Recipe] | None, EncoderOptions]:
    """Return the recipes that ``--recipes`` names, and the options without a template, which becomes a recipe."""
    if words is None:
        return None, options
    recipes = recipes_of("--recipes", words if words == "all" else words.split(","))
    if options.recipe is not None:
        raise OptionError("`--recipe` cannot be combined with `--recipes`: name it there.")
    if options.template is not None:
        recipes.append(Recipe(name="yours", template=options.template, pooling=options.pooling or "last"))
        options = replace(options, template=None, pooling=None)
    return recipes, options


@dataclass(kw_only=True)
class TextData:
    """Flags of every command that reads texts from tables."""

    text_column: Annotated[str | None, Option(help="Column of the texts, if it is not text.")] = None
    drop_empty: Annotated[bool, Option("--drop-empty", help="Leave out rows without a text or label.")] = False

    def columns(self) -> Columns:
        """Return how to read a table."""
        from midlayer_encoders.tasks.tables import Columns

        return Columns(**asdict(self))

    def read_texts(self, path: Path) -> list[str]:
        """Return the texts of a file of lines, or of data in any format that a sweep accepts.

        Args:
            path: one text per line; or JSONL, CSV, TSV, parquet or a folder of them.
        """
        from midlayer_encoders.tasks import sources, text_lists

        if is_table(path):
            return sources.own_texts(expand_home(path), self.columns())
        check_effect(TextData, f"for {path.name}, whose lines are the texts", text_column=self.text_column)
        return text_lists.read_texts(expand_home(path))


@dataclass(kw_only=True)
class Data(TextData):
    """Flags of every command that reads labeled texts from tables."""

    label_column: Annotated[str | None, Option(help="Column of the labels, if it is not label.")] = None


@dataclass(kw_only=True)
class Inputs:
    """Flags that name texts, images or audio."""

    texts: Annotated[Path | None, _TEXTS] = None
    images: Annotated[Path | None, Option(help="Folder of images, for an image model.")] = None
    audio: Annotated[Path | None, Option(help="Folder of audio files, for an audio model.")] = None
    skip_bad: SkipBad = False
    data: TextData
    limit: Limit = None

    def read(self, *, wikitext: bool = False) -> tuple[str, Path, list[Any]]:
        """Return the kind and path of the only source that was named, and its texts or the paths of its files."""
        from midlayer_encoders.reading.media_inputs import media_files

        paths = {"texts": self.texts, "images": self.images, "audio": self.audio}
        sources = [(kind, path) for kind, path in paths.items() if path is not None]
        if len(sources) != 1:
            raise BadParameter(f"name one of --texts, --images, --audio, but got {len(sources)}")
        kind, path = sources[0]
        if kind == "texts":
            check_effect(Inputs, "for texts", skip_bad=self.skip_bad)
            return kind, path, self.data.read_texts(path)
        check_effect(TextData, f"for {kind}: it applies to texts", **asdict(self.data))
        check_effect(Inputs.read, f"for {kind}: it applies to texts", wikitext=wikitext)
        medium: Any = kind.removesuffix("s")
        return kind, path, [*media_files(path, medium, bad="skip" if self.skip_bad else "refuse")]


def is_table(path: Path) -> bool:
    """Return whether texts are in a column of a table or in a folder of tables, not one per line."""
    from midlayer_encoders.tasks.tables import SUFFIXES

    return expand_home(path).is_dir() or path.suffix.lower() in SUFFIXES


def results_folder(out: Path | None, command: str, *models: str) -> Path:
    """Return the folder that a command writes to, by default one named after the models; refuse one of other files.

    Example:
        >>> results_folder(None, "compare", "EleutherAI/pythia-410m@step16000", "EleutherAI/pythia-410m").as_posix()
        'midlayer-results/compare-EleutherAI_pythia-410m_step16000-EleutherAI_pythia-410m'
    """
    from midlayer_encoders.models.hub import shown_name

    name = "-".join([command, *(re.sub(r"[^\w.-]+", "_", shown_name(model)) for model in models)])
    folder = out or Path("midlayer-results") / name[:200]  # most file systems limit a name to 255 bytes
    check_output_folder(folder)
    return folder


@dataclass(kw_only=True)
class Execution:
    """Flags of a command whose units an executor can run."""

    executor: Annotated[
        Literal["processes", "slurm", "dask", "ray"] | None, Option(help="Run units of the work there (docs/scale.md).")
    ] = None
    executor_option: _ExecutorOption = None

    def __post_init__(self) -> None:
        if self.executor_option and self.executor is None:
            raise OptionError("`--executor-option` needs `--executor`.")

    @contextmanager
    def open(self, folder: Path) -> Iterator[Any]:
        """Yield the executor, or ``None`` for this process; logs of jobs go to a folder."""
        if self.executor is None:
            yield None
            return
        from midlayer_encoders.extras.scaling import open_executor

        with open_executor(self.executor, folder, parse_options(self.executor_option or ())) as executor:
            yield executor


def parse_options(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of an executor from words; a setup's, and repeated ones, are lists.

    Example:
        >>> parse_options(["timeout_min=60", "slurm_setup=module load cuda"])
        {'timeout_min': 60, 'slurm_setup': ['module load cuda']}
    """
    values: dict[str, list[Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals:
            raise OptionError(f"`--executor-option` must be NAME=VALUE, such as gpus_per_node=1, but got {word!r}.")
        values.setdefault(name, []).append(int(value) if value.isdecimal() else value)
    return {name: each if len(each) > 1 or name.endswith("setup") else each[0] for name, each in values.items()}


def check_model(model: str, options: EncoderOptions) -> None:
    """Raise a :class:`ModelNotFoundError` if a model is not available; torch is not imported."""
    from midlayer_encoders.models import hub

    name, revision = hub.name_and_revision(model)
    replace(options, revision=revision or options.revision).check_model(name)


def load_model(model: str, options: EncoderOptions) -> LayerEncoder:
    """Return the encoder of a whole model."""
    check_model(model, options)
    from midlayer_encoders.encoder.whole_model import load_encoder  # imports torch

    with show_waiting(f"Loading {model}"):
        return load_encoder(model, options.non_defaults())
