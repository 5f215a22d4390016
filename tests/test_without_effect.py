"""Options of an encoder that some functions must ignore: equal frames with and without them."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import polars as pl
import pytest

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.comparing import IntervalSettings, compare
from midlayer_encoders.extras.probing import ProbeSettings, probe
from tests.support.tiny_folders import Folder, save_tiny

TEXTS = [
    f"{start} and then number {n} {end}" for n in range(6) for start, end in (("first", "fox"), ("a dog", "barks!"))
]
METRICS = ["uniformity", "raw_uniformity", "dataset_entropy", "anisotropy"]


def compare_with_another(encoder: LayerEncoder) -> pl.DataFrame:
    with TemporaryDirectory() as folder:
        other = LayerEncoder(save_tiny("Llama", Path(folder), seed=1), -1, **encoder.options.non_defaults())
    settings = IntervalSettings(resamples=2)
    frame = compare(encoder, other, texts=TEXTS, metrics=["dataset_entropy"], intervals=settings).frame
    return frame.drop("model")  # the second folder has another name each time


FUNCTIONS: dict[str, Callable[[LayerEncoder], pl.DataFrame]] = {
    "measure": lambda encoder: measure(encoder, TEXTS, metrics=METRICS, views=2),
    "compare": compare_with_another,
    "probe": lambda encoder: probe(encoder, TEXTS, [0, 1] * 6, kind="linear", settings=ProbeSettings(epochs=2)).frame,
}
WITHOUT_EFFECT: list[dict[str, Any]] = [{"normalize": True}, {"similarity_fn_name": "dot"}]


@pytest.mark.parametrize("options", WITHOUT_EFFECT, ids=lambda options: next(iter(options)))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_option_without_effect_has_none(function: str, options: dict[str, Any], tiny_folder: Folder) -> None:
    frames = [
        FUNCTIONS[function](LayerEncoder(tiny_folder("Llama"), -1, norm="none", device="cpu", **each))
        for each in ({}, options)
    ]
    assert frames[0].equals(frames[1])
    assert frames[0]["value"].n_unique() > 1
