"""The page and the chart of a board: the scores and costs of the layers of several sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from midlayer_encoders.frame.pareto import COSTS, Budget, Cost, Point, Run, cost_text, fronts_by_run, pareto_front
from midlayer_encoders.frame.summaries import Baselines, Gain, average_baseline
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import interval_words, number, signed
from midlayer_encoders.report.layer_charts import draw_average_levels
from midlayer_encoders.report.pages import render
from midlayer_encoders.report.style import LIGHT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MIN_LEAD = 0.05  # points of a baseline, which are printed with one digit
_MAX_TASKS = 6  # with a column each on paper


def board_html(
    runs: Sequence[Run],
    best: Point,
    *,
    lines: Mapping[str, str],
    gains: Mapping[str, Gain] | None = None,
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
        gains: as in :func:`board_verdict`.
        budget: drawn as vertical lines.
        baselines: score of each baseline on each shared task, a fraction.
        notes: sentences below the verdict, such as omitted tasks and folders.
        how: facts about the comparison.
    """
    tasks = [task.name for task in runs[0].summary.tasks]
    means = {name: average_baseline(runs[0].summary, scores) for name, scores in (baselines or {}).items()}
    costs = _recorded_costs(runs)
    return render(
        "board.html",
        title=f"Board of {len(runs)} run{'' if len(runs) == 1 else 's'}",
        notes=notes,
        verdict=" ".join(board_verdict(runs, best, gains=gains, budget=budget, baselines=baselines)),
        costs=cost_text(best.costs),
        lines=lines,
        budget=budget,
        chart=plot_board(runs, baselines, budget, best if budget else None) if costs else None,
        cost_labels={cost: COSTS[cost] for cost in costs},
        runs=runs,
        fronts=fronts_by_run(runs),
        tasks=tasks if 1 < len(tasks) <= _MAX_TASKS else [],
        baselines=baselines or {},
        means={name: mean for name, mean in means.items() if mean is not None},
        how=how or {},
    )


def board_verdict(
    runs: Sequence[Run],
    best: Point,
    *,
    gains: Mapping[str, Gain] | None = None,
    budget: Budget | None = None,
    baselines: Baselines | None = None,
) -> list[str]:
    """Return sentences: baselines that score more, the recommended encoder, and its gain over others.

    Args:
        runs: at least one.
        best: the recommended encoder.
        gains: of it over others, by their names.
        budget: within which it is the best.
        baselines: score of each baseline on each shared task, a fraction.
    """
    scores = runs[0].summary
    tasks = [task.name for task in scores.tasks]
    scope = f"within {cost_text(budget)}" if budget else f"of {len(runs)} runs" if len(runs) > 1 else "of its layers"
    subject = tasks[0] if len(tasks) == 1 else f"average over {len(tasks)} tasks"
    means = {name: average_baseline(scores, by_task) for name, by_task in (baselines or {}).items()}
    sentences = [
        f"{name} scores {number(mean)} on {subject}, {number(mean - best.score)} points more than the best encoder."
        for name, mean in means.items()
        if mean is not None and mean - best.score >= _MIN_LEAD
    ]
    sentences.append(f"{best.run} at layer {best.layer} scores {number(best.score)} on {subject}, the highest {scope}.")
    for name, gain in (gains or {}).items():
        sentences.append(f"It has {signed(gain.points)} points over {name} ({interval_words(gain)}).")
    return sentences


def plot_board(
    runs: Sequence[Run], baselines: Baselines | None = None, budget: Budget | None = None, marked: Point | None = None
) -> Figure:
    """Return the score of each layer of each run against each cost, with the best layers and the Pareto front.

    Args:
        runs: at least one, with a known cost.
        baselines: drawn as levels.
        budget: drawn as vertical lines.
        marked: the layer selected within the budget.
    """
    costs = _recorded_costs(runs)
    figure, panels = drawing.panel_grid(len(costs), columns=1, size=(7.5, 3.2), head=True)
    for axes, cost in zip(panels, costs, strict=True):
        points = [point for run in runs for point in run.points if cost in point.costs]
        limit = (budget or {}).get(cost)
        limits = [] if limit is None else [limit]
        drawing.amount_axis(axes, COSTS[cost], [*(point.costs[cost] for point in points), *limits])
        front = pareto_front(points, cost)
        _draw_front(axes, front, cost)
        draw_average_levels(axes, runs[0].summary, baselines or {})
        for value in limits:
            drawing.draw_rule(axes, value, chosen=True)
        _draw_runs(axes, runs, cost)
        if marked is not None and cost in marked.costs:
            drawing.draw_mark(axes, "best", marked.costs[cost], marked.score, "")
        title = f"Score by {COSTS[cost]}"
        label = f"{title}. " + "; ".join(point.describe().replace("\n", ", ") for point in front)
        drawing.set_title(axes, title, label)
    drawing.value_axis(*panels)
    return drawing.finish(figure, y_label="points (score × 100)")


def _recorded_costs(runs: Sequence[Run]) -> list[Cost]:
    return [cost for cost in COSTS if any(cost in point.costs for run in runs for point in run.points)]


def _draw_front(axes: Axes, front: Sequence[Point], cost: Cost) -> None:
    """Draw the Pareto front as a broad staircase up to the end of the axis."""
    x = [*(point.costs[cost] for point in front), axes.get_xlim()[1]]
    y = [*(point.score for point in front), front[-1].score]
    color = LIGHT["best"]
    (stairs,) = axes.step(x, y, where="post", color=color, alpha=0.3, linewidth=4, label="Pareto front")
    drawing.annotate(stairs, "front", curve="Pareto front")


def _draw_runs(axes: Axes, runs: Sequence[Run], cost: Cost) -> None:
    """Draw a curve for each run whose layers differ in cost, and then a disc at the best layer of each."""
    for style, run in enumerate(runs):
        priced = [point for point in run.points if cost in point.costs]
        x = [point.costs[cost] for point in priced]
        y = [point.score for point in priced]
        if len(set(x)) > 1:
            tips = [point.describe() for point in priced]
            drawing.draw_points(axes, x, y, label=run.name, style=style, tips=tips)
    for style, run in enumerate(runs):
        best = run.best
        if cost in best.costs:  # older sweeps timed two layers only
            x = [best.costs[cost]]
            y = [best.score]
            drawing.draw_points(
                axes, x, y, "disc", label=run.name, style=style, tips=[best.describe()], links=[run.page]
            )
