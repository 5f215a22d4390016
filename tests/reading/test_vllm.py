"""vLLM as a reader of layers, compared with our own reader; ``make test-vllm`` installs it."""

from __future__ import annotations

import json
import os
import signal
import string
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from safetensors import safe_open
from safetensors.numpy import load_file

from midlayer_encoders import LayerEncoder, embed, sweep
from midlayer_encoders.errors import MidlayerError
from midlayer_encoders.reading import vllm
from midlayer_encoders.reading.batches import batches_of
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.sweeping import SweepSettings
from tests.families import VOCAB
from tests.tiny_folders import TEXTS, tokenizer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(vllm.PYTHON_VARIABLE not in os.environ, reason=f"{vllm.PYTHON_VARIABLE} is not set"),
]

MAX_LENGTH = 2048
TOLERANCE = 2e-5  # of the length of a vector; means of 2,000 embeddings, which nearly cancel, differ by up to 8e-6
LENGTHS = (1, 2, 3, 15, 16, 17, 127, 128, 129, 511, 1000, 1999, 2000, MAX_LENGTH)
SIZES: Any = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "max_position_embeddings": MAX_LENGTH, "pad_token_id": 0, "bos_token_id": 3,
    "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, Callable[[], Any]] = {
    "Llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**SIZES)),
    "Qwen2": lambda: tf.Qwen2ForCausalLM(tf.Qwen2Config(**SIZES)),
    "Qwen3": lambda: tf.Qwen3Model(tf.Qwen3Config(**SIZES, head_dim=32)),  # without a head
}


