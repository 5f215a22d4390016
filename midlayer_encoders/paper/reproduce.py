"""The paper's experiments by name: run one or all, keep each frame, go on past what fails, and write one page."""

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

_SETTING = "setting"  # of a kept frame's metadata: the digest of what it was measured with

Status: TypeAlias = Literal["done", "kept", "left out", "failed"]
"""Measured now, measured before, without something it needs, or stopped by an error."""


@dataclass(frozen=True)
class Outcome:
    """How one experiment went.

    Attributes:
        name: of the experiment.
        status: see :data:`Status`.
        words: what came out, or why nothing did.
        seconds: that it took.
    """

    name: str
    status: Status
    words: tuple[str, ...]
    seconds: float = 0.0


def resolve_experiments(name: str) -> list[str]:
    """Return the names of experiments that a word stands for: one, several with commas, or ``"all"``.

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
    for one in names:
        check_choice("figure", one, ["all", *EXPERIMENTS])
    return names


def reproduce(
    names: Sequence[str], setting: Setting, *, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Run experiments, write frame and figure of each into the setting's folder, and return how each went.

    An experiment whose frame was made with the same setting is kept. One that lacks something is left out, and one that
    fails does not stop the others.

    Args:
        names: of :data:`~midlayer_encoders.paper.experiments.EXPERIMENTS`.
        setting: what to run on.
        report: called with each outcome as it is known.
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
        kept = _kept(name, setting)
        frame = _measured(name, setting) if kept is None else kept
        words = tuple(EXPERIMENTS[name].words(frame))
        return Outcome(name, "done" if kept is None else "kept", words, time.perf_counter() - start)
    except DiskFullError:  # the next one would fail for it too
        raise
    except MissingInputError as error:
        return Outcome(name, "left out", (str(error),))
    except Exception as error:  # whatever it is, the other experiments go on and the page says so
        text = str(error) if isinstance(error, MidlayerError) else error_summary(error)
        return Outcome(name, "failed", (text,), time.perf_counter() - start)


def _kept(name: str, setting: Setting) -> pl.DataFrame | None:
    """Return the frame that an earlier run with the same setting left, or nothing."""
    digest = setting.digest

    def read(path: Path) -> tuple[pl.DataFrame, bool]:
        return pl.read_parquet(path), pl.read_parquet_metadata(path).get(_SETTING) == digest

    frame, same = read_artifact(setting.out / f"{name}.parquet", read) or (None, False)
    return frame if same else None


def _measured(name: str, setting: Setting) -> pl.DataFrame:
    """Run an experiment and write figure, table and frame.

    The frame goes first and comes last, and says in its metadata which setting it belongs to: a killed run leaves none
    beside the figure of another.
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
    """Write the page, and return where it lies: ``report.html`` in the setting's folder.

    What was run before in that folder, with the same setting, stays on the page.
    """
    asked = {one.name for one in outcomes}
    before = [_outcome(name, setting) for name in EXPERIMENTS if name not in asked and _kept(name, setting) is not None]
    outcomes = sorted([*outcomes, *before], key=lambda one: list(EXPERIMENTS).index(one.name))
    findings = [_finding(one, setting) for one in outcomes if one.status in ("done", "kept")]
    notes = [f"{one.name} was {one.status}: {' '.join(one.words)}" for one in outcomes if one.status == "left out"]
    notes += [f"{one.name} failed: {' '.join(one.words)}" for one in outcomes if one.status == "failed"]
    how = {
        "Models": ", ".join(setting.models) or "none",
        "Texts": f"{len(setting.texts)} given; prompts take the first {setting.limit}, metrics {4 * setting.limit}",
        "Solutions": f"{len(setting.solutions)} given, the first {2 * setting.limit} used",
        "Longest text": f"{setting.max_length} tokens, solutions twice that",
        "Tasks": setting.tasks,
        "The paper's tables": "present" if setting.reference else "absent",
        "Seed": str(setting.seed),
        **{f"Seconds, {one.name}": f"{one.seconds:.1f}" for one in outcomes if one.status == "done"},
        **versions(),
    }
    title = "The paper's experiments" + (f" on {', '.join(setting.models)}" if setting.models else "")
    write_file(setting.out / "outcomes.json", json.dumps([asdict(one) for one in outcomes], indent=2).encode())
    return write_page(experiments_html(findings, title=title, how=how, notes=notes), setting.out / "report.html")


def _finding(outcome: Outcome, setting: Setting) -> Finding:
    one = EXPERIMENTS[outcome.name]
    frame = pl.read_parquet(setting.out / f"{outcome.name}.parquet")
    table = one.table(frame) if one.table is not None else ()
    return Finding(outcome.name, one.title, one.claim, outcome.words, tuple(one.panels(frame)), table)
