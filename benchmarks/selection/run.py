"""How good is each rule's layer on models that it was not fitted on? Writes ``README.md`` beside it.

    python -m benchmarks.selection.run [--reference FOLDER]

The reference tables are replayed model by model: each rule sees the metrics of one model and is scored by the tables' scores of
the layer it chooses. The one number that is fitted, the depth of ``fixed-depth``, is fitted on all other models (leave one model
out) and on all other families (leave one family out). Models outside the tables: ``results/real_metrics.csv`` and
``few_labels.csv`` (made by ``real.py``), scored by ``benchmarks/results/real_tasks.csv``, and every tidy frame with scores in
``benchmarks/pretraining/results/first/*.csv``. The reference tables are looked for in ``reference/`` beside the folder that
``MIDLAYER_DATA`` names; without them the parts that need them are left as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks import pages
from benchmarks.data import data_folder
from benchmarks.intervals import mean_cell
from benchmarks.selection.reference import reference_metrics, reference_scores
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.frame.curves import ByLayer, Curves
from midlayer_encoders.frame.schema import FRAME_SCHEMA
from midlayer_encoders.selection import RULES, CannotChooseError, choose, curves, select
from midlayer_encoders.selection.rules import best_layer

HERE = Path(__file__).parent
DEPTHS = [place / 100 for place in range(50, 101, 5)]
UNLABELLED = [rule for rule in RULES if rule != "few-labels"]
OTHERS = {"min-intrinsic-dimension (TwoNN)": ("intrinsic_dimension", min), "LOES without labels": ("isotropy", max)}
"""Rules of other papers, replayed beside ours: a metric, and whether its lowest or its highest layer is taken."""
COMPLETE = {
    "Pythia-160m": "Pythia",
    "Pythia-410m": "Pythia",
    "LLM2Vec-mntp-unsup-simcse-8B": "LLM2Vec",
    "hist:baseline-llama(Llama3-8B)-8B": "Llama",
    "hist:llm2vec-supervised-8B": "LLM2Vec",
    "hist:llm2vec-unsupervised-8B": "LLM2Vec",
    "hist:unidirectional-llama(Llama3-8B)-8B": "Llama",
    "Pythia-14m": "Pythia",
    "Pythia-70m": "Pythia",
    "mamba-370m": "Mamba",
}
"""The models of the tables whose last layer was scored on every task, and their families."""


@dataclass(frozen=True)
class Model:
    """A model whose every layer was scored: what rules see, and the truth in points."""

    name: str
    family: str
    seen: Curves
    score: ByLayer
    tasks: dict[str, ByLayer]

    @property
    def best(self) -> float:
        return max(self.score.values())

    @property
    def last(self) -> float:
        return self.score[max(self.score)]

    def best_over_last(self) -> list[float]:
        """Return the gain of the best layer over the last on each task."""
        best = max(self.score, key=self.score.__getitem__)
        return [curve[best] - curve[max(self.score)] for curve in self.tasks.values()]

    def at(self, layer: int) -> float:
        """Return the score of the nearest scored layer."""
        return self.score[min(self.score, key=lambda one: (abs(one - layer), one))]


def model(name: str, family: str, frame: pl.DataFrame) -> Model:
    found = curves(frame)
    points = {layer: 100 * value for layer, value in found.score.items()}
    tasks = {task: {layer: 100 * value for layer, value in curve.items()} for task, curve in found.tasks.items()}
    return Model(name, family, replace(found, tasks={}, score={}), points, tasks)


def reference(folder: Path, *, texts: str) -> list[Model]:
    """Return the tables' models, with the metrics measured on the tasks' texts or on WikiText."""
    own = pl.col("dataset") == "wikitext"
    scores = reference_scores(folder)
    frame = pl.concat([scores, reference_metrics(folder).filter(own if texts == "WikiText" else ~own)])
    frame = frame.filter(pl.col("revision") == "main")
    return [model(name, family, frame.filter(pl.col("model") == name)) for name, family in COMPLETE.items()]


def outside() -> Iterator[Model]:
    """Yield the models that are not in the tables, with whatever was measured of them."""
    files = [HERE / "results" / name for name in ("real_metrics.csv", "other_rules.csv")]
    measured = pl.concat(pl.read_csv(file, schema_overrides=FRAME_SCHEMA) for file in files)
    scored = pl.read_csv(HERE.parent / "results" / "real_tasks.csv", schema=FRAME_SCHEMA)
    for name in scored["model"].unique(maintain_order=True):
        rows = scored.filter(pl.col("model") == name).with_columns(depth=pl.col("layer") / pl.col("layer").max())
        wiki = measured.filter((pl.col("model") == name) & (pl.col("dataset") == "wikitext"))
        yield model(name, name, pl.concat([rows, wiki.with_columns(depth=pl.col("layer") / rows["layer"].max())]))
    yield from trained()


def trained() -> Iterator[Model]:
    """Yield the last step of every model of the first training record."""
    frames = []
    for path in sorted((HERE.parent / "pretraining" / "results" / "first").glob("*.csv")):
        table = pl.read_csv(path, infer_schema_length=None)
        if set(FRAME_SCHEMA) <= set(table.columns):
            frames.append(table.select(list(FRAME_SCHEMA)).cast(FRAME_SCHEMA))
    if not frames:
        return
    frame = pl.concat(frames).unique(
        ["model", "revision", "layer", "kind", "dataset", "name"], keep="last", maintain_order=True
    )
    step = pl.col("revision").str.extract(r"(\d+)$").cast(pl.Int64)
    for (name,), part in frame.group_by("model", maintain_order=True):
        scored = part.filter(kind="score").with_columns(step.alias("step"))
        if scored.is_empty() or scored["step"].is_null().all():
            continue
        revision = scored.filter(pl.col("step") == scored["step"].max())["revision"][0]
        try:
            yield model(f"{name} ({revision})", name, part.filter(pl.col("revision") == revision))
        except MidlayerError as error:
            print(f"{name} is left out: {error}")


def fitted(models: list[Model], one: Model, *, by: str) -> float:
    """Return the depth with the smallest mean regret over the models outside one's own name or family."""
    others = [other for other in models if getattr(other, by) != getattr(one, by)]
    regret = {
        depth: np.mean([other.best - other.at(round(depth * other.seen.num_layers)) for other in others])
        for depth in DEPTHS
    }
    return min(regret, key=lambda depth: (round(regret[depth], 9), depth))


