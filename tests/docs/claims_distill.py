"""What pages say of distilled models, and the frame that says it."""

from __future__ import annotations

import polars as pl

from tests.docs.frames import table
from tests.docs.stated import Claim

PAGE = "docs/distill.md"
LANGUAGE_MODELS = "docs/embedding_model.md"
MINILM = "all-MiniLM-L6-v2"
SHORT, LONG = (f"vectors, {epochs} epochs, learning rate {rate}" for epochs, rate in ((3, 0.0001), (10, 0.0002)))


def _mean(method: str, layer: int, details: str = "", *, model: str = MINILM, recipe: str = "plain") -> float:
    rows = table("results/distill.csv").filter(
        pl.col("details").fill_null("").str.starts_with(details), model=model, method=method, layer=layer, recipe=recipe
    )
    assert len(rows) == 6
    return float(rows["score"].mean())  # type: ignore[arg-type]


def _recovered(layer: int) -> float:
    cut = _mean("cut", layer)
    return 100 * (_mean("distill", layer, LONG) - cut) / (_mean("teacher", 6) - cut)


def _smollm2(method: str, layer: int, details: str = "", recipe: str = "plain") -> float:
    return _mean(method, layer, details, model="SmolLM2-135M", recipe=recipe)


def _teacher() -> float:
    return _smollm2("teacher", 29, recipe="word-echo")


def _recovered_twice(layer: int) -> float:
    cut = _smollm2("cut", layer, recipe="word-echo")
    return 100 * (_smollm2("distill", layer, "vectors", "word-echo") - cut) / (_teacher() - cut)


def _kept() -> list[float]:
    best_plain = _smollm2("cut", 6)
    gain, kept = _teacher() - best_plain, _smollm2("distill", 29, "vectors") - best_plain
    return [100 * kept / gain, kept, gain]


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
    Claim(
        LANGUAGE_MODELS,
        "The teacher, `word-echo` at layer 29, was measured with two spans, before the first copy was added, and scores {}:",
        lambda: [_teacher()],
    ),
    *(
        Claim(LANGUAGE_MODELS, text, lambda rows=rows: [_smollm2(*arguments) for arguments in rows])
        for text, rows in {
            "| reads once, not trained | {} | {} | {} | {} |": [("cut", layer) for layer in (29, 18, 12, 6)],
            "| reads once, distilled | {} | {} | {} | {} |": [
                ("distill", layer, "vectors") for layer in (29, 18, 12, 6)
            ],
            "| reads once, distilled, `--match centered` | {} | {} | {} | |": [
                ("distill", layer, "centered") for layer in (29, 18, 12)
            ],
            "| reads twice, not trained | {} | {} | {} | |": [
                ("teacher", 29, "", "word-echo"),
                *(("cut", layer, "", "word-echo") for layer in (18, 12)),
            ],
            "| reads twice, distilled | | {} | {} | |": [
                ("distill", layer, "vectors", "word-echo") for layer in (18, 12)
            ],
            "| reads once, tuned on pairs of neighboring sentences | | {} | | |": [("pairs", 18)],
        }.items()
    ),
    Claim(LANGUAGE_MODELS, "all-MiniLM-L6-v2, trained for the purpose, scores {}.", lambda: [_mean("teacher", 6)]),
    Claim(LANGUAGE_MODELS, "keeps {} % of what the prompt gains over it ({} of {} points)", _kept),
    Claim(
        LANGUAGE_MODELS,
        "recovered {} % of what cutting `word-echo` at layer 18 lost, and {} % at layer 12",
        lambda: [_recovered_twice(18), _recovered_twice(12)],
    ),
    Claim(
        "docs/tuning.md",
        "SmolLM2-135M scored {} as it comes, {} with bidirectional attention and no training, and {} after MNTP",
        lambda: [_smollm2(method, 30) for method in ("cut", "cut-bidirectional", "mntp")],
    ),
    Claim("CHANGELOG.md", "keeps {} % of the gain of `word-echo`", lambda: _kept()[:1]),
    Claim("CHANGELOG.md", "at layer 4 of 6 recovers {} % of what cutting loses", lambda: [_recovered(4)]),
]
