"""Sentences that place a model beside the paper's claims: one or more for the frame of each experiment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np
import polars as pl

from benchmarks.paper.setting import model_label
from midlayer_encoders.comparing.correlation import LEVEL
from midlayer_encoders.errors import pluralize
from midlayer_encoders.frame.curves import ByLayer, curves_by_dataset, mean_curve
from midlayer_encoders.frame.schema import number_of_layers
from midlayer_encoders.frame.steps import layer_changes
from midlayer_encoders.frame.summaries import Gain, summary
from midlayer_encoders.report.labels import format_signed, number, with_interval
from midlayer_encoders.report.training_page import steps_words

_VERDICTS = {True: "The claim holds here.", False: "The claim does not hold here.", None: "It stays open here."}
_MIN_TASKS = 3  # the interval of two differences says nothing
_MIN_VALLEY = 0.1  # share below both ends
_TUNING = ("infonce", "prompt_entropy", "dataset_entropy")
_LABELS = {"dcor": "distance correlation", "spearman": "Spearman's ρ", "kendall": "Kendall's τ"}


def describe_scores(frame: pl.DataFrame) -> list[str]:
    """Return the best layer of each model and its gain over the last, with an interval over tasks."""
    sentences = []
    for model, part in _models(frame):
        scores = summary(part)
        if (average := scores.average) is None:
            sentences.append(f"{model}: no layer was scored on every task. {_VERDICTS[None]}")
            continue
        best, last, depth = average.best_layer, average.last_layer, scores.num_layers
        gain = mean_gain([task.points[best] - task.points[last] for task in scores.tasks])
        text = f"{model}: layer {best} of {depth} ({100 * best / depth:.0f} % of the depth) is best, "
        text += f"{number(average.best)} points"
        if best == last:
            sentences.append(f"{text}: the last. {_VERDICTS[False]}")
            continue
        text += f", {_gain_over_tasks(gain, len(scores.tasks))} over layer {last}."
        if best == 0:
            text += " Layer 0 is the embeddings, not an intermediate layer."
        elif gain.low <= 0:
            text += " The two are not separable."
        sentences.append(f"{text} {_VERDICTS[False if best == 0 else gain.low > 0 or None]}")
    return sentences


def mean_gain(differences: Sequence[float]) -> Gain:
    """Return the mean of differences in points, with its 95 % interval by Student's t distribution from 3 on.

    Example:
        >>> gain = mean_gain([1.0, 2.0, 3.0])
        >>> gain.points, round(gain.low, 2), round(gain.high, 2)
        (2.0, -0.48, 4.48)
    """
    from scipy.stats import sem, t

    mean = float(np.mean(differences))
    if len(differences) < _MIN_TASKS:
        return Gain(mean, without=(f"fewer than {_MIN_TASKS} tasks",))
    half = float(t.ppf(0.975, len(differences) - 1) * sem(differences))
    return Gain(mean, mean - half, mean + half)


def _gain_over_tasks(gain: Gain, tasks: int) -> str:
    interval = (
        "no interval" if gain.without else f"95 % interval {format_signed(gain.low)} to {format_signed(gain.high)}"
    )
    return f"{format_signed(gain.points)} ({interval} over {pluralize(tasks, 'task')})"


def describe_valley(frame: pl.DataFrame) -> list[str]:
    """Return where the prompt entropy of each model is lowest, and how far below its ends."""
    sentences = []
    for model, part in _models(frame):
        curve, depth = _metric_curve(part, "prompt_entropy"), number_of_layers(part)
        lowest = min(curve, key=lambda layer: curve[layer])
        end = min(curve[min(curve)], curve[max(curve)])
        share = 1 - curve[lowest] / end if end else 0.0
        text = f"{model}: prompt entropy is lowest at layer {lowest} of {depth}, {number(curve[lowest], 2)} nats"
        if share >= _MIN_VALLEY:
            text += f", {100 * share:.0f} % below the lower end: a valley, as in the paper's autoregressive models."
        else:
            text += ", and not a tenth below both ends: no valley, as in the paper's BERT and Mamba."
        sentences.append(text)
    return sentences


def describe_sizes(frame: pl.DataFrame) -> list[str]:
    """Return the lowest prompt entropy of each model, in the order in which the models were given."""
    lowest = {model: min(_metric_curve(part, "prompt_entropy").values()) for model, part in _models(frame)}
    if len(lowest) < 2:
        return [*describe_valley(frame), f"One model, and the claim is about several sizes. {_VERDICTS[None]}"]
    texts = ", ".join(f"{model} {number(value, 2)}" for model, value in lowest.items())
    falls = all(after < before for before, after in pairwise(lowest.values()))
    return [
        f"Lowest prompt entropy, in the order of --model (the smallest should be first): {texts}. {_VERDICTS[falls]}"
    ]


def describe_correlations(frame: pl.DataFrame, statistics: Sequence[str]) -> list[str]:
    """Return which correlations of metrics with the average score stand out of shifted curves."""
    sentences = []
    average = frame.filter(pl.col("task") == "average", pl.col("value").is_not_null())
    for model, part in _models(average):
        short = part.filter(pl.col("threshold").is_null(), statistic=statistics[0])
        for (layers,), rows in short.group_by("layers", maintain_order=True):
            sentences.append(
                f"{model}, {', '.join(rows['metric'])}: {layers} layers are too few to tell a correlation from chance, "
                "however large it is: that takes 20 shifts of one curve against the other, so 11 layers. "
                f"{_VERDICTS[None]}"
            )
        judged = part.drop_nulls("threshold").with_columns(pl.col("p") <= LEVEL)
        for (statistic,), rows in judged.group_by("statistic", maintain_order=True):
            if statistic in statistics:
                sentences.append(f"{model}: {_correlations_of(rows, _LABELS[str(statistic)])}")
    return sentences or [f"No correlation is defined. {_VERDICTS[None]}"]


def _correlations_of(rows: pl.DataFrame, label: str) -> str:
    """Return what the correlations of several metrics must exceed, and which do; ``p`` is true where one does."""
    layers, ends = (sorted({f(rows[name].to_list()) for f in (min, max)}) for name in ("layers", "threshold"))
    beyond, within = (
        ", ".join(f"{metric} {number(value, 2)}" for metric, value in part.select("metric", "value").iter_rows())
        for part in (rows.filter("p"), rows.filter(~pl.col("p")))
    )
    texts = [f"{beyond}: yes"] * bool(beyond) + [f"{within}: no"] * bool(within)
    return (
        f"with {' to '.join(map(str, layers))} layers, {label} must exceed "
        f"{' to '.join(dict.fromkeys(number(end, 2) for end in ends))}, depending on the metric, to stand out of "
        f"chance. {'; '.join(texts)}. The claim holds here for {rows['p'].sum()} of {pluralize(len(rows), 'metric')}."
    )


def describe_training(frame: pl.DataFrame) -> list[str]:
    """Return how far early, middle and late layers move between checkpoints."""
    sentences = steps_words(frame)
    if not sentences:
        return [f"There are too few layers or steps to compare thirds of the depth. {_VERDICTS[None]}"]
    moved = _third_means(layer_changes(frame), number_of_layers(frame), "relative")
    return [*sentences, f"Middle layers {_not(moved[1] == max(moved))}change most. {_VERDICTS[moved[1] == max(moved)]}"]


def describe_solutions(frame: pl.DataFrame) -> list[str]:
    """Return the prompt entropy at the last position that half of the solutions of every model reach."""
    reached = frame.filter(pl.col("texts") >= pl.col("texts").max().over("model") / 2)
    position = min(max(part["position"].to_list()) for _, part in _models(reached))
    means = reached.filter(position=position).group_by("model", maintain_order=True)
    rows = means.agg(pl.col("value", "deviation").mean()).rows()
    texts = "; ".join(f"{model} {number(value, 2)} nats, {number(deviation, 2)}" for model, value, deviation in rows)
    holds = None
    if len(rows) > 1:
        (_, base, spread), *tuned = rows
        holds = all(value > base and deviation < spread for _, value, deviation in tuned)
    return [
        f"Mean prompt entropy of all layers after {position} tokens, and its standard deviation over texts: {texts}. "
        + ("" if len(rows) > 1 else "The claim compares a base model with a tuned one. ")
        + _VERDICTS[holds]
    ]


def describe_prompts(frame: pl.DataFrame) -> list[str]:
    """Return what repetition, random tokens and length do to the prompt entropy of each model."""
    sentences = []
    for model, part in _models(frame):
        ends = {}
        for condition, third in (("repetition", 1), ("randomness", 0), ("length", 1)):
            rows = part.filter(condition=condition)
            amounts = (rows["amount"].min(), rows["amount"].max())
            ends[condition] = [
                _third_means(rows.filter(amount=amount), number_of_layers(part), "value")[third] for amount in amounts
            ]
        texts = {name: f"from {number(before, 2)} to {number(after, 2)}" for name, (before, after) in ends.items()}
        rises = {name: after > before for name, (before, after) in ends.items()}
        holds = not rises["repetition"] and rises["randomness"] and rises["length"]
        sentences.append(
            f"{model}: repetition takes the prompt entropy of the middle third of the layers {texts['repetition']} of "
            f"its maximum, random tokens that of the first third {texts['randomness']}, and length that of the middle "
            f"third {texts['length']} nats. {_VERDICTS[holds]}"
        )
    return sentences


def describe_orders(frame: pl.DataFrame) -> list[str]:
    """Return the share of the smaller half of the eigenvalues by order of the entropy."""
    shares = frame.filter(name="tail_share", beta=1.0).sort("alpha")["value"].to_list()
    texts = ", ".join(f"{100 * share:.1f}" for share in shares)
    rises = all(after > before for before, after in pairwise(shares))
    return [f"At β = 1, the smaller half contributes {texts} % of the entropy, as the order grows. {_VERDICTS[rises]}"]


def describe_tuning(frame: pl.DataFrame) -> list[str]:
    """Return how metrics of the tuned models differ from the base model's, in the mean over layers."""
    (_, base), *tuned = [
        (model, {name: fmean(_metric_curve(part, name).values()) for name in _TUNING}) for model, part in _models(frame)
    ]
    return [
        f"{model} minus the base, mean of all layers: "
        + ", ".join(f"{name.replace('_', ' ')} {format_signed(means[name] - base[name], 2)}" for name in _TUNING)
        + f". InfoNCE falls with invariance: that part of the claim {'holds' if fell else 'does not hold'} here."
        for model, means in tuned
        for fell in [means["infonce"] < base["infonce"]]
    ]


