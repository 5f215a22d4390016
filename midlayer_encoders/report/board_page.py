"""The page and the chart of a board: the scores and costs of the layers of several sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from midlayer_encoders.frame import Baselines, average_baseline
from midlayer_encoders.frame.pareto import COSTS, Budget, Cost, Point, Run, cost_text, fronts_by_run, pareto_front
from midlayer_encoders.report import charts
from midlayer_encoders.report.labels import number
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.score_charts import average_levels
from midlayer_encoders.report.style import STYLES

_MAX_TASKS = 6  # with a column each on paper


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
    """Return a self-contained page about several runs.

    Args:
        runs: at least one, in the order of the table.
        best: the recommended encoder: the best of all, or within the budget.
        lines: code that creates it, by language.
        budget: drawn as vertical lines.
        baselines: score of each baseline on each shared task, a fraction.
        notes: sentences below the verdict, such as omitted tasks and folders.
        how: facts about the comparison.
    """
    tasks = [task.name for task in runs[0].summary.tasks]
    means = {name: average_baseline(runs[0].summary, scores) for name, scores in (baselines or {}).items()}
    scope = f"within {cost_text(budget)}" if budget else f"of {len(runs)} runs" if len(runs) > 1 else "of its layers"
    subject = tasks[0] if len(tasks) == 1 else f"average over {len(tasks)} tasks"
    return render(
        "board.html",
        title=f"Board of {len(runs)} run{'' if len(runs) == 1 else 's'}",
        notes=notes,
        verdict=f"{best.run} at layer {best.layer} scores {number(best.score)} on {subject}: the most {scope}.",
        costs=cost_text(best.costs),
        lines=lines,
        budget=budget,
        chart=board_chart(runs, baselines or {}, budget, best if budget else None),
        cost_labels=COSTS,
        runs=runs,
        fronts=fronts_by_run(runs),
        tasks=tasks if 1 < len(tasks) <= _MAX_TASKS else [],
        baselines=baselines or {},
        means={name: mean for name, mean in means.items() if mean is not None},
        how=how or {},
    )


def board_chart(
    runs: Sequence[Run],
    baselines: Baselines | None = None,
    budget: Budget | None = None,
    marked: Point | None = None,
) -> charts.Chart:
    """Return the score of each layer of each run against each cost, with the best layers and the Pareto front.

    Args:
        runs: at least one.
        baselines: drawn as levels.
        budget: drawn as vertical lines.
        marked: the layer selected within the budget.
    """
    levels = [replace(level, label=level.text) for level in average_levels(runs[0].summary, baselines or {})]
    scores = [charts.Line((), tuple(run.average.points.values())) for run in runs]
    y = charts.value_axis([*scores, *levels])
    panels = []
    for cost in COSTS:
        if any(cost in point.costs for run in runs for point in run.points):
            extra: list[charts.Part] = [*levels]
            limit = (budget or {}).get(cost)
            if limit is not None:
                extra.append(charts.Rule(limit, "chosen"))
            panel = _cost_panel(runs, cost, y, extra, [] if limit is None else [limit])
            if marked is not None and cost in marked.costs:
                panel = replace(panel, parts=(*panel.parts, charts.Mark("best", marked.costs[cost], marked.score, "")))
            panels.append(panel)
    return charts.Chart(tuple(panels), columns=1, size=(7.5, 3.2), head=True)


def _cost_panel(
    runs: Sequence[Run], cost: Cost, y: charts.Axis, extra: Sequence[charts.Part], limits: Sequence[float]
) -> charts.Panel:
    points = [point for run in runs for point in run.points if cost in point.costs]
    front = pareto_front(points, cost)
    x = charts.amount_axis(COSTS[cost], [*(point.costs[cost] for point in points), *limits])
    front_x = (*(point.costs[cost] for point in front), x.high)
    front_y = (*(point.score for point in front), front[-1].score)
    curves: list[charts.Part] = []
    discs: list[charts.Part] = []
    for style, run in enumerate(runs):
        priced = [point for point in run.points if cost in point.costs]
        costs = tuple(point.costs[cost] for point in priced)
        if len(set(costs)) > 1:
            tips = tuple(point.describe() for point in priced)
            curves.append(charts.Line(costs, tuple(point.score for point in priced), run.name, style % STYLES, tips))
        best = run.best
        if cost in best.costs:  # older sweeps timed two layers only
            place = (best.costs[cost],), (best.score,)
            links = (run.page,) if run.page else ()
            discs.append(charts.Dots(*place, "disc", run.name, style % STYLES, (best.describe(),), links=links))
    title = f"Score by {COSTS[cost]}"
    label = f"{title}. " + "; ".join(point.describe().replace("\n", ", ") for point in front)
    staircase = charts.Line(front_x, front_y, "Pareto front", front=True)
    return charts.Panel(title, x, y, (staircase, *extra, *curves, *discs), label)
