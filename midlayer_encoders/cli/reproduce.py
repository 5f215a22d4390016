"""``midlayer reproduce``: the paper's figures, table and theorems on your model."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midlayer_encoders.cli._app import (
    Seed,
    app,
    console,
    parse_layers,
    print_report,
    quieten,
    whole_model,
)
from midlayer_encoders.cli._options import model_options
from midlayer_encoders.cli._progress import long_running, print_result
from midlayer_encoders.encoder.options import EncoderOptions

if TYPE_CHECKING:
    import polars as pl

    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
    from midlayer_encoders.paper.reproduce import Outcome


@app.command()
@long_running
@model_options()
def reproduce(
    *,
    figure: Annotated[
        str, typer.Argument(help="fig1 to fig15 (14 is midlayer probe), table2, theorems, several with commas, or all.")
    ],
    model: Annotated[
        list[str] | None, typer.Option(help="Folder or name of a model, or built-in; repeatable: base first.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for frames, figures and page; a run goes on there.")] = Path(
        "midlayer-results/paper"
    ),
    texts: Annotated[Path | None, typer.Option(help="WikiText, or a text a line.")] = None,
    solutions: Annotated[Path | None, typer.Option(help="GSM8K's JSONL, or a worked solution a line.")] = None,
    reference: Annotated[Path | None, typer.Option(help="Folder of the paper's own per-layer tables.")] = None,
    revisions: Annotated[str | None, typer.Option(help="Checkpoints of the first model: step1,step512,…")] = None,
    tasks: Annotated[str, typer.Option(help="What layers are scored on, as in sweep.")] = "builtin",
    layers: Annotated[
        str, typer.Option(help="Layers that are scored: tenths of the depth, all, or some with commas.")
    ] = "tenths",
    swept: Annotated[
        list[Path] | None, typer.Option(help="Frame of a sweep made before, parquet or CSV, instead of one now.")
    ] = None,
    limit: Annotated[int, typer.Option(help="Texts for prompts; metrics take four times as many.")] = 8,
    pass_per_prefix: Annotated[
        bool, typer.Option(help="fig5 on a model that looks ahead: a pass for each prefix.")
    ] = False,
    seed: Seed = 0,
    options: EncoderOptions,
) -> None:
    """Run the paper's experiments on your model: one by name, or all that can run, with one report.

    Where MIDLAYER_DATA names a folder with corpora/wikitext2_raw_test.txt and corpora/gsm8k_test.jsonl (and the paper's
    tables in reference/ beside it), these are taken unless you name others.
    """
    quieten()
    from midlayer_encoders.errors import OptionError
    from midlayer_encoders.paper.reproduce import reproduce as run
    from midlayer_encoders.paper.reproduce import resolve_experiments, write_experiments
    from midlayer_encoders.paper.setting import TENTHS, Setting
    from midlayer_encoders.validation import check_seed

    names = resolve_experiments(figure)  # a wrong name is refused before a model is loaded
    check_seed(seed)
    max_length = options.max_length or 64
    if limit < 2 or max_length < 8:
        raise OptionError(f"`limit` must be 2 or more and `max_length` 8 or more, but got {limit} and {max_length}.")
    options = replace(options, max_length=None)
    setting = Setting(
        models=tuple(model or ()), load=partial(_load, options=options, max_length=max_length), out=out,
        texts=_texts(texts, max_length), solutions=_solutions(solutions),
        reference=reference or _default("../reference"), revisions=tuple(revisions.split(",") if revisions else ()),
        tasks=tasks, layers=TENTHS if layers == "tenths" else _layers(layers), swept=tuple(map(_frame, swept or ())),
        limit=limit, max_length=max_length, seed=seed, pass_per_prefix=pass_per_prefix, options=options,
    )  # fmt: skip
    outcomes = run(names, setting, report=_say)
    page = write_experiments(outcomes, setting)
    print_result(folder=out, report=page, experiments=[asdict(one) for one in outcomes])
    print_report(page)
    if any(one.status == "failed" or (one.status == "left out" and figure != "all") for one in outcomes):
        raise typer.Exit(1)


def _load(name: str, *, options: EncoderOptions, max_length: int) -> LayerEncoder:
    """Return the encoder of a whole model; solutions are read to twice the length, where it has the positions."""
    encoder = whole_model(name, options)
    encoder.max_seq_length = min(encoder.max_seq_length or 2 * max_length, 2 * max_length)
    return encoder


def _say(outcome: Outcome) -> None:
    style = {"done": "green", "kept": "green", "left out": "yellow", "failed": "bold red"}[outcome.status]
    console().print(f"{outcome.name}: {outcome.status} ({outcome.seconds:.1f} s)", style=style, highlight=False)
    for sentence in outcome.words:
        console().print(f"  {sentence}", highlight=False, markup=False, soft_wrap=True)


def _layers(text: str) -> tuple[int | float, ...] | str:
    found = parse_layers(text)
    return found if isinstance(found, str) else tuple(found)


def _frame(path: Path) -> pl.DataFrame:
    """Return the tidy frame in a file."""
    from midlayer_encoders.errors import OptionError
    from midlayer_encoders.files import exists, read_artifact
    from midlayer_encoders.frame import read_frame
    from midlayer_encoders.sweeping.sweep_result import read_notes

    must = "`--swept` must be the frame.parquet or frame.csv of a sweep"
    if not exists(path):
        raise OptionError(f"{must}, but there is no {path}.")
    frame = read_frame(path)
    notes = read_artifact(path.with_name("sweep.json"), read_notes)
    if notes is not None and notes.failures:
        failed = "; ".join(f"{task}: {error}" for task, error in notes.failures.items())
        raise OptionError(f"{must} whose tasks were all scored, but in {path.parent} some failed: {failed}.")
    return frame


def _default(path: str) -> Path | None:
    """Return a place under the folder of data that MIDLAYER_DATA names, where it is there."""
    from midlayer_encoders.paper.reference import data_folder

    folder = data_folder()
    found = folder / path if folder is not None else None
    return found if found is not None and found.exists() else None


def _texts(path: Path | None, max_length: int) -> tuple[str, ...]:
    """Return the paragraphs of a file with ``max_length`` words or more, headings dropped."""
    from midlayer_encoders.errors import OptionError
    from midlayer_encoders.media.text_lists import read_texts, wikitext_paragraphs

    path = path or _default("corpora/wikitext2_raw_test.txt")
    if path is None:
        return ()
    # Words, not tokens, so that no tokenizer is needed yet: a word has one token or more.
    lines = read_texts(path)
    found = tuple(wikitext_paragraphs(lines, lambda line: len(line.split()), least=max_length))
    if not found:
        raise OptionError(
            f"`--texts` must hold texts of {max_length} words or more, but none of {len(lines)} in {path} is. "
            "Pass a smaller --max-length."
        )
    return found


def _solutions(path: Path | None) -> tuple[str, ...]:
    from midlayer_encoders.media.text_lists import read_texts

    path = path or _default("corpora/gsm8k_test.jsonl")
    if path is None:
        return ()
    return tuple(read_texts(path, field="answer" if path.suffix in (".jsonl", ".ndjson") else None))