def chosen(one: Model, rule: str) -> int | None:
    if rule in OTHERS:
        name, lowest_or_highest = OTHERS[rule]
        curve = one.seen.metrics.get(name)
        return None if curve is None else lowest_or_highest(curve, key=curve.__getitem__)
    if rule == "auto" and one.name == "all-MiniLM-L6-v2":  # its folder has modules of sentence-transformers
        return one.seen.num_layers
    try:
        return choose(one.seen, rule)[0]
    except CannotChooseError:
        return None


def layers(models: list[Model]) -> dict[str, list[int | None]]:
    """Return what each rule chooses for each model, and the two fitted depths."""
    found = {rule: [chosen(one, rule) for one in models] for rule in UNLABELLED}
    for by, words in (("name", "depth fitted on the other models"), ("family", "depth fitted on other families")):
        found[words] = [round(fitted(models, one, by=by) * one.seen.num_layers) for one in models]
    return found


def table(models: list[Model], found: dict[str, list[int | None]]) -> list[str]:
    """Return the lines of a table: a rule a row, over the models on which it answers, with intervals over models."""
    lines = [
        "| rule | models | mean regret | worst regret | gain over last | worst gain over last | gain over fixed-depth |",
        "|---|---|---|---|---|---|---|",
    ]
    for rule, choices in found.items():
        places = [place for place, layer in enumerate(choices) if layer is not None]
        if not places:
            lines.append(f"| {rule} | 0 of {len(models)} | | | | | |")
            continue
        fixed = [models[place].at(found["fixed-depth"][place]) for place in places]
        scores = [models[place].at(choices[place]) for place in places]
        regret = [models[place].best - score for place, score in zip(places, scores, strict=True)]
        gain = [score - models[place].last for place, score in zip(places, scores, strict=True)]
        cells = [mean_cell(regret), f"{max(regret):.2f}", mean_cell(gain, "+.2f"), f"{min(gain):+.2f}"]
        cells.append(mean_cell([score - other for score, other in zip(scores, fixed, strict=True)], "+.2f"))
        lines.append(f"| {rule} | {len(places)} of {len(models)} | " + " | ".join(cells) + " |")
    return lines


def by_model(models: list[Model], found: dict[str, list[int | None]]) -> list[str]:
    names = [one.name.removeprefix("hist:") for one in models]
    lines = ["| | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines.append(
        "| best | " + " | ".join(f"{one.best:.2f} at {max(one.score, key=one.score.get)}" for one in models) + " |"
    )
    lines.append("| last | " + " | ".join(f"{one.last:.2f} at {max(one.score)}" for one in models) + " |")
    lines.append(
        "| best over last, over tasks | " + " | ".join(mean_cell(one.best_over_last()) for one in models) + " |"
    )
    for rule, choices in found.items():
        if rule == "last":
            continue
        cells = [
            "" if layer is None else f"{one.at(layer):.2f} at {layer}"
            for one, layer in zip(models, choices, strict=True)
        ]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return lines


def one_task(models: list[Model]) -> list[str]:
    """Return what labels of one task are worth: its best layer, smoothed, scored on the task and on all others."""
    lines = [
        "| model | tasks | regret on the average of the others | gain over last there | worst gain over last |",
        "|---|---|---|---|---|",
    ]
    for one in models:
        regret, gain = [], []
        for task, curve in one.tasks.items():
            others = [other for name, other in one.tasks.items() if name != task]
            mean = {layer: float(np.mean([other[layer] for other in others])) for layer in one.score}
            layer = best_layer({layer: value for layer, value in curve.items() if layer in one.score})
            regret.append(max(mean.values()) - mean[layer])
            gain.append(mean[layer] - mean[max(mean)])
        lines.append(
            f"| {one.name.removeprefix('hist:')} | {len(one.tasks)} | {np.mean(regret):.2f} | {np.mean(gain):+.2f} | {min(gain):+.2f} |"
        )
    return lines


