"""The page of a board: many runs on the tasks that they share, the best layer of each, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from midlayer_encoders.frame import Baselines, average_baseline
from midlayer_encoders.report.board import COSTS, Budget, Point, Run, board_chart, fronts_of
from midlayer_encoders.report.page import code_lines, document, facts, large, section, soft
from midlayer_encoders.report.page_figures import breakable, figure_html
from midlayer_encoders.report.ticks import Cost, amount, cost_words, number

__all__ = ["board_html"]

_MOST_TASKS = 6  # with a column each: more do not fit on paper
_HEADS: Mapping[Cost, str] = {"parameters": "Parameters", "milliseconds": "ms per text", "bytes": "Bytes per vector"}
_FRONTS: Mapping[Cost, str] = {"parameters": "parameters", "milliseconds": "time", "bytes": "bytes"}


def board_html(
    runs: Sequence[Run],
    *,
    best: Point,
    lines: Mapping[str, str],
    budget: Budget | None = None,
    baselines: Baselines | None = None,
    notes: Sequence[str] = (),
    how: Mapping[str, str] | None = None,
) -> str:
    """Return one self-contained page over many runs.

    Args:
        runs: at least one; the order is that of the table.
        best: the encoder to use: the best of all, or of those within the budget.
        lines: that make it, by language.
        budget: that it was chosen under, drawn as upright lines.
        baselines: name of each, and its score on each shared task, a fraction.
        notes: sentences below the verdict: tasks and folders that were left out.
        how: what was compared and how it was measured.
    """
    budget, known = budget or {}, baselines or {}
    tasks = runs[0].summary.tasks
    on = tasks[0].name if len(tasks) == 1 else f"average over {len(tasks)} tasks"
    among = f"within {cost_words(budget)}" if budget else f"of {len(runs)} runs" if len(runs) > 1 else "of its layers"
    verdict = f"{best.run} at layer {best.layer} scores {number(best.score)} on {on}: the most {among}."
    words = (
        "Each curve is a run, each point a layer, the disc its best one. On the Pareto front is what no other layer of "
        "any run beats for the same cost or less. The axis of the score does not start at zero. Point at a layer, or "
        "walk there with the arrow keys; a name in the key switches its curve."
    ) + (" The upright lines are the budget, the orange disc is the encoder within it." if budget else "")
    chart = board_chart(runs, known, budget, best if budget else None)
    return document(
        f"Board of {len(runs)} run{'' if len(runs) == 1 else 's'}",
        large(verdict) + soft(cost_words(best.costs)),
        [
            section("Use this encoder", code_lines(lines)),
            section("Score against cost", soft(words) + figure_html(chart) if chart.panels else ""),
            section("Runs", _filters(runs) + _table(runs, known)),
            section("What was compared", facts(how or {})),
        ],
        notes=notes,
    )


def _filters(runs: Sequence[Run]) -> str:
    """Return the boxes that say which rows are shown; the page's script shows them, since they need it."""
    if len(runs) < 2:
        return ""
    most = "".join(
        f'<label>At most {escape(words)} <input type="text" inputmode="decimal" size="6" data-most="{cost}"></label>'
        for cost, words in COSTS.items()
    )
    return (
        '<div class="filters" role="search" aria-label="Runs" hidden>'
        f'<label>Name, or part of it <input type="search" size="14" data-words></label>{most}'
        '<label><input type="checkbox" data-front> On a front</label>'
        '<button type="button" data-clear>Show all</button><span class="soft" role="status"></span></div>'
    )


def _table(runs: Sequence[Run], baselines: Baselines) -> str:
    """Return the table of best layers; its columns can be sorted by a script."""
    tasks = [task.name for task in runs[0].summary.tasks]
    shown = tasks if 1 < len(tasks) <= _MOST_TASKS else []
    heads = [_head("Run"), _head("Layer"), _head("Score", falling=True), _head("Over its last layer", falling=True)]
    heads += [_head(words) for words in _HEADS.values()]
    heads += [_head("Fronts", falling=True), *(_head(name, falling=True) for name in shown)]
    fronts = fronts_of(runs)
    rows = "".join(_row(run, fronts[run.name], shown) for run in runs)
    feet = "".join(_foot(name, scores, runs[0], shown) for name, scores in baselines.items())
    caption = "Best layer of each run, in points (score × 100)"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{caption}"><table class="sortable">'
        f"<caption>{caption}</caption><thead><tr>{''.join(heads)}</tr></thead><tbody>{rows}</tbody>"
        f"{f'<tfoot>{feet}</tfoot>' if feet else ''}</table></div>"
    )


def _head(words: str, *, falling: bool = False) -> str:
    first = ' data-first="descending"' if falling else ""
    return f'<th scope="col"{first}>{breakable(words)}</th>'


def _row(run: Run, fronts: Sequence[Cost], tasks: Sequence[str]) -> str:
    best, average = run.best, run.average
    curves = {task.name: task.points for task in run.summary.tasks}
    name, folder = f"<bdi>{breakable(run.name)}</bdi>", f"<bdi>{breakable(run.folder)}</bdi>"
    name = f'<a href="{escape(run.page)}">{name}</a>' if run.page else name
    cells = [
        f'<th scope="row" data-value="{escape(run.name)}">{name}<br><small>{folder}</small></th>',
        _cell(best.layer, f"{best.layer} of {run.summary.num_layers}"),
        _cell(best.score, number(best.score)),
        _cell(average.gain, f"+{number(average.gain)}" if average.gain else "0.0"),
        *(_cell(best.costs.get(cost), amount(best.costs[cost]) if cost in best.costs else "", cost) for cost in COSTS),
        _cell(len(fronts), ", ".join(_FRONTS[cost] for cost in fronts)),
        *(_cell(curves[task][best.layer], number(curves[task][best.layer])) for task in tasks),
    ]
    data = f' data-run="{escape(run.name)}"' + (" data-on-front" if fronts else "")
    return f"<tr{data}>{''.join(cells)}</tr>"


def _cell(value: float | None, text: str, cost: str = "") -> str:
    if value is None:
        return "<td>–</td>"
    kind = f' data-cost="{cost}"' if cost else ""
    return f'<td data-value="{value:.6g}"{kind}>{escape(text) or "–"}</td>'


def _foot(name: str, scores: Mapping[str, float], run: Run, tasks: Sequence[str]) -> str:
    mean = average_baseline(run.summary, scores)
    if mean is None:
        return ""
    each = "<td></td>" * (2 + len(COSTS)) + "".join(f"<td>{number(100 * scores[task])}</td>" for task in tasks)
    return f'<tr><th scope="row">{escape(name)}</th><td></td><td>{number(mean)}</td>{each}</tr>'
