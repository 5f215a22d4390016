"""How long a selection takes: 500 texts of the built-in model (135M parameters), without labels and with 100 of them.

    python benchmarks/selection/speed.py

Writes ``results/speed.csv``: seconds by the clock and of processor time over all threads, loading the model not counted.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import polars as pl
import torch
from real import corpus, encoder

from midlayer_encoders.reading.batches import count_tokens
from midlayer_encoders.selection import select

HERE = Path(__file__).parent


def main() -> None:
    whole = encoder("SmolLM2-135M")
    parts = [corpus(name, 125) for name in ("banking", "emotion", "titles", "sts")]
    texts = [text for some, _ in parts for text in some[:125]]
    labels = [*parts[0][1][:100], *[None] * 400]
    rows = []
    for what, known, options in (
        ("auto", None, {}),
        ("auto, 100 labels", labels, {}),
        ("all rules", None, {"all_rules": True}),
    ):
        clock, processor = time.perf_counter(), time.process_time()
        found = select(whole, texts, known, **options)
        seconds = time.perf_counter() - clock, time.process_time() - processor
        rows.append(
            (
                what,
                len(texts),
                sum(count_tokens(whole, texts)),
                torch.get_num_threads(),
                *(round(one, 1) for one in seconds),
                round(os.getloadavg()[0], 1),
                found.layer,
            )
        )
        names = ["selection", "texts", "tokens", "threads", "seconds", "processor_seconds", "load", "layer"]
        pl.DataFrame(rows, schema=names, orient="row").write_csv(HERE / "results" / "speed.csv")


if __name__ == "__main__":
    main()
