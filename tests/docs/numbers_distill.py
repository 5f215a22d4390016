"""What pages say of distilled models, and the frame that says it."""

import polars as pl

from tests.docs.frames import table

MINILM = "all-MiniLM-L6-v2"
SHORT, LONG = (f"vectors, {epochs} epochs, learning rate {rate}" for epochs, rate in ((3, 0.0001), (10, 0.0002)))


def mean(method: str, layer: int, details: str = "", *, model: str = MINILM, recipe: str = "plain") -> float:
    rows = table("results/distill.csv").filter(
        pl.col("details").fill_null("").str.starts_with(details), model=model, method=method, layer=layer, recipe=recipe
    )
    assert len(rows) == 6
    return float(rows["score"].mean())  # type: ignore[arg-type]


def recovered(layer: int) -> float:
    cut = mean("cut", layer)
    return 100 * (mean("distill", layer, LONG) - cut) / (mean("teacher", 6) - cut)


def smollm2(method: str, layer: int, details: str = "", recipe: str = "plain") -> float:
    return mean(method, layer, details, model="SmolLM2-135M", recipe=recipe)


def teacher_score() -> float:
    return smollm2("teacher", 29, recipe="word-echo")


def recovered_twice(layer: int) -> float:
    cut = smollm2("cut", layer, recipe="word-echo")
    return 100 * (smollm2("distill", layer, "vectors", "word-echo") - cut) / (teacher_score() - cut)


def kept_gain() -> list[float]:
    best_plain = smollm2("cut", 6)
    gain, kept = teacher_score() - best_plain, smollm2("distill", 29, "vectors") - best_plain
    return [100 * kept / gain, kept, gain]


def distill_seconds() -> int:
    rows = table("results/distill.csv").filter(details=LONG, layer=4)
    return int(rows["seconds"][0])
