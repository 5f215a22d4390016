"""``python -m benchmarks.paper``: the paper's figures and table on your model."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option, Typer

from midlayer_encoders.cli import _arguments, _output, _progress
from midlayer_encoders.cli._app import command
from midlayer_encoders.cli.find import STAGES
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.errors import OptionError
from midlayer_encoders.validation import check_count

if TYPE_CHECKING:
    import polars as pl

    from benchmarks.paper.reproduce import Outcome
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder

_STAGES = {**STAGES, "models": "models measured"}
_STYLES = {"done": "green", "kept": "green", "left out": "yellow", "failed": "bold red"}


app = Typer(no_args_is_help=True, pretty_exceptions_enable=False)


@command(application=app)
def reproduce(
    *,
    figure: Annotated[
        str, Argument(help="fig1 to fig15 except fig14 (use midlayer probe), table2; comma-separated, or all.")
    ],
    model: Annotated[list[str] | None, Option(help="A model or built-in; repeatable, base first.")] = None,
    out: Annotated[Path, Option(help="Folder for frames, figures and page.")] = Path("midlayer-results/paper"),
    texts: Annotated[Path | None, Option(help="WikiText, or one text per line.")] = None,
    solutions: Annotated[Path | None, Option(help="GSM8K's JSONL, or one worked solution per line.")] = None,
    revisions: Annotated[str | None, Option(help="Checkpoints of the first model: step1,step512,…")] = None,
    tasks: Annotated[str, Option(help="Tasks to score the layers on, as in sweep.")] = "builtin",
    data: _arguments.Data,
    layers: Annotated[str, Option(help="Layers to score: tenths of the depth, all, or layers: 0,6,-1.")] = "tenths",
    swept: Annotated[list[Path] | None, Option(help="Frame of an earlier sweep, instead of a new one.")] = None,
    limit: Annotated[int, Option(min=2, help="Texts for prompts; metrics use four times as many.")] = 8,
    seed: _arguments.Seed = 0,
    options: EncoderOptions,
) -> None:
    """Run the paper's experiments on your model and write one report; an interrupted run continues in its folder.

    Examples:
        python -m benchmarks.paper fig2 --model built-in --texts texts.txt
        python -m benchmarks.paper all --model MODEL --out runs/paper
    """
    from benchmarks.paper import reproduce as paper
    from benchmarks.paper.setting import TENTHS, Setting
    from midlayer_encoders.tasks.sources import task_sources
    from midlayer_encoders.tasks.tables import SUFFIXES

    task_sources(tasks.split(","), data.columns())  # rejects unknown ones, and data of other columns
    experiments = paper.resolve_experiments(figure)
    max_length = options.max_length or 64
    check_count("--max-length", max_length, minimum=8)
    options = replace(options, max_length=None)
    is_table = solutions is not None and solutions.suffix in SUFFIXES
    answers = _arguments.TextData(text_column="answer" if is_table else None)
    solution_texts = () if solutions is None else tuple(answers.read_texts(solutions))
    frames = tuple(_read_sweep(path) for path in swept or ())
    layer_choice = TENTHS if layers == "tenths" else _arguments.parse_layers(layers)
    reads_texts = any((paper.EXPERIMENTS[name].inputs or ("", 0))[0] == "texts" for name in experiments)
    paragraphs, texts_note = _read_paragraphs(texts, max_length, required=reads_texts)
    setting = Setting(
        models=tuple(model or ()),
        load=partial(_load, options=options, max_length=max_length),
        out=out,
        texts=paragraphs,
        texts_note=texts_note,
        solutions=solution_texts,
        revisions=tuple(revisions.split(",") if revisions else ()),
        tasks=tasks,
        columns=data.columns(),
        layers=tuple(layer_choice) if isinstance(layer_choice, list) else layer_choice,
        swept=frames,
        limit=limit,
        max_length=max_length,
        seed=seed,
        options=options,
    )
    outcomes = []
    for name in experiments:
        with _progress.show_progress({stage: f"{name}, {title}" for stage, title in _STAGES.items()}) as progress:
            outcomes += paper.reproduce([name], replace(setting, progress=progress))
        _print_outcome(outcomes[-1])
    page = paper.write_experiments(outcomes, setting)
    _output.print_outcome(report=page, folder=out, experiments=[asdict(outcome) for outcome in outcomes])
    statuses = {outcome.status for outcome in outcomes}
    if "failed" in statuses or ("left out" in statuses and figure != "all"):
        raise Exit(1)


def _load(name: str, *, options: EncoderOptions, max_length: int) -> LayerEncoder:
    """Return the encoder of a whole model, with twice ``max_length`` for solutions if the model has the positions."""
    encoder = _arguments.load_model(name, options)
    encoder.max_seq_length = min(encoder.max_seq_length or 2 * max_length, 2 * max_length)
    return encoder


def _print_outcome(outcome: Outcome) -> None:
    _output.print_text(f"{outcome.name}: {outcome.status} ({outcome.seconds:.1f} s)", style=_STYLES[outcome.status])
    for line in (outcome.reason, *outcome.findings, outcome.inputs and f"Read: {outcome.inputs}."):
        if line:
            _output.print_text(f"  {line}", wrap=False)


def _read_sweep(path: Path) -> pl.DataFrame:
    """Return the frame of a sweep, or raise an error if one of its tasks failed."""
    from midlayer_encoders.files import read_artifact
    from midlayer_encoders.frame.schema import read_frame
    from midlayer_encoders.sweeping.best_layer import read_notes

    frame = read_frame(path)
    notes = read_artifact(path.with_name("sweep.json"), read_notes)
    if notes is not None and notes.failures:
        failures = "; ".join(f"{task}: {error}" for task, error in notes.failures.items())
        raise OptionError(f"`--swept` must be a sweep without failed tasks, but {path.parent} has some: {failures}.")
    return frame


def _read_paragraphs(path: Path | None, max_length: int, *, required: bool) -> tuple[tuple[str, ...], str]:
    """Return the paragraphs of a file with at least ``max_length`` words, without headings, and what they are."""
    from midlayer_encoders.tasks.text_lists import read_texts, wikitext_paragraphs

    if path is None:
        return (), ""
    # Count words, so that no tokenizer is needed yet: a word has at least one token.
    lines = read_texts(path)
    paragraphs = tuple(wikitext_paragraphs(lines, lambda line: len(line.split()), least=max_length))
    if required and not paragraphs:
        raise OptionError(
            f"`--texts` must hold texts of {max_length} words or more, but the longest of {len(lines)} in {path} has "
            f"{max(len(line.split()) for line in lines)}. Pass a smaller --max-length."
        )
    return paragraphs, f"{max_length} words or more, of {len(lines):,} in {path.name}"
