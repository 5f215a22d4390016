"""What the mean of several layers is worth without labels, beside single layers, on real tasks.

    python -m benchmarks.recipes.layers TASKS --out runs/recipes [--model built-in] [--device cuda]

``--out`` may be the folder of ``benchmarks.recipes.run``, whose vectors are then used.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np

from benchmarks.recipes.run import arguments, questions
from midlayer_encoders import LayerEncoder
from midlayer_encoders.recipes import recipe_of
from midlayer_encoders.selection.rules import DEPTH
from midlayer_encoders.sweeping.embedder import Vectors
from midlayer_encoders.sweeping.scoring import resampled_scores
from midlayer_encoders.tasks import task_label
from midlayer_encoders.tasks.sources import task_sources


def mean_of(store: Vectors, sets: Sequence[Sequence[int]], number: int, keys: Sequence[str]) -> np.ndarray:
    return sum(store.read(layer, keys) for layer in sets[number]) / len(sets[number])


def main() -> None:
    warnings.simplefilter("ignore")
    parser = arguments(__doc__)
    parser.add_argument("--recipes", nargs="*", default=["plain", "one-word"])
    given = parser.parse_args()
    encoder = LayerEncoder(given.model, -1, device=given.device)
    sources = task_sources(sorted(path for path in given.tasks.iterdir() if path.is_dir()))
    last = encoder.layer
    sets: dict[str, list[int]] = {
        "last": [last],
        f"depth {DEPTH}": [round(DEPTH * last)],
        "mean of 1/4, 1/2 and 3/4": [round(share * last) for share in (0.25, 0.5, 0.75)],
        "mean of the last quarter": list(range(round(0.75 * last), last + 1)),
        "mean of the last half": list(range(round(0.5 * last), last + 1)),
        "mean of all": list(range(last + 1)),
    }
    names = [task_label(source.name) for source in sources]
    lines = ["| recipe | layers | mean | " + " | ".join(names) + " |", "|---" * (3 + len(names)) + "|"]
    for name in given.recipes:
        store, asked = questions(recipe_of("recipe", name), sources, encoder, given.out, {})
        read = partial(mean_of, store, list(sets.values()))
        found = [
            resampled_scores(one.scorer, one.keys, range(len(sets)), read, device=encoder.device) for one in asked
        ]  # fmt: skip
        for number, words in enumerate(sets):
            scores = [100 * each[number][0] for each in found]
            cells = " | ".join(f"{score:.1f}" for score in scores)
            lines.append(f"| {name} | {words} | **{np.mean(scores):.1f}** | {cells} |")
            print(lines[-1], flush=True)
    (given.out / "layers.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
