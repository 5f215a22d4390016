"""Peak memory of ``embed`` by the number of texts, each in a separate process.

    python benchmarks/embed_memory.py --model FOLDER [--texts 70000 280000]

Writes ``benchmarks/results/embed_memory.md``. Texts are lines of eight words; the peak includes the Python strings.
"""

from __future__ import annotations

import argparse
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from midlayer_encoders import LayerEncoder, embed

RESULTS = Path(__file__).parent / "results"
WORDS = (
    "river",
    "stone",
    "light",
    "water",
    "house",
    "green",
    "paper",
    "cloud",
    "slow",
    "never",
    "sing",
    "road",
    "field",
)


def peak() -> float:
    """Return the peak of this process's memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one(model: str, count: int) -> None:
    """Embed so many texts at all layers, and print what that took."""
    draw = random.Random(0)
    encoder = LayerEncoder(model, -1, device="cpu")
    embed(encoder, ["a text"] * 2, Path(tempfile.mkdtemp()) / "warm.npy")
    texts = [f"{number} {' '.join(draw.choices(WORDS, k=8))}" for number in range(count)]
    before, start = peak(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        out = embed(encoder, texts, Path(folder) / "v.npy")
        size = out.stat().st_size / 2**20
    print(before, peak(), size, time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--texts", type=int, nargs="+", default=[70_000, 280_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        one(given.model, given.one)
        return
    rows = []
    for count in given.texts:
        words = [sys.executable, "-W", "ignore", __file__, "--model", given.model, "--one", str(count)]
        said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()
        before, most, size, seconds = map(float, said[-4:])
        rows.append(f"| {count:,} | {size:,.0f} | {before:,.0f} | {most:,.0f} | {seconds:,.0f} |")
        print(rows[-1], flush=True)
    (RESULTS / "embed_memory.md").write_text(
        "# Memory of `midlayer embed` by the number of texts\n\n`python benchmarks/embed_memory.py --model MODEL --texts "
        f"{' '.join(map(str, given.texts))}` on a CPU: all layers of a small model, each row in a separate process.\n\n"
        "| texts | file, MB | memory before (including the texts), MB | peak, MB | seconds |\n|---|---|---|---|---|\n"
        + "\n".join(rows) + "\n",
        encoding="utf8",
    )  # fmt: skip


if __name__ == "__main__":
    main()
