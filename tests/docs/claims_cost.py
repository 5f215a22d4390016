"""What pages say of time, memory and equality of runs, and the tables of benchmarks that say it."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np

from benchmarks.intervals import mean_interval
from midlayer_encoders._types import Norm
from tests.docs.frames import BENCH, over_tasks, table
from tests.docs.stated import Claim
from tests.integration.test_real_models import EXPECTED

CALLBACKS, ENCODERS, FAQ = (f"docs/{page}.md" for page in ("callbacks", "encoders", "faq"))
PAIRS = 1379  # of STSBenchmark's test part
_QUANTIZED = (("float16", "3.1e-04"), ("8bit", "3.2e-04 | 2.8e"), ("4bit", "3.3e-04"))  # rows of the first table


def _row(page: str, start: str) -> list[float]:
    """Return the numbers after the first cells of a row, in the tables of a page of results."""
    text = (BENCH / "results" / page).read_text(encoding="utf8")
    rows = re.findall(rf"^\| {re.escape(start)}(.*)\|$", text, re.MULTILINE)
    assert len(set(rows)) == 1, rows
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", rows[0])]


def _callback(device: str, step: str) -> list[float]:
    """Return seconds of a later measurement, the first one, the preparation and a step; overheads in percent."""
    page = f"callbacks_{device}.md"
    prepared, first, later, _, _ = _row(page, f"{step} ms | ")[:5]
    overheads = [_row(page, f"{steps} |")[0] for steps in (1024, 16384)]
    return [later / 1000, first / 1000, prepared / 1000, float(step) / 1000, *overheads]


def _sts(norm: Norm) -> list[float]:
    """Return the score at layer 16 and the 95 % interval of a rank correlation of that many pairs (Fieller et al. 1957)."""
    score = EXPECTED[norm][16]
    half = 1.96 * 1.03 / (PAIRS - 3) ** 0.5
    return [score, *(100 * np.tanh(np.arctanh(score / 100) + np.array([-half, half])))]


def _planted() -> list[float]:
    """Return the number of planted mistakes."""
    return [len(json.loads((BENCH / "mistakes" / "planted.json").read_text()))]


def _cut_and_tuned() -> list[float]:
    """Return by how many percent a cut at layer 24 makes SmolLM2-135M smaller, and what it gains on each task over seeds."""
    rows = table("results/tuning.csv").filter(model="SmolLM2-135M")
    sizes = dict(rows.drop_nulls("parameters").select("layer", "parameters").iter_rows())
    tuned = rows.filter(when="after").sort("seed")
    gains = []
    for task in ("Banking77Classification", "STSBenchmark"):
        cut, whole = (tuned.filter(task=task, layer=layer) for layer in (24, 30))
        assert cut["seed"].to_list() == whole["seed"].to_list() == [0, 1, 2]
        gains += mean_interval((cut["score"] - whole["score"]).to_list())
    return [100 * (1 - sizes[24] / sizes[30]), *gains]


CLAIMS = [
    Claim("README.md", "{} passes with baselines", lambda: _row("waits.md", "whole sweep, warm | 2.27 | 1.6 |")),
    Claim("README.md", "{} of the time ([encode]", lambda: _row("sweep_gpu.md", "12 | 1.55 |")[1:]),
    Claim(
        "README.md",
        "{} % fewer parameters; Banking77 {} ({} to {}), STSBenchmark {} ({} to {}) ([tuning]",
        _cut_and_tuned,
    ),
    Claim(
        FAQ,
        "took {} times one pass of sentence-transformers on a model of 24 blocks, {} times the first time",
        lambda: [
            _row("waits.md", f"{what} |")[-1]
            for what in (
                "whole sweep, warm",
                "first whole sweep of six tasks in a process, relative to one pass of sentence-transformers",
            )
        ],
    ),
    Claim(
        FAQ,
        "{} times its peak on a CPU, {} on a GPU",
        lambda: [_row("sweep.md", "680 | 751 |")[0], _row("sweep_gpu.md", "all layers into the store |")[-1]],
    ),
    Claim(
        ENCODERS,
        "all weights take {} MB in float16, {} in 8 bits and {} in 4 bits",
        lambda: [_row("quantized_cuda.md", f"{start} | {more}")[-3] for start, more in _QUANTIZED],
    ),
    Claim(FAQ, "[{} times](../benchmarks/results/sweep.md) a last-layer pass", lambda: [_row("sweep.md", "**")[0]]),
    Claim(
        CALLBACKS,
        "| 2.9M | {} s (the first {} s, after {} s of preparation), a step {} s | {} % of 1,024 steps, {} % of 16,384 |",
        lambda: _callback("cpu", "182.0"),
    ),
    Claim(
        CALLBACKS,
        "| 46M | {} s (the first {} s, after {} s of preparation), a step {} s | {} % of 1,024 steps, {} % of 16,384 |",
        lambda: _callback("cuda", "55.4"),
    ),
    Claim(ENCODERS, "scores {} with raw states (95 % interval {} to {}, of 1,379 pairs)", lambda: _sts("none")),
    Claim(ENCODERS, "and {} with the norm ({} to {})", lambda: _sts("final")),
    Claim(
        ENCODERS,
        "{} points below the mean (95 % interval over tasks {} to {}); at its last layer with `one-word`, the mean scores {} "
        "below the last token ({} to {};",
        lambda: [
            *over_tasks("smollm2", [("plain", 6), ("plain+last", 28)]),
            *over_tasks("smollm2", [("one-word", 30), ("one-word+mean", 30)]),
        ],
    ),
    Claim(
        ENCODERS,
        "SmolLM2-135M at layer 24 takes {} s of CPU time, and {} MB of disk",
        lambda: _row("gguf_loading.md", "24 | second |")[1:],
    ),
    Claim(
        "docs/vision.md",
        "together took {} s, one layer at a time {} s ({} times) with stored tokens, and {} s against {} s ({} times) with a "
        "forward pass in every step",
        lambda: [*_row("probing.md", "stored after one pass |")[:3], *_row("probing.md", "a pass in every step |")[:3]],
    ),
    Claim("docs/media.md", "costs {} and {} times one pass", lambda: _media()[:2]),
    Claim("docs/media.md", "and {} times for Wav2Vec2", lambda: _media()[2:3]),
    Claim("docs/media.md", "single rounds range from {} to {};", lambda: _media()[3:]),
    Claim(
        "docs/progression.md",
        "shifts InfoNCE and DiME by {} and {} true standard deviations",
        lambda: [_row("halves.md", f"{metric} |")[-1] for metric in ("infonce", "dime")],
    ),
    Claim("docs/progression.md", "are {} to {} times the true ones, and {} times for LiDAR", lambda: _halves()),
    Claim(
        "docs/reliability.md",
        "of {} types of transformers 5.22: {} exact, {} at some layers, {} refused, {} not examined (with the reason), 0 wrong",
        lambda: _census(),
    ),
    Claim(
        "docs/reliability.md",
        "of {}: {} exact, {} refused, {} wrong, which led to a fix",
        lambda: _row("fuzz.md", "all |")[:4],
    ),
    Claim("docs/reliability.md", "contains {} realistic programming errors", lambda: _planted()),
]


def _media() -> list[float]:
    """Return the ratio of all layers to the last for two image models and one of audio, and the ends of their rounds."""
    starts = ("64 images of 224 x 224 | 13 |", "256 images of 32 x 32 | 13 |")
    images = [_row("media.md", f"ViT, 12 blocks of 192, {start}") for start in starts]
    every = [*images, _row("media.md", "Wav2Vec2, 12 blocks of 192, 32 waveforms of 2 s | 13 |")]
    rounds = [number for row in every for number in row[3:5]]
    return [*(row[1] for row in every), min(rounds), max(rounds)]


def _halves() -> list[float]:
    text = (BENCH / "results" / "halves.md").read_text(encoding="utf8")
    rows = re.findall(r"^\| (\w+) \| [\d.]+ \| ([\d.]+) \|", text, re.MULTILINE)
    errors = {metric: float(number) for metric, number in rows}
    lidar = errors.pop("lidar")
    return [min(errors.values()), max(errors.values()), lidar]


def _census() -> list[float]:
    lines = (BENCH / "results" / "census.jsonl").read_text(encoding="utf8").splitlines()
    verdicts = Counter(json.loads(line)["verdict"] for line in lines)
    assert verdicts.keys() == {"exact", "some layers", "refused", "not examined"}
    return [len(lines), *(verdicts[name] for name in ("exact", "some layers", "refused", "not examined"))]
