"""Time to create augmented views: `python benchmarks/augment.py > benchmarks/results/augment.md`."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from benchmarks.data import data_folder
from midlayer_encoders.metrics.text_views import augment

DATA = data_folder() or Path(__file__).parents[2] / "shared" / "data"
WIKITEXT = DATA / "corpora" / "wikitext2_raw_test.txt"


def main() -> None:
    texts = [line.strip() for line in WIKITEXT.read_text(encoding="utf-8").splitlines() if len(line.split()) >= 30]
    augment(texts[:2])  # imports nlpaug
    print("# Augmented views of texts\n")
    print("Time to create augmented views of WikiText-2 test paragraphs.", end=" ")
    load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f} from other processes"
    print(f"`python benchmarks/augment.py`, Python {platform.python_version()}, {load}.")
    print("\n| texts | views | input characters | seconds | µs per character |\n|---|---|---|---|---|")
    for count, views in ((500, 2), (1000, 4), (len(texts), 4)):
        start = time.perf_counter()
        augment(texts[:count], views=views)
        seconds = time.perf_counter() - start
        characters = views * sum(map(len, texts[:count]))
        row = (count, views, characters, f"{seconds:.2f}", f"{1e6 * seconds / characters:.2f}")
        print("|", " | ".join(map(str, row)), "|", flush=True)


if __name__ == "__main__":
    main()
