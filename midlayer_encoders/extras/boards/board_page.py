"""The page and the chart of a board: the scores and costs of the layers of several sweeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from midlayer_encoders.extras.boards.runs import COSTS, Budget, Cost, Point, Run, cost_text, fronts_by_run, pareto_front
from midlayer_encoders.frame.summaries import Baselines, Gain, average_baseline
from midlayer_encoders.report import drawing
from midlayer_encoders.report.labels import amount, interval_words, number, signed, with_interval
from midlayer_encoders.report.layer_charts import draw_average_levels
from midlayer_encoders.report.pages import block, figure_html, page_html
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
    costs = _recorded_costs(runs)
    title = f"Board of {len(runs)} run{'' if len(runs) == 1 else 's'}"
    verdict = " ".join(board_verdict(runs, best, gains=gains, budget=budget, baselines=baselines))
    lines_of_budget = " The upright lines are the budget, the orange disc is the encoder within it." if budget else ""
    text = (
        "Each curve is a run, each point a layer, the disc its best one. A layer is on the Pareto front if no layer of "
        "any run scores more at the same cost or less. The score axis does not start at zero. Hover over a layer or "
        f"use the arrow keys to read it.{lines_of_budget}"
    )
    sections: dict[str, list[str]] = {
        "Score against cost": [figure_html(plot_board(runs, baselines, budget, best if budget else None)), text]
        if costs
        else [],
        "Use this encoder": [block("code", lines)],
        "Runs": [_runs_table(runs, costs, baselines or {})],
        "What was compared": [block("facts", how)] if how else [],
    }
    return page_html(title, [verdict], sections, notes=[cost_text(best.costs), *notes] if best.costs else notes)


def _runs_table(runs: Sequence[Run], costs: Sequence[Cost], baselines: Baselines) -> Markup:
    """Return a row for each run: its best layer, the gain over the last, the costs, and the score on each task."""
    names = [task.name for task in runs[0].summary.tasks]
    tasks = names if 1 < len(names) <= _MAX_TASKS else []
    labels = [COSTS[cost].capitalize().replace("Milliseconds", "ms") for cost in costs]
    heads = ["Run", "Layer", "Score", "Over its last layer", *labels, "Fronts", *tasks]
    fronts = fronts_by_run(runs)
    rows = []
    for run in runs:
        best, gain, on = run.best, run.average.gain, fronts[run.name]
        scores = {task.name: task.points[best.layer] for task in run.summary.tasks}
        rows.append(
            [
                (run.name, block("linked_name", run.name, run.page, run.home.name)),
                (best.layer, f"{best.layer} of {run.summary.num_layers}"),
                (best.score, number(best.score)),
                (gain, with_interval(gain, run.gain if gain else None)),
                *((best.costs.get(cost), amount(best.costs.get(cost, 0))) for cost in costs),
                (len(on), ", ".join(on).replace("milliseconds", "time") or "–"),
                *((scores[task], number(scores[task])) for task in tasks),
            ]
        )
    feet = [
        [name, "", number(mean), *[""] * (2 + len(costs)), *(number(100 * scores[task]) for task in tasks)]
        for name, scores in baselines.items()
        if (mean := average_baseline(runs[0].summary, scores)) is not None
    ]
    return block("sortable_table", "Best layer of each run, in points (score × 100)", heads, rows, feet)


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
    figure, panels = drawing.panel_grid(len(costs), size=(4.8, 3.2))
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
        drawing.set_title(axes, f"Score by {COSTS[cost]}")
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
    drawing.annotate(stairs, "front")


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
            drawing.draw_points(axes, x, y, "disc", label=run.name, style=style, tips=[best.describe()])
