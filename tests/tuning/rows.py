"""Pairs that a tiny model can learn, and a run on them."""

from pathlib import Path
from typing import Any

from midlayer_encoders.extras.training import TuneResult
from tests.support.grouped import tune
from tests.support.tiny_folders import TEXTS

PAIRS = [
    {"anchor": f"{text} {number}", "positive": f"{text.upper()} {number}"} for number in range(8) for text in TEXTS
]


def tuned(folder: str, out: Path, pairs: Any = None, **options: Any) -> TuneResult:
    """Return a quick run without tasks."""
    quick = {"tasks": (), "batch_size": 8, "learning_rate": 5e-3, "device": "cpu", **options}
    return tune(folder, 2, PAIRS if pairs is None else pairs, out=out, **quick)
