"""What ``midlayer demo`` prints: a model as it comes, at its best layer and with a prompt, on one screen."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.frame.summaries import Curve, Gain, average_baseline
from midlayer_encoders.recipes import PLAIN, RECIPES
from midlayer_encoders.report.labels import with_interval
from midlayer_encoders.sweeping import SweepResult
from midlayer_encoders.sweeping.embedder import Embedder, Vectors, item_key, mapped_store, open_store
from midlayer_encoders.tasks.task_data import TaskData

_WIDTH = 79
_BAR = 20
_EXAMPLES = 2


@dataclass(frozen=True)
class Ranked:
    """Queries with candidates, and the similarity of each candidate before and after.

    Attributes:
        queries: texts.
        candidates: texts of each query; the first one is the right one.
        before: similarity of each candidate to its query, as the model comes.
        after: the same with the recipe.
    """

    queries: Sequence[str]
    candidates: Sequence[Sequence[str]]
    before: Sequence[np.ndarray]
    after: Sequence[np.ndarray]

    def changed(self) -> list[int]:
        """Return the queries whose nearest candidate became the right one, those with the largest lead first."""
        lead = {
            place: after[0] - after[1:].max()
            for place, (before, after) in enumerate(zip(self.before, self.after, strict=True))
            if before.argmax() != 0 and after.argmax() == 0
        }
        return sorted(lead, key=lambda place: -lead[place])


def rank_descriptions(encoder: LayerEncoder, data: TaskData, folder: Path, places: Sequence[tuple[str, int]]) -> Ranked:
    """Return how near the descriptions of a reranking task are to its summaries, from the vectors that a sweep stored.

    Args:
        encoder: the encoder that was swept.
        data: the task.
        folder: the sweep's.
        places: recipe and layer, before and after.
    """
    rows = list(zip(*(data.splits["test"][name] for name in ("query", "positive", "negative")), strict=True))
    queries = [str(query) for query, _, _ in rows]
    candidates = [[*map(str, positive), *map(str, negative)] for _, positive, negative in rows]
    found = []
    for name, layer in places:
        recipe = RECIPES[name]
        reader = encoder.with_recipe(recipe.apart())
        store = open_store(folder / "embeddings", reader.spec, range(encoder.num_layers + 1), reader, "float32")
        vectors = mapped_store(Embedder(reader, store), recipe, ())

        def read(texts: Sequence[str], vectors: Vectors = vectors, layer: int = layer) -> np.ndarray:
            rows = vectors.read(layer, [item_key(text) for text in texts])
            return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))

        found.append([read(texts) @ query for query, texts in zip(read(queries), candidates, strict=True)])
    return Ranked(queries, candidates, *found)


def story_lines(result: SweepResult, recipe: str, layer: int, ranked: Ranked) -> list[str]:
    """Return the lines that compare the last layer, the best one, and a recipe at a layer."""
    plain, prompted = result.parts[PLAIN], result.parts[recipe]
    curve, prompted_curve = (part.curves.average for part in (plain, prompted))
    if curve is None or prompted_curve is None:
        raise MidlayerError(f"Not every task was scored: {result.failures}")
    last, score = curve.last, prompted_curve.points[layer]
    layer_gain, prompt_gain = plain.gain(), prompted.gain(layer, over=curve.best_layer, other=plain)
    bars: list[tuple[str, float, Gain | None]] = [
        ("as it comes, last layer", last, None),
        (f"best plain layer, {curve.best_layer} of {curve.last_layer}", curve.best, layer_gain),
        (f"{recipe} at layer {layer}", score, prompt_gain),
    ]
    for name, scores in result.notes.baselines.items():
        average = average_baseline(plain.curves, scores)
        bars += [] if average is None else [(name, average, None)]
    top = max(points for _, points, _ in bars)
    total = prompted.gain(layer, over=curve.last_layer, other=plain)
    return [
        f"SmolLM2-135M scores {score:.1f} with {recipe} at layer {layer}, and {last:.1f} as it comes.",
        "",
        *(_bar(name, points, gain, top) for name, points, gain in bars),
        *_wrapped(
            f"Mean of {len(plain.curves.tasks)} small tasks; in brackets, the gain over the line above, with its "
            f"95 % interval. Together they gain {with_interval(total.points, total)}. "
            f"{_layer_words(curve, layer_gain)}The other lines are baselines."
        ),
        "",
        *_example_lines(ranked, recipe),
        "",
    ]


def _layer_words(curve: Curve, gain: Gain) -> str:
    if curve.best_layer == curve.last_layer:
        return "No layer beats the last one here. "
    return "" if gain.separable else "The gain of the layer alone is not separable from zero here. "


def _bar(name: str, points: float, gain: Gain | None, top: float) -> str:
    filled = round(_BAR * points / top)
    more = "" if gain is None else f"  [{with_interval(gain.points, gain)}]"
    return f"{name:<26} {'█' * filled}{'░' * (_BAR - filled)} {points:.1f}{more}"


def _example_lines(ranked: Ranked, recipe: str) -> list[str]:
    right = [sum(int(row.argmax() == 0) for row in rows) for rows in (ranked.before, ranked.after)]
    lines = _wrapped(
        f"Which description belongs to a summary? The nearest is right for {right[0]} of {len(ranked.queries)} as it "
        f"comes, for {right[1]} with {recipe}. Two that changed:"
    )
    for place in ranked.changed()[:_EXAMPLES]:
        texts = ranked.candidates[place]
        before = texts[int(ranked.before[place].argmax())]
        example = f"  “{ranked.queries[place]}”", f"    before  {before}", f"    after   {texts[0]}"
        lines += map(_short, example)
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
