"""Run the paper's experiments, save their frames and figures, and write a report."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import polars as pl

from midlayer_encoders.errors import DiskFullError, MidlayerError, OptionError, error_summary
from midlayer_encoders.files import check_links, folder_lock, read_artifact, write_file
from midlayer_encoders.paper.experiments import EXPERIMENTS
from midlayer_encoders.paper.setting import MissingInputError, Setting
from midlayer_encoders.report import write_figure
from midlayer_encoders.report.pages import write_page
from midlayer_encoders.report.paper_page import Finding, experiments_html
from midlayer_encoders.report.results import write_frame
from midlayer_encoders.report.versions import versions
from midlayer_encoders.validation import check_choice

_SETTING = "setting"  # metadata key of the digest of the setting

Status: TypeAlias = Literal["done", "kept", "left out", "failed"]
"""Measured now, measured by an earlier run, missing an input, or stopped by an error."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one experiment.

    Attributes:
        name: name of the experiment.
        status: see :data:`Status`.
        words: sentences about the results, or the reason why there are none.
        seconds: duration.
    """

    name: str
    status: Status
    words: tuple[str, ...]
    seconds: float = 0.0


def resolve_experiments(name: str) -> list[str]:
    """Return the experiments in a comma-separated list, or all for ``"all"``.

    Example:
        >>> resolve_experiments("fig6,fig7")
        ['fig6', 'fig7']
        >>> resolve_experiments("all")[:2]
        ['fig1', 'fig2']
    """
    if name == "all":
        return list(EXPERIMENTS)
    names = name.split(",")
    if "fig14" in names:
        raise OptionError("`figure` must not be fig14: it is `midlayer probe` that shows it, see docs/vision.md.")
    for experiment in names:
        check_choice("figure", experiment, ["all", *EXPERIMENTS])
    return names


def reproduce(
    names: Sequence[str], setting: Setting, *, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run experiments, write their frames and figures into the output folder, and return the outcomes.

    Experiments with a saved frame of the same setting do not run again. A missing input or an error does not stop the
    other experiments.

    Args:
        names: keys of :data:`~midlayer_encoders.paper.experiments.EXPERIMENTS`.
        setting: models, texts and options.
        report: called with each outcome.
    """
    for name in names:
        check_choice("names", name, EXPERIMENTS)
    check_links(setting.out, [setting.out / name for name in ("sweeps", "metrics", "correlations")])
    outcomes = []
    with folder_lock(setting.out):
        for name in names:
            outcome = _outcome(name, setting)
            report(outcome)
            outcomes.append(outcome)
    return outcomes


def _outcome(name: str, setting: Setting) -> Outcome:
    start = time.perf_counter()
    try:
        saved = _saved_frame(name, setting)
        frame = _measure(name, setting) if saved is None else saved
        words = tuple(EXPERIMENTS[name].words(frame))
        return Outcome(name, "done" if saved is None else "kept", words, time.perf_counter() - start)
    except DiskFullError:  # the next experiment would fail too
        raise
    except MissingInputError as error:
        return Outcome(name, "left out", (str(error),))
    except Exception as error:  # the other experiments still run
        text = str(error) if isinstance(error, MidlayerError) else error_summary(error)
        return Outcome(name, "failed", (text,), time.perf_counter() - start)


def _saved_frame(name: str, setting: Setting) -> pl.DataFrame | None:
    """Return the frame of an earlier run with the same setting, if any."""
    digest = setting.digest

    def read(path: Path) -> tuple[pl.DataFrame, bool]:
        return pl.read_parquet(path), pl.read_parquet_metadata(path).get(_SETTING) == digest

    frame, same = read_artifact(setting.out / f"{name}.parquet", read) or (None, False)
    return frame if same else None


def _measure(name: str, setting: Setting) -> pl.DataFrame:
    """Run an experiment and write figure, table and frame.

    The old frame is deleted first, and the new one, with the digest of the setting, is written last: an interrupted
    run never leaves a frame next to the figure of another.
    """
    digest = setting.digest
    frame = EXPERIMENTS[name].run(setting)
    if setting.digest != digest:
        raise MidlayerError("The files of the model or of the tasks changed while it ran: run it again.")
    (setting.out / f"{name}.parquet").unlink(missing_ok=True)
    write_figure(EXPERIMENTS[name].draw(frame), setting.out / f"{name}.png", dpi=110)
    write_frame(frame, setting.out / f"{name}.csv")
    write_frame(frame, setting.out / f"{name}.parquet", metadata={_SETTING: digest})
    return frame


def write_experiments(outcomes: Sequence[Outcome], setting: Setting) -> Path:
    """Write ``report.html`` into the output folder and return its path.

    The page includes earlier experiments of the same setting.
    """
    current = {outcome.name for outcome in outcomes}
    earlier = [
        _outcome(name, setting)
        for name in EXPERIMENTS
        if name not in current and _saved_frame(name, setting) is not None
    ]
    outcomes = sorted([*outcomes, *earlier], key=lambda outcome: list(EXPERIMENTS).index(outcome.name))
    findings = [_finding(outcome, setting) for outcome in outcomes if outcome.status in ("done", "kept")]
    notes = [
        f"{outcome.name} was {outcome.status}: {' '.join(outcome.words)}"
        for outcome in outcomes
        if outcome.status == "left out"
    ]
    notes += [f"{outcome.name} failed: {' '.join(outcome.words)}" for outcome in outcomes if outcome.status == "failed"]
    how = {
        "Models": ", ".join(setting.models) or "none",
        "Texts": f"{len(setting.texts)} given; prompts take the first {setting.limit}, metrics {4 * setting.limit}",
        "Solutions": f"{len(setting.solutions)} given, the first {2 * setting.limit} used",
        "Longest text": f"{setting.max_length} tokens, solutions twice that",
        "Tasks": setting.tasks,
        "The paper's tables": "present" if setting.reference else "absent",
        "Seed": str(setting.seed),
        **{f"Seconds, {outcome.name}": f"{outcome.seconds:.1f}" for outcome in outcomes if outcome.status == "done"},
        **versions(),
    }
    title = "The paper's experiments" + (f" on {', '.join(setting.models)}" if setting.models else "")
    write_file(setting.out / "outcomes.json", json.dumps([asdict(outcome) for outcome in outcomes], indent=2).encode())
    return write_page(experiments_html(findings, title=title, how=how, notes=notes), setting.out / "report.html")


def _finding(outcome: Outcome, setting: Setting) -> Finding:
    experiment = EXPERIMENTS[outcome.name]
    frame = pl.read_parquet(setting.out / f"{outcome.name}.parquet")
    table = experiment.table(frame) if experiment.table is not None else ()
    return Finding(outcome.name, experiment.title, experiment.claim, outcome.words, experiment.draw(frame), table)