def few_labels() -> list[str]:
    """Return a row for each model, task and number of labels; regret, then gain over the last layer: mean (worst draw)."""
    frame = pl.read_csv(HERE / "results" / "few_labels.csv")
    titles = ["regret", "gain over last", "regret on all six", "gain over last there"]
    lines = [
        "| model | labels from | number | "
        + " | ".join(f"{rule}: {title}" for rule in ("few-labels", "auto") for title in titles)
        + " |"
    ]
    lines.append("|---|---|---|" + "---|" * 8)
    for (name, task, count), part in frame.group_by("model", "task", "labels", maintain_order=True):
        cells = []
        for rule in ("few-labels", "auto"):
            one = part.filter(rule=rule)
            for regret, gain in (("regret", "over_last"), ("average_regret", "average_over_last")):
                cells += [f"{one[regret].mean():.2f}", f"{one[gain].mean():+.2f} ({one[gain].min():+.2f})"]
        lines.append(f"| {name} | {task} | {count} | " + " | ".join(cells) + " |")
    for rule in ("few-labels", "auto"):
        one = frame.filter(rule=rule)
        worse = (one["average_over_last"] < -0.5).sum()
        lines.append(
            f"| all | | | {rule}: {worse} of {len(one)} draws are more than 0.5 below the last layer on all six |"
            + " |" * 7
        )
    return lines


def variants() -> list[str]:
    frame = pl.read_csv(HERE / "results" / "variants.csv")
    changes = frame["change"].unique(maintain_order=True).to_list()
    lines = ["| model | vectors | " + " | ".join(changes) + " |", "|---|---|" + "---|" * len(changes)]
    mean = frame.group_by("model", "vectors", "change", maintain_order=True).agg(pl.col("score").mean())
    for (name, vectors), part in mean.group_by("model", "vectors", maintain_order=True):
        values = dict(part.select("change", "score").iter_rows())
        lines.append(f"| {name} | {vectors} | " + " | ".join(f"{values[change]:.1f}" for change in changes) + " |")
    return lines


def speed() -> list[str]:
    path = HERE / "results" / "speed.csv"
    if not path.exists():
        return ["Not measured yet."]
    frame = pl.read_csv(path)
    lines = [
        "| " + " | ".join(name.replace("_", " ") for name in frame.columns) + " |",
        "|---|" + "---|" * (len(frame.columns) - 1),
    ]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in frame.iter_rows()]


def write_part(name: str, lines: list[str]) -> None:
    """Write a table into its place in ``README.md``."""
    pages.write_part(HERE / "README.md", name, "\n".join(lines) + "\n")


def parts(tables: Path | None) -> dict[str, list[str]]:
    """Return the tables of ``README.md``, or those that need no reference tables where there are none."""
    out = list(outside())
    replayed = {rule: [chosen(one, rule) for one in out] for rule in (*UNLABELLED, *OTHERS)}
    made = {
        "outside": table(out, replayed),
        "outside-by-model": by_model(out, replayed),
        "few-labels": few_labels(),
        "variants": variants(),
        "speed": speed(),
    }
    if tables is None:
        return made
    ten = reference(tables, texts="the tasks")
    deep = [one for one in ten if one.seen.num_layers >= 12 and one.family != "Mamba"]
    wiki = reference(tables, texts="WikiText")
    return made | {
        "seven": table(deep, layers(deep)),
        "ten": table(ten, layers(ten)),
        "ten-wikitext": table(wiki, layers(wiki)),
        "ten-by-model": by_model(ten, layers(ten)),
        "one-task": one_task([*ten, *out]),
    }


def main() -> None:
    beside = (data_folder() or HERE.parents[2] / "shared" / "data").parent / "reference"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--reference", type=Path, default=beside if beside.is_dir() else None)
    given = parser.parse_args()
    if given.reference is None:
        print(f"No reference tables at {beside} (MIDLAYER_DATA): the parts that need them stay as they are.")
    measured = pl.read_csv(HERE / "results" / "real_metrics.csv", schema_overrides=FRAME_SCHEMA)
    smollm2 = measured.filter((pl.col("model") == "SmolLM2-135M") & (pl.col("dataset") == "wikitext"))
    smollm2 = smollm2.with_columns(depth=pl.col("layer") / smollm2["layer"].max())
    select(smollm2).plot().savefig(HERE.parents[1] / "docs" / "figures" / "selection_smollm2.png", dpi=90)
    for name, lines in parts(given.reference).items():
        write_part(name, lines)


if __name__ == "__main__":
    main()
