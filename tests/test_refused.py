"""Arguments of the wrong type or without effect are refused before any forward pass."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder, measure, progression
from midlayer_encoders.errors import MidlayerError, OptionError
from tests.support.grouped import compare, sweep

TEXTS = [f"text number {number}" for number in range(12)]


@pytest.fixture(scope="module")
def encoder(tiny_folder: Callable[[str], str]) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": None}, "`metrics` must be 'all', 'paper', or some of .* but got None"),
        ({"metrics": "curvatur"}, "^`metrics` must be one of .* Did you mean 'curvature'"),
        ({"layers": 3}, "`layers` must be a list of layers, but got 3"),
        ({"layers": [True]}, r"`layer` must be in \[0, 4\] .* but got True"),
        ({"views": 0}, "`views` must be a whole number, 1 or more, but got 0"),
        (
            {"views": [["a"], ["b", "c", "d"]], "metrics": ["infonce"]},
            "`views` must be a number, or lists of 12 texts, one for each text, but got lists of 1, 3",
        ),
        ({"seed": 0.5}, "`seed` must be a whole number from 0"),
        ({"token_budget": float("nan")}, "`token_budget` must be a positive number of tokens, but got nan"),
        ({"dataset": 3}, "`dataset` must be a string, but got 3"),
        ({"progress": "bar"}, "`progress` must be a function"),
        ({"texts": "one text"}, "`texts` must be a list of texts, but got one: 'one text'"),
        ({"texts": ["a", None]}, r"`texts\[1\]` must be a string, but got None"),
        ({"texts": [None, "a"]}, "`inputs` must each be a text, but got None"),
        ({"texts": {"a": 1}}, "`texts` must be a list of texts, but got {'a': 1}"),
    ],
)
def test_measure(encoder: LayerEncoder, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MidlayerError, match=message):
        measure(encoder, **{"texts": TEXTS, "metrics": ["curvature"], **options})


def test_measure_accepts_numpy_arrays(encoder: LayerEncoder) -> None:
    expected = measure(encoder, TEXTS, metrics=["infonce"], layers=[0, 2], views=2, seed=3)
    actual = measure(
        encoder, np.array(TEXTS), metrics=("infonce",), layers=np.array([0, 2]), views=np.int64(2), seed=np.uint8(3)  # type: ignore[arg-type]
    )  # fmt: skip
    assert expected.equals(actual)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"views": 4}, "`views` has no effect without `metrics`, but got 4"),
        ({"metric_texts": 4}, "`metric_texts` has no effect without `metrics`"),
        ({"metrics": "curvatur"}, "^`metrics` must be one of"),
        ({"workers": 0}, "`workers` must be a positive number of processes, but got 0"),
        ({"store_dtype": "float8"}, "`store_dtype` must be one of 'float16', 'float32', but got 'float8'"),
        ({"baselines": "no"}, "`baselines` must be True or False, but got 'no'"),
        ({"out": 3}, "`out` must be a string, but got 3"),
        ({"tasks": [3]}, "`tasks` must be names, paths, data or mteb's task objects, but got 3"),
    ],
)
def test_sweep(encoder: LayerEncoder, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        sweep(encoder, **{"out": tmp_path, **options})


def test_sweep_accepts_metrics_none(encoder: LayerEncoder, tmp_path: Path) -> None:
    assert sweep(encoder, metrics=None, out=tmp_path).frame.is_empty()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"confidence": "high"}, "`confidence` must be a finite number, from 0.001 to 0.999, but got 'high'"),
        ({"resamples": 2.5}, "`resamples` must be a whole number, 2 or more"),
        ({"texts": [*TEXTS, 3]}, r"`texts\[12\]` must be a string, but got 3"),
        ({"metrics": {"curvature"}}, "`metrics` must be .* Write a list of names"),
    ],
)
def test_compare(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        compare("a", "b", **{"texts": TEXTS, "metrics": ["curvature"], **options})


def test_compare_and_progression_refuse_invalid_models() -> None:
    with pytest.raises(OptionError, match="`base` and `tuned` must be names, paths or LayerEncoders, but got 3"):
        compare("a", 3, texts=TEXTS)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="`model` must be a string, but got 3"):
        progression(3, ["step1", "step2"], texts=TEXTS)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"`revisions\[0\]` must be a string, but got 1"):
        progression("a", [1, 2], texts=TEXTS)  # type: ignore[list-item]
    with pytest.raises(OptionError, match="must name a training step"):
        progression("a", ["step1", "step" + "9" * 30], texts=TEXTS)
