"""Which singular directions of the output embeddings to leave out (EmbedFilter), settled on validation data.

    python -m benchmarks.recipes.filter TASKS --out runs/filter [--model built-in] [--device cuda]

TASKS as for ``benchmarks.recipes.run``; read are the splits that no table scores: STSBenchmark's validation pairs, TrecQA's
dev queries, Emotion's validation texts.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from benchmarks.recipes.run import arguments, questions
from midlayer_encoders import LayerEncoder
from midlayer_encoders.recipes import middle_directions, recipe_of
from midlayer_encoders.scoring import resampled_scores
from midlayer_encoders.selection.rules import DEPTH
from midlayer_encoders.sweeping.embedder import Vectors
from midlayer_encoders.tasks import task_sources

HELD_OUT = {
    "STSBenchmark": {"test": "validation"},
    "TrecQAReranking": {"test": "dev"},
    "EmotionClassification": {"test": "validation", "train": "train"},
}
SHARES = [(largest, smallest) for largest in (0, 0.01, 0.02, 0.05, 0.1) for smallest in (0, 0.25, 0.5)]


def filtered(store: Vectors, matrix: np.ndarray, layer: int, keys: Sequence[str]) -> np.ndarray:
    return store.read(layer, keys) @ matrix


def main() -> None:
    warnings.simplefilter("ignore")
    parser = arguments(__doc__)
    given = parser.parse_args()
    folders = []
    for name, splits in HELD_OUT.items():
        folders.append(given.out / "tasks" / name)
        folders[-1].mkdir(parents=True, exist_ok=True)
        for split, file in splits.items():
            shutil.copy(given.tasks / name / f"{file}.jsonl", folders[-1] / f"{split}.jsonl")
    encoder = LayerEncoder(given.model, -1, device=given.device)
    embeddings, layers = encoder.output_embeddings().to(encoder.device), list(range(1, encoder.layer + 1))
    sources = task_sources(folders)
    lines = ["| left out of the largest | of the smallest | " + " | ".join(
        f"{name}: {place}" for name in ("plain", "one-word") for place in ("last", f"depth {DEPTH}", "best", "at")
    ) + " |"]  # fmt: skip
    lines.append("|---" * 10 + "|")
    asked = {
        name: questions(recipe_of("recipe", name), sources, encoder, given.out, {}) for name in ("plain", "one-word")
    }
    for shares in SHARES:
        matrix = middle_directions(embeddings, shares).float().cpu().numpy()
        cells = [f"{share:g}" for share in shares]
        for store, recorded in asked.values():
            each = [
                resampled_scores(
                    one.scorer, one.keys, layers, partial(filtered, store, matrix),
                    device=torch.device(encoder.device),
                )
                for one in recorded
            ]  # fmt: skip
            mean = {layer: 100 * sum(scores[layer][0] for scores in each) / len(each) for layer in layers}
            best = max(mean, key=lambda layer: mean[layer])
            places = [encoder.layer, round(DEPTH * encoder.layer), best]
            cells += [*(f"{mean[layer]:.1f}" for layer in places), str(best)]
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    (given.out / "filter.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
