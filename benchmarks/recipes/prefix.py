"""What it brings that the tokens before a text pass once: every layer read with and without a shared prefix.

``python benchmarks/recipes/prefix.py --threads 1`` reads 128 texts of 10, 20 and 30 words under ``one-word`` and ``instruction``,
in turn, and takes the fastest round of each way; processor seconds on a CPU, the clock on a GPU (``--device cuda``, where the
package itself reads all tokens). Writes ``benchmarks/results/prefix.md``, of another device ``prefix_<device>.md``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.reading.prefix import shared_ids
from midlayer_encoders.reading.reader import LayerReader, layer_reader
from midlayer_encoders.recipes import recipe_of

BATCH = 64
RESULTS = Path(__file__).parents[1] / "results"
WORDS = [
    "river",
    "stone",
    "light",
    "water",
    "house",
    "green",
    "early",
    "small",
    "paper",
    "music",
    "horse",
    "cloud",
    "winter",
    "garden",
    "letter",
    "market",
]


NOTES = [
    "What is saved falls short of the share of the tokens by the prefix's own pass, which reads all weights once a run, by the copies of its keys",
    "and values for each batch, and by attention with a mask. So a prefix is shared from 3 tokens on, where it saves 128 tokens or more over all",
    "texts of a run, on a CPU, in float32 or float64. On a GPU the mask would cost the quickest attention kernels: all tokens are read there.",
]


def clock(device: str) -> Callable[[], float]:
    def on_gpu() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return time.process_time if device == "cpu" else on_gpu


def texts_of(tokens: int, count: int) -> list[str]:
    draw = torch.Generator().manual_seed(tokens)
    picks = torch.randint(len(WORDS), (count, tokens), generator=draw).tolist()
    return [" ".join(WORDS[place] for place in row) for row in picks]


def seconds(reader: LayerReader, texts: list[str], now: Callable[[], float]) -> tuple[float, torch.Tensor]:
    places = list(range(len(texts)))
    start = now()
    vectors = reader.vectors(texts, [places[at : at + BATCH] for at in range(0, len(texts), BATCH)])
    return now() - start, vectors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="built-in")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 20, 30])
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    encoder, now = LayerEncoder(asked.model, -1, device=asked.device), clock(asked.device)
    rows = []
    for name in ("one-word", "instruction"):
        one = encoder.with_recipe(recipe_of("recipe", name))
        prompt = one.default_prompt
        reader = layer_reader(one, prompt=prompt)
        ids = shared_ids(lambda texts, one=one, prompt=prompt: one.host_inputs(texts, prompt=prompt or None))  # type: ignore[misc]
        ways = replace(reader, shared=()), replace(reader, shared=ids)
        for length in asked.lengths:
            texts = texts_of(length, asked.texts)
            plain, shared = (seconds(way, texts, now)[1] for way in ways)  # and warm: what is tried is tried here
            off = float(((shared - plain).norm(dim=2) / plain.norm(dim=2).clamp(min=1e-9)).max())
            best = [float("inf"), float("inf")]
            for _ in range(asked.rounds):
                best = [min(known, seconds(way, texts, now)[0]) for known, way in zip(best, ways, strict=True)]
            whole = len(one.host_inputs(texts[:1], prompt=prompt or None)["input_ids"][0])
            gain = 1 - best[1] / best[0]
            rows.append(
                f"| {name} | {len(ids)} | {length} | {whole} | {best[0]:.3f} | {best[1]:.3f} | **{gain:.0%}** | "
                f"{len(ids) / whole:.0%} | {off:.0e} |"
            )
            print(rows[-1], flush=True)
    kind = "processor seconds" if asked.device == "cpu" else "seconds"
    head = [
        "# The tokens before a text pass once", "",
        f"`python benchmarks/recipes/prefix.py --device {asked.device} --threads {asked.threads} --texts {asked.texts} --rounds {asked.rounds} "
        f"--lengths {' '.join(map(str, asked.lengths))}`: {encoder.name}, all layers of",
        f"{asked.texts} texts in batches of {BATCH}, {kind}, the fastest of {asked.rounds} rounds in turn; other programs shared the machine.", "",
        "| recipe | tokens before | words of a text | tokens in all | all tokens, s | shared, s | saved | share of the tokens | "
        "largest difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    path = RESULTS / ("prefix.md" if asked.device == "cpu" else f"prefix_{asked.device}.md")
    path.write_text("\n".join([*head, *rows, "", *NOTES, ""]))


if __name__ == "__main__":
    main()