def describe_blocks(frame: pl.DataFrame) -> list[str]:
    """Return the prompt entropy of the residual stream and of the other points inside the blocks at mid-depth."""
    sentences = []
    for model, part in _models(frame.filter(name="prompt_entropy")):
        middle = part.filter(pl.col("depth").is_between(0.3, 0.8), pl.col("site") != "residual_in")
        means = dict(middle.group_by("site", maintain_order=True).agg(pl.col("value").mean()).iter_rows())
        texts = ", ".join(f"{site.replace('_', ' ')} {number(mean, 2)}" for site, mean in means.items())
        stream, others = (
            [mean for site, mean in means.items() if site.startswith("residual") == inside] for inside in (True, False)
        )
        holds = max(stream) < min(others) if stream and others else None
        sentences.append(
            f"{model}: mean prompt entropy from 30 to 80 % of the depth, in nats: {texts}. {_VERDICTS[holds]}"
        )
    return sentences


def describe_rules(frame: pl.DataFrame) -> list[str]:
    """Return the gain over the last layer of the layers that each rule selects, with an interval over tasks."""
    sentences = []
    for model, part in _models(frame):
        points = {
            name: 100 * rows.sort("dataset")["value"].to_numpy()
            for (name,), rows in part.group_by("name", maintain_order=True)
        }
        gains = {name: mean_gain(points[name] - points["last"]) for name in points if name.startswith("min-")}
        texts = ", ".join(f"{name} {with_interval(gain.points, gain)}" for name, gain in gains.items())
        holds = any(gain.low > 0 for gain in gains.values())
        tasks = pluralize(part["dataset"].n_unique(), "task")
        sentences.append(
            f"{model}: points over the last layer, with 95 % intervals over {tasks}: {texts}. {_VERDICTS[holds]}"
        )
    return sentences


def _models(frame: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the label and the rows of each model."""
    for (model, revision), part in frame.group_by("model", "revision", maintain_order=True):
        yield model_label(frame, model, revision), part


def _metric_curve(frame: pl.DataFrame, name: str) -> ByLayer:
    return mean_curve(list(curves_by_dataset(frame.filter(kind="metric", name=name)).values()))


def _third_means(rows: pl.DataFrame, depth: int, column: str) -> list[float]:
    """Return the mean of a column over the first, middle and last third of the depth."""
    third = (pl.col("layer") * 3 // max(depth, 1)).clip(0, 2).alias("third")
    return rows.group_by(third).agg(pl.col(column).mean()).sort("third")[column].to_list()


def _not(condition: bool) -> str:
    return "" if condition else "do not "