def save_model(family: str, folder: Path) -> str:
    """Write a tiny model whose layers and norm differ much, and its tokenizer."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.ndim == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    characters = tokenizer()
    characters.model_max_length = MAX_LENGTH
    characters.save_pretrained(folder)
    return str(folder)


def text_of(length: int) -> str:
    """Return a text with as many tokens as characters."""
    letters = np.random.default_rng(length).choice(list(string.ascii_letters), length)
    return "".join(letters)


def differences(vectors: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Return the largest difference of a vector at each layer, relative to its length."""
    lengths = np.maximum(np.linalg.norm(expected, axis=-1), 1e-12)
    return (np.linalg.norm(vectors - expected, axis=-1) / lengths).max(axis=-1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> LayerEncoder:
    return LayerEncoder(save_model("Llama", tmp_path_factory.mktemp("llama")), -1)


@pytest.fixture(scope="module", params=FAMILIES)
def encoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LayerEncoder:
    if request.param == "Llama":
        return request.getfixturevalue("llama")  # type: ignore[no-any-return]
    return LayerEncoder(save_model(request.param, tmp_path_factory.mktemp(request.param)), -1)


@pytest.mark.parametrize("norm", ["final", "none"])
@pytest.mark.parametrize("pooling", ["mean", "last", "weightedmean", "max"])
def test_every_layer_equals_our_reader(encoder: LayerEncoder, norm: Any, pooling: Any) -> None:
    texts = [text_of(length) for length in LENGTHS]
    texts += [texts[-2], texts[3] + texts[-3]]  # a whole text and a prefix that vLLM has read
    own = layer_reader(encoder, norm=norm, pooling=pooling)
    reader = vllm.vllm_reader(own, encoder)
    batches = batches_of(encoder, texts, token_budget=8192)
    assert any(len(batch) > 1 for batch in batches)
    expected = own.vectors(texts, batches).numpy()
    difference = differences(reader.vectors(texts, batches).numpy(), expected)
    assert expected.shape == (5, len(texts), 64)
    assert difference.max() < TOLERANCE, difference


def test_texts_keep_their_order_and_an_empty_one_is_zero(llama: LayerEncoder) -> None:
    texts = ["", *TEXTS, ""]
    vectors = llama.encode_layers(texts, engine="vllm")
    assert differences(vectors, llama.encode_layers(texts)).max() < TOLERANCE
    assert not vectors[:, [0, -1]].any()
    np.testing.assert_array_equal(llama.encode_layers(texts, engine="vllm"), vectors)
    assert not llama.encode_layers("", engine="vllm").any()


@pytest.mark.parametrize("recipe", ["one-word", "word-echo"])
def test_recipes_pool_the_same_tokens(llama: LayerEncoder, recipe: str) -> None:
    asked = llama.with_recipe(recipe)
    texts = [*TEXTS, text_of(300)]
    assert differences(asked.encode_layers(texts, engine="vllm"), asked.encode_layers(texts)).max() < TOLERANCE


def test_embed_writes_the_vectors_of_our_embed_and_names_the_engine(llama: LayerEncoder, tmp_path: Path) -> None:
    texts = [*TEXTS, text_of(500)]
    contents, labels = [], []
    for engine in ("transformers", "vllm"):
        path = embed(llama, texts, tmp_path / f"{engine}.safetensors", engine=engine)  # type: ignore[arg-type]
        contents.append(load_file(path))
        with safe_open(path, framework="np") as file:
            labels.append(json.loads(file.metadata()["midlayer"]))
    assert contents[0].keys() == contents[1].keys()
    for name, expected in contents[0].items():
        assert differences(contents[1][name], expected) < TOLERANCE, name
    assert [label["engine"] for label in labels] == ["transformers", "vllm"]
    assert labels[0]["spec"] != labels[1]["spec"]


def test_sweep_has_its_own_store_and_our_scores(llama: LayerEncoder, tmp_path: Path) -> None:
    texts = [f"{'good' if n % 2 else 'bad'} film number {n * n}" for n in range(64)]
    task = {"train": [{"text": text, "label": n % 2} for n, text in enumerate(texts)]}
    rows = [row for part in task.values() for row in part]
    settings = SweepSettings(workers=1)
    frames = [
        sweep(
            llama,
            rows,
            engine=engine,
            baselines=False,
            out=tmp_path / engine,
            store=tmp_path / "store",
            settings=settings,
        )
        for engine in ("transformers", "vllm")
    ]
    assert len([path for path in (tmp_path / "store").iterdir() if path.is_dir()]) == 2
    scores = [result.frame.filter(kind="score").sort("layer")["value"].to_numpy() for result in frames]
    np.testing.assert_allclose(scores[1], scores[0], atol=0.02)
    assert len(scores[0]) == 5
    assert frames[1].notes.how["engine"] == "vllm"
    assert "engine" not in frames[0].notes.how


def test_killed_process_is_named_and_the_next_call_starts_another(llama: LayerEncoder) -> None:
    expected = llama.encode_layers(TEXTS, engine="vllm")
    process = vllm._processes[llama.transformer]._process
    timer = threading.Timer(0.5, os.kill, [process.pid, signal.SIGKILL])
    timer.start()
    start = time.perf_counter()
    with pytest.raises(MidlayerError, match=rf"vLLM failed: process {process.pid} ended with code -9"):
        llama.encode_layers([text_of(2000)] * 400, engine="vllm")  # takes much longer than it lives
    assert time.perf_counter() - start < 60
    np.testing.assert_array_equal(llama.encode_layers(TEXTS, engine="vllm"), expected)


def test_changed_weights_and_a_cut_model_are_read_anew(tmp_path: Path) -> None:
    encoder = LayerEncoder(save_model("Llama", tmp_path), 2, norm="none")
    before = encoder.encode_layers(TEXTS, [0, 2], engine="vllm")
    assert differences(before, encoder.encode_layers(TEXTS, [0, 2])).max() < TOLERANCE
    with torch.no_grad():
        next(encoder.transformer.parameters()).mul_(2)
    after = encoder.encode_layers(TEXTS, [0, 2], engine="vllm")
    assert differences(after, encoder.encode_layers(TEXTS, [0, 2])).max() < TOLERANCE
    assert differences(after, before).min() > 0.1


def test_vectors_that_differ_from_our_pass_are_refused(llama: LayerEncoder) -> None:
    llama.encode_layers(TEXTS, engine="vllm")
    process = vllm._processes[llama.transformer]
    process.verified = False
    # The norm of layer 3 undoes its scale.
    hook = llama.transformer.layers[2].register_forward_hook(lambda *arguments: arguments[-1] * 1.01)  # type: ignore[union-attr]
    try:
        with pytest.raises(MidlayerError, match=r"Layer 4 of LlamaModel in vLLM differs from transformers by 0\.0"):
            llama.encode_layers(TEXTS, engine="vllm")
    finally:
        hook.remove()
