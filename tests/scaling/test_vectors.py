"""Vectors that units embed are those of one process, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder, embed
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.extras.scaling import units
from midlayer_encoders.extras.vectors import embedding
from tests.scaling.jobs import Jobs

TEXTS = [f"{'a fine day ' * (n % 7)}{n}" for n in range(60)] + ["twice", "twice"]


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_units_write_the_file_of_one_process(
    suffix: str, tiny_folder: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "CHUNK", 25)
    monkeypatch.setattr(units, "_MAX_INPUTS", 9)
    arguments: dict[str, Any] = {"layers": [0, -1], "token_budget": 32, "device": "cpu"}
    one, many = tmp_path / f"one{suffix}", tmp_path / f"many{suffix}"
    embed(tiny_folder("Llama"), TEXTS, one, **arguments)
    jobs = Jobs(lost=[4])
    embed(tiny_folder("Llama"), TEXTS, many, executor=jobs, **arguments)
    assert many.read_bytes() == one.read_bytes()
    assert [unit.step for unit in jobs.calls[:3]] == ["plan"] * 3
    assert sum(unit.step == "embed" for unit in jobs.calls) >= 7
    assert sorted(path.name for path in tmp_path.iterdir() if "many" in path.name) == (
        [many.name, f"{many.name}.json"] if suffix == ".npy" else [many.name]
    )


def test_interrupted_units_continue(
    tiny_folder: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "_MAX_INPUTS", 9)
    arguments: dict[str, Any] = {"token_budget": 32, "device": "cpu"}
    out = tmp_path / "vectors.npy"
    with pytest.raises(MidlayerError, match="ended 3 times"):
        embed(tiny_folder("Llama"), TEXTS, out, executor=(first := Jobs(lost=range(3, 99))), **arguments)
    embed(tiny_folder("Llama"), TEXTS, out, executor=(second := Jobs()), **arguments)
    done = {unit for n, unit in enumerate(first.calls) if n < 3}
    assert not done & set(second.calls), "a block is embedded once"
    assert out.is_file()


def test_wrong_calls_are_refused(tiny_folder: Callable[[str], str], tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(OptionError, match="`model` must be a folder or hub name with an executor"):
        embed(encoder, TEXTS, tmp_path / "a.npy", executor=Jobs())
    with pytest.raises(MidlayerError, match=r"inputs from 0: .*`inputs\[1\]`"):
        embed(tiny_folder("Llama"), ["a", 3], tmp_path / "a.npy", executor=Jobs(), device="cpu")


def test_other_inputs_and_arguments_are_other_units(
    tiny_folder: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of an interrupted call are found by their names."""
    requests: list[set[str]] = []
    for texts, options in ((TEXTS, {}), (TEXTS[1:], {}), (TEXTS, {"layers": [1]}), (TEXTS, {"prompt": "a: "})):
        jobs = Jobs(lost=range(1, 99))
        with pytest.raises(MidlayerError, match="ended 3 times"):
            embed(tiny_folder("Llama"), texts, tmp_path / "a.npy", executor=jobs, device="cpu", **options)
        requests.append({unit.outcome.name for unit in jobs.calls if unit.step == "embed"})
    assert not any(one & other for one, other in combinations(requests, 2))


def test_class_of_the_page_adds_a_column_for_each_layer(tiny_folder: Callable[[str], str]) -> None:
    page = (Path(__file__).parents[2] / "docs/scale.md").read_text()
    code = page[page.index("class LayerEmbedder") : page.index("ray.data.read_parquet")]
    names: dict[str, Any] = {"LayerEncoder": LayerEncoder}
    exec(code, names)
    batch = names["LayerEmbedder"](tiny_folder("Llama"), [0, 2])({"text": np.array(TEXTS[:5])})
    assert list(batch) == ["text", "layer_0", "layer_2"]
    expected = LayerEncoder(tiny_folder("Llama"), -1).encode_layers(TEXTS[:5], [0, 2])
    np.testing.assert_array_equal([batch["layer_0"], batch["layer_2"]], expected)
