"""Every option with values of every type: a result without NaN, or an error of ours."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder, measure, select_layer
from midlayer_encoders.encoder.options import EncoderOptions, make_options, option_fields
from tests.fuzz.running import Case, check_cases, seeds
from tests.fuzz.values import number, one_of, several, strange, text
from tests.support.grouped import compare, probe, sweep
from tests.support.tiny_folders import Folder

TEXTS = [f"text {number} about {word}" for number in range(5) for word in ("cats", "dogs", "trains", "ships")]
LABELS = ["animal", "animal", "thing", "thing"] * 5
# What each function takes, besides the options of the encoder, and a quick call of it.
ARGUMENTS: dict[str, tuple[str, ...]] = {
    "measure": ("texts", "metrics", "layers", "norm", "pooling", "views", "seed", "dataset", "token_budget", "progress"),
    "select": ("texts", "labels", "rule", "all_rules", "max_texts", "seed"),
    "probe": (
        "inputs", "labels", "kind", "layers", "test_inputs", "test_labels", "epochs", "patience", "batch_size",
        "learning_rate", "weight_decay", "heads", "keep_gb", "seed", "dataset", "progress",
    ),
    "compare": ("texts", "metrics", "layers", "views", "seed", "resamples", "confidence", "dataset", "out", "progress"),
    "sweep": (
        "tasks", "layers", "metrics", "metric_texts", "views", "out", "store", "store_dtype", "workers", "token_budget",
        "baselines", "executor", "progress",
    ),
}  # fmt: skip
NEAR = (
    "all",
    "paper",
    "curvature",
    ["curvature"],
    [0, -1],
    [1],
    0.5,
    "auto",
    "last",
    1,
    2,
    3,
    "linear",
    "none",
    "mean",
)


@pytest.fixture(scope="module")
def encoders(tiny_folder: Folder) -> dict[str, LayerEncoder]:
    return {name: LayerEncoder(tiny_folder(name), -1, device="cpu", norm="none") for name in ("Llama", "GPTNeoX")}


def value_of(random: Random) -> Any:
    return one_of(random, strange, strange, number, lambda r: r.choice(NEAR), lambda r: several(r, text))


def options_case(folder: Folder) -> Case:
    """Return a case of the options by themselves, seldom of a model that is loaded with them."""

    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        names = random.sample(list(option_fields()), random.choice([1, 1, 1, 2, 3]))
        options = {name: value_of(random) for name in names}
        if random.random() < 0.1:
            family, layer = random.choice(["Llama", "ViT", "Wav2Vec2"]), value_of(random)
            return f"LayerEncoder({family}, {layer!r}, **{options!r})", lambda: LayerEncoder(
                folder(family), layer, **options
            )
        return f"EncoderOptions(**{options!r})", lambda: _check_options(options)

    return case


def _check_options(options: dict[str, Any]) -> None:
    result = make_options(options)
    repeated = EncoderOptions(**result.non_defaults())
    assert repeated == result


def functions_case(encoders: dict[str, LayerEncoder], tmp_path: Path) -> Case:
    """Return a case of a function with one or two of its arguments replaced."""

    def case(random: Random) -> tuple[str, Callable[[], Any]]:
        name = random.choice(list(ARGUMENTS))
        changed = random.sample(ARGUMENTS[name], random.choice([1, 1, 2]))
        inputs = {argument: value_of(random) for argument in changed}
        for place in {"out", "store"} & set(inputs):  # nothing is written outside
            inputs[place] = tmp_path / "there" if isinstance(inputs[place], str | Path) else inputs[place]
        return f"{name}(**{inputs!r})", lambda: _check_frame(_called(name, inputs, encoders, tmp_path))

    return case


def _called(name: str, inputs: dict[str, Any], encoders: dict[str, LayerEncoder], tmp_path: Path) -> pl.DataFrame:
    encoder = encoders["Llama"]
    if name == "measure":
        return measure(encoder, **{"texts": TEXTS, "metrics": ["curvature"], "layers": [1], **inputs})
    if name == "select":
        return select_layer(encoder, **{"texts": TEXTS, "rule": "fixed-depth", **inputs}).to_frame()
    if name == "probe":
        quick = {"inputs": TEXTS, "labels": LABELS, "layers": [1], "kind": "linear"}
        return probe(encoder, **{**quick, **inputs}).frame
    if name == "compare":
        quick = {"texts": TEXTS, "metrics": ["curvature"], "layers": [1], "resamples": 2}
        return compare(encoder, encoders["GPTNeoX"], **{**quick, **inputs}).frame
    # No task: what a sweep checks it checks before one is run.
    return sweep(encoder, **{"out": tmp_path / "out", **inputs}).frame


def _check_frame(frame: pl.DataFrame) -> None:
    values = frame.get_column("value") if "value" in frame.columns else frame.get_column("depth")
    assert not values.cast(pl.Float64).is_nan().any()


@seeds(150, 5, 1200)
def test_options(tiny_folder: Folder, first: int, count: int) -> None:
    check_cases(options_case(tiny_folder), "options", first, count)


@seeds(40, 5, 400)
def test_functions(encoders: dict[str, LayerEncoder], tmp_path: Path, first: int, count: int) -> None:
    check_cases(functions_case(encoders, tmp_path), "functions", first, count)
