"""One HTML page that holds everything it shows: no script, no font, no picture from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

import polars as pl

from midlayer_encoders.frame import check_frame, check_one_model, metric_series, number_of_layers
from midlayer_encoders.frame.summaries import Summary, summary
from midlayer_encoders.report.heat import heat_map
from midlayer_encoders.report.panels import average_chart, metric_panels, task_panels
from midlayer_encoders.report.style import CSS
from midlayer_encoders.report.tables import metric_tables, score_tables
from midlayer_encoders.report.verdict import baseline_words, tiles, verdict

__all__ = ["document", "facts", "report_html", "section", "sentences", "write_page", "write_report"]


def write_report(
    frame: pl.DataFrame,
    path: str | Path,
    *,
    title: str,
    how: Mapping[str, str],
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    export: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    baselines: Mapping[str, float] | None = None,
    baseline_name: str = "TF-IDF",
) -> Path:
    """Write the page of :func:`report_html` and return where it lies; its folder is made.

    Example:
        >>> import tempfile
        >>> from midlayer_encoders.frame import FRAME_SCHEMA
        >>> rows = [("m", "main", k, k / 2, "score", "STS", "spearman", v) for k, v in enumerate([0.4, 0.6, 0.5])]
        >>> frame = pl.DataFrame(rows, schema=list(FRAME_SCHEMA), orient="row")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = write_report(frame, f"{folder}/report.html", title="Every layer of m", how={"seed": "0"})
        ...     "10.0 points more than the last layer" in page.read_text(encoding="utf-8")
        True
    """
    text = report_html(
        frame,
        title=title,
        how=how,
        parameters=parameters,
        seconds=seconds,
        export=export,
        notes=notes,
        baselines=baselines,
        baseline_name=baseline_name,
    )
    return write_page(text, path)


def write_page(text: str, path: str | Path) -> Path:
    """Write a page and return where it lies; its folder is made."""
    where = Path(path)
    where.parent.mkdir(parents=True, exist_ok=True)
    # Half a surrogate pair can stand in a file's name, and UTF-8 has no bytes for it.
    where.write_text(text, encoding="utf-8", errors="xmlcharrefreplace")
    return where


def report_html(
    frame: pl.DataFrame,
    *,
    title: str,
    how: Mapping[str, str],
    parameters: Mapping[int, int] | None = None,
    seconds: Mapping[int, float] | None = None,
    export: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
    baselines: Mapping[str, float] | None = None,
    baseline_name: str = "TF-IDF",
) -> str:
    """Return one self-contained page about one model: which layer is best, by how much, and how that was measured.

    Args:
        frame: the results of one model at one revision, scores or metrics or both.
        title: heading of the page.
        how: what was measured and with what: versions, spec, seeds.
        parameters: number of weights of the model cut at each layer.
        seconds: time that the model cut at each layer takes for the same texts.
        export: the line that exports the best layer, by language, such as ``Python`` and ``Shell``.
        notes: sentences to print below the verdict, such as tasks that failed.
        baselines: score of a baseline on each task, a fraction; shown even where it wins.
        baseline_name: what the baseline is called.
    """
    frame = check_frame(frame)
    model, revision = check_one_model(frame)
    found = summary(frame)
    known = {task: score for task, score in (baselines or {}).items() if task in {one.name for one in found.tasks}}
    metrics = metric_series(frame)
    best = found.average.best_layer if found.average else None
    sections = [
        section("Use this layer", _export(export or {})),
        *(_score_sections(found, known, baseline_name) if found.tasks else []),
        section("Metrics by depth", metric_panels(metrics, number_of_layers(frame), rule=best)) if metrics else "",
        section(
            "The numbers",
            (
                score_tables(
                    found,
                    parameters=parameters or {},
                    seconds=seconds or {},
                    baselines=known,
                    baseline_name=baseline_name,
                )
                if found.tasks
                else ""
            )
            + (metric_tables(metrics) if metrics else ""),
        ),
        section("How it was measured", facts({"Model": model, "Revision": revision, **how})),
    ]
    header = (
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(model)} at revision {escape(revision)}</p>'
        f'<p class="verdict">{escape(verdict(found, metrics))}</p>'
        f"{tiles(found, parameters or {}, seconds or {})}"
        f"{sentences([*baseline_words(found, known, baseline_name), *found.remarks, *notes])}</header>"
    )
    return document(title, f"{header}<main>{''.join(sections)}</main>")


def document(title: str, body: str, *, css: str = "") -> str:
    """Return a whole page of ours around a body; ``css`` is added to the rules that all pages share."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        # Names in the frame are escaped; should one slip through, no browser runs or fetches anything.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{CSS}{css}</style></head>\n<body>{body}"
        '<footer><p class="soft">Made by midlayer_encoders. Layer 0 is the embeddings, '
        "layer k the states after block k.</p></footer></body></html>\n"
    )


def section(heading: str, body: str) -> str:
    """Return a section of a page, or nothing where it would be empty."""
    return f"<section><h2>{escape(heading)}</h2>{body}</section>\n" if body else ""


def _score_sections(found: Summary, baselines: Mapping[str, float], baseline_name: str) -> list[str]:
    if len(set().union(*(task.points for task in found.tasks))) < 2:
        return []  # one layer has no depth to draw: the table says it all
    average = average_chart(found, found.average, baselines, baseline_name) if found.average else ""
    panels = task_panels(found, baselines, baseline_name) if len(found.tasks) > 1 or not average else ""
    crossed = " A stroke: not scored." if found.incomplete else ""
    heat = (
        '<p class="soft">How many points each layer is below the same task\'s best layer: the stronger the colour, the '
        f"nearer; the best layer is outlined. The scale is the same for all tasks.{crossed}</p>"
        f"{heat_map(found.tasks, average=found.average)}"
    )
    return [section("Score by depth", average + panels), section("Layers and tasks", heat)]


def _export(lines: Mapping[str, str]) -> str:
    return "".join(
        f'<div class="soft">{escape(language)}</div><pre><code>{escape(line)}</code></pre>'
        for language, line in lines.items()
    )


def facts(known: Mapping[str, str]) -> str:
    """Return a list of names and what they are."""
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in known.items())
    return f'<dl class="facts">{rows}</dl>'


def sentences(said: Sequence[str]) -> str:
    """Return a paragraph for each sentence."""
    return "".join(f"<p>{escape(sentence)}</p>" for sentence in said)
