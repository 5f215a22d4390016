"""What pages say of distilled models, and the frame that says it."""

from __future__ import annotations

import polars as pl

from tests.docs.frames import table
from tests.docs.stated import Claim

PAGE = "docs/distill.md"
SHORT, LONG = (f"vectors, {epochs} epochs, learning rate {rate}" for epochs, rate in ((3, 0.0001), (10, 0.0002)))


def _mean(method: str, layer: int, details: str = "") -> float:
    rows = table("results/distill.csv").filter(
        pl.col("details").fill_null("").str.starts_with(details), model="all-MiniLM-L6-v2", method=method, layer=layer
    )
    assert len(rows) == 6
    return float(rows["score"].mean())  # type: ignore[arg-type]


def _recovered(layer: int) -> float:
    cut = _mean("cut", layer)
    return 100 * (_mean("distill", layer, LONG) - cut) / (_mean("teacher", 6) - cut)


def _seconds() -> int:
    rows = table("results/distill.csv").filter(details=LONG, layer=4)
    return int(rows["seconds"][0])


CLAIMS = [
    Claim(PAGE, "| whole model | {} | {} |", lambda: [_mean("teacher", 6)] * 2),
    *(
        Claim(PAGE, text, lambda arguments=arguments: [_mean(arguments[0], layer, *arguments[1:]) for layer in (4, 3)])
        for text, arguments in {
            "| cut, not trained | {} | {} |": ("cut",),
            "| tuned on pairs of neighboring sentences | {} | {} |": ("pairs",),
            "| tuned on scored pairs (STSBenchmark, validation) | {} | {} |": ("sts",),
            "| distilled, 3 epochs, learning rate 1e-4 | {} | {} |": ("distill", SHORT),
            "| distilled, 10 epochs, learning rate 2e-4 (the default) | {} | {} |": ("distill", LONG),
        }.items()
    ),
    Claim(
        PAGE,
        "recovers {} % of what cutting at layer 4 lost, in {} seconds with other runs on the same GPU, and {} % at layer 3",
        lambda: [_recovered(4), _seconds(), _recovered(3)],
    ),
    Claim(
        PAGE,
        "Matching `similarities` alone gave {} at layer 4 in 3 epochs, `both` {}.",
        lambda: [_mean("distill", 4, match) for match in ("similarities", "both")],
    ),
    Claim("CHANGELOG.md", "at layer 4 of 6 recovers {} % of what cutting loses", lambda: [_recovered(4)]),
]
