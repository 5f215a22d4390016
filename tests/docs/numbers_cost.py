"""What pages say of time, memory and equality of runs, and the tables of benchmarks that say it."""

import re

import numpy as np

from midlayer_encoders._types import Norm
from tests.docs.frames import BENCH
from tests.integration.test_real_models import EXPECTED

PAIRS = 1379  # of STSBenchmark's test part


def result_row(page: str, start: str) -> list[float]:
    """Return the numbers after the first cells of a row, in the tables of a page of results."""
    text = (BENCH / "results" / page).read_text(encoding="utf8")
    rows = re.findall(rf"^\| {re.escape(start)}(.*)\|$", text, re.MULTILINE)
    assert len(set(rows)) == 1, rows
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", rows[0])]


def callback(device: str, step: str) -> list[float]:
    """Return seconds of a later measurement, the first one, the preparation and a step; overheads in percent."""
    page = f"callbacks_{device}.md"
    prepared, first, later, _, _ = result_row(page, f"{step} ms | ")[:5]
    overheads = [result_row(page, f"{steps} |")[0] for steps in (1024, 16384)]
    return [later / 1000, first / 1000, prepared / 1000, float(step) / 1000, *overheads]


def sts(norm: Norm) -> list[float]:
    """Return the score at layer 16 and the 95 % interval of a rank correlation of that many pairs (Fieller et al. 1957)."""
    score = EXPECTED[norm][16]
    half = 1.96 * 1.03 / (PAIRS - 3) ** 0.5
    return [score, *(100 * np.tanh(np.arctanh(score / 100) + np.array([-half, half])))]


def media_ratios() -> list[float]:
    """Return the ratio of all layers to the last for two image models and one of audio."""
    starts = ("ViT, 12 blocks of 192, 64 images of 224 x 224", "ViT, 12 blocks of 192, 256 images of 32 x 32")
    return [
        result_row("media.md", f"{start} | 13 |")[1]
        for start in (*starts, "Wav2Vec2, 12 blocks of 192, 32 waveforms of 2 s")
    ]
