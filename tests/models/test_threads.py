"""Models loaded in several threads at once: each gets its own layer, and transformers and torch stay unchanged."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from midlayer_encoders.errors import ModelNotFoundError
from tests.models.cuts import load_and_cut
from tests.support.families import inputs, tiny

_ROUNDS = 8


def run_model(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(name)).last_hidden_state


def global_settings(model_class: Any) -> dict[str, Any]:
    """Return the settings of the class, transformers and torch that a load could leave changed."""
    return {
        "class": {name: value for name, value in vars(model_class).items() if "hooks" not in name},
        "unexpected": model_class._keys_to_ignore_on_load_unexpected,
        "prefix": model_class.base_model_prefix,
        "tie_weights": tf.PreTrainedModel.tie_weights,
        "linspace": torch.linspace,
        "dtype": torch.get_default_dtype(),
    }


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    """Save a full model, the same in double precision, and one whose files lack a block."""
    model: Any = tiny("GPTNeoX")
    model.save_pretrained(tmp_path / "whole")
    tiny("GPTNeoX").double().save_pretrained(tmp_path / "double")  # type: ignore[operator]
    lacking = {key: value for key, value in model.state_dict().items() if not key.startswith("layers.1.")}
    model.save_pretrained(tmp_path / "damaged", state_dict=lacking)
    return {path.name: str(path) for path in tmp_path.iterdir()}


@pytest.mark.long
def test_two_threads_load_different_layers_of_one_family(folders: dict[str, str]) -> None:
    model_class = tf.GPTNeoXModel
    before = global_settings(model_class)
    requests = [(folder, layer) for folder in ("whole", "double") for layer in (1, 3)]
    expected = {
        (folder, layer): run_model(load_and_cut(folders[folder], layer)[0], "GPTNeoX") for folder, layer in requests
    }
    with ThreadPoolExecutor(2) as threads:
        loads = {
            n: threads.submit(load_and_cut, folders[requests[n % 4][0]], requests[n % 4][1]) for n in range(4 * _ROUNDS)
        }
    for number, load in loads.items():
        model, cut = load.result()
        folder, layer = requests[number % 4]
        assert type(model) is model_class
        assert cut.layer == layer
        assert {parameter.dtype for parameter in model.parameters()} == {expected[folder, layer].dtype}
        torch.testing.assert_close(run_model(model, "GPTNeoX"), expected[folder, layer], rtol=0, atol=0)
    assert global_settings(model_class) == before


@pytest.mark.long
def test_failed_load_in_another_thread_leaves_nothing_behind(folders: dict[str, str]) -> None:
    model_class = tf.GPTNeoXModel
    before = global_settings(model_class)
    expected = run_model(load_and_cut(folders["whole"], 3)[0], "GPTNeoX")
    with ThreadPoolExecutor(2) as threads:
        loads: list[tuple[str, Future[tuple[nn.Module, Any]]]] = [
            (name, threads.submit(load_and_cut, folders[name], 3, model_kwargs={"dtype": dtype}))
            for _ in range(_ROUNDS)
            for name, dtype in (("damaged", torch.float64), ("whole", None))
        ]
    for name, load in loads:
        if name == "damaged":
            with pytest.raises(ModelNotFoundError, match=r"lack \d+: layers\.1\."):
                load.result()
        else:
            torch.testing.assert_close(run_model(load.result()[0], "GPTNeoX"), expected, rtol=0, atol=0)
    assert global_settings(model_class) == before


def test_class_is_unchanged_while_a_model_loads(folders: dict[str, str]) -> None:
    """The class is never changed, not even during a load, so other code may read it without our lock."""
    model_class = tf.GPTNeoXModel
    before = global_settings(model_class)["unexpected"], global_settings(model_class)["prefix"]
    observations = set()
    with ThreadPoolExecutor(1) as threads:
        loads = [threads.submit(load_and_cut, folders["whole"], 1) for _ in range(_ROUNDS)]
        while not all(load.done() for load in loads):
            observations.add(
                (
                    model_class._keys_to_ignore_on_load_unexpected is before[0],
                    model_class.base_model_prefix == before[1],
                )
            )
            time.sleep(1e-4)  # otherwise the load waits for the interpreter's lock again and again
    assert observations == {(True, True)}
