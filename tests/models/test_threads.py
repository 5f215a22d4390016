"""Models loaded in several threads at once: each gets its own layer, and nothing of transformers or torch is changed."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.models.load import load_cut
from tests.families import inputs, tiny

_ROUNDS = 8


def states(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(name)).last_hidden_state


def settings(kind: Any) -> dict[str, Any]:
    """What a load could leave changed: of the class, of transformers, and of torch."""
    return {
        "class": {name: value for name, value in vars(kind).items() if "hooks" not in name},
        "unexpected": kind._keys_to_ignore_on_load_unexpected,
        "prefix": kind.base_model_prefix,
        "tie_weights": tf.PreTrainedModel.tie_weights,
        "linspace": torch.linspace,
        "dtype": torch.get_default_dtype(),
    }


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """A whole model, the same in double precision, and one whose files lack a block."""
    model: Any = tiny("GPTNeoX")
    model.save_pretrained(tmp_path / "whole")
    tiny("GPTNeoX").double().save_pretrained(tmp_path / "double")  # type: ignore[operator]
    lacking = {key: value for key, value in model.state_dict().items() if not key.startswith("layers.1.")}
    model.save_pretrained(tmp_path / "damaged", state_dict=lacking)
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_two_threads_load_different_layers_of_one_family(folders: dict[str, str]) -> None:
    kind = tf.GPTNeoXModel
    before = settings(kind)
    wanted = [(folder, layer) for folder in ("whole", "double") for layer in (1, 3)]
    expected = {(folder, layer): states(load_cut(folders[folder], layer)[0], "GPTNeoX") for folder, layer in wanted}
    with ThreadPoolExecutor(2) as threads:
        loads = {n: threads.submit(load_cut, folders[wanted[n % 4][0]], wanted[n % 4][1]) for n in range(4 * _ROUNDS)}
    for number, load in loads.items():
        model, cut = load.result()
        folder, layer = wanted[number % 4]
        assert type(model) is kind
        assert cut.layer == layer
        assert {parameter.dtype for parameter in model.parameters()} == {expected[folder, layer].dtype}
        torch.testing.assert_close(states(model, "GPTNeoX"), expected[folder, layer], rtol=0, atol=0)
    assert settings(kind) == before


def test_a_load_that_fails_beside_others_leaves_nothing_behind(folders: dict[str, str]) -> None:
    kind = tf.GPTNeoXModel
    before = settings(kind)
    expected = states(load_cut(folders["whole"], 3)[0], "GPTNeoX")
    with ThreadPoolExecutor(2) as threads:
        loads: list[tuple[str, Future[tuple[nn.Module, Any]]]] = [
            (name, threads.submit(load_cut, folders[name], 3, dtype=dtype))
            for _ in range(_ROUNDS)
            for name, dtype in (("damaged", torch.float64), ("whole", None))
        ]
    for name, load in loads:
        if name == "damaged":
            with pytest.raises(ModelNotFoundError, match=r"lack \d+: layers\.1\."):
                load.result()
        else:
            torch.testing.assert_close(states(load.result()[0], "GPTNeoX"), expected, rtol=0, atol=0)
    assert settings(kind) == before


def test_a_plain_load_of_transformers_beside_ours_sees_the_class_as_it_is(folders: dict[str, str]) -> None:
    """The class is never changed, not even for the time of a load, so others may read it without our lock."""
    kind = tf.GPTNeoXModel
    before = settings(kind)["unexpected"], settings(kind)["prefix"]
    seen = set()
    with ThreadPoolExecutor(1) as threads:
        loads = [threads.submit(load_cut, folders["whole"], 1) for _ in range(_ROUNDS)]
        while not all(load.done() for load in loads):
            seen.add((kind._keys_to_ignore_on_load_unexpected is before[0], kind.base_model_prefix == before[1]))
    assert seen == {(True, True)}
