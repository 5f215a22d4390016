"""GGUF files in llama.cpp."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export import _engines, export_for
from midlayer_encoders.extras.export._comparison import cosine
from midlayer_encoders.extras.export._engines import engine_vectors
from midlayer_encoders.extras.export.llama_cpp import cut_gguf
from tests.export.tiny_bpe import bpe_tokenizer, save_bpe
from tests.export.tiny_gguf import save_gguf, write_whole
from tests.support.tiny_folders import TEXTS

pytestmark = pytest.mark.extras
pytest.importorskip("xllamacpp", reason="pip install 'midlayer-encoders[gguf]'")

ODD = [*TEXTS, "It's 1999 and 2026; I'LL  wait for 12345 of them — größer.", "x\n\n y  z"]
_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def near(encoders: dict[int, LayerEncoder], path: Path, texts: list[str]) -> dict[int, float]:
    vectors = np.array(engine_vectors("llama", path, texts))
    return {layer: cosine(encoder.encode(texts), vectors) for layer, encoder in encoders.items()}


@pytest.mark.parametrize(
    ("name", "config", "tokenizer", "options"),
    [
        ("Llama", {}, ("gpt-2", "$A"), {}),
        (
            "Llama",
            {"rope_parameters": _LLAMA_3 | {"original_max_position_embeddings": 32}},
            ("llama-bpe", "<s> $A"),
            {},
        ),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, ("gpt-2", "$A"), {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, ("smollm", "<s> $A </s>"), {"pooling": "last"}),
        ("Llama", {}, ("gpt-2", "$A"), {"bidirectional": True}),
        ("Mistral", {}, ("llama-bpe", "<s> $A"), {"pooling": "cls"}),
        ("Qwen2", {}, ("qwen2", "$A </s>"), {"pooling": "last"}),
        ("Qwen3", {}, ("qwen2", "$A"), {}),
    ],
)
def test_llama_cpp_reads_the_layer_of_written_weights(
    tmp_path: Path, name: str, config: dict[str, Any], tokenizer: tuple[str, str], options: dict[str, Any]
) -> None:
    split, around = tokenizer
    home = save_bpe(tmp_path / "model", name, bpe_tokenizer(split, around=around), **config)
    encoders = {layer: LayerEncoder(home, layer, device="cpu", **options) for layer in (1, 2, 3)}
    exported = export_for(encoders[2], "gguf", tmp_path / "out")
    assert exported.error is not None
    assert exported.error < 1e-5
    result = near(encoders, tmp_path / "out" / "model.gguf", ODD)
    assert result[2] > 0.9999
    assert max(result[1], result[3]) < 0.9
    export_for(encoders[3], "gguf", tmp_path / "deeper")
    cut_gguf(tmp_path / "deeper" / "model.gguf", tmp_path / "cut.gguf", 2, pooling=options.get("pooling", "mean"))
    assert near(encoders, tmp_path / "cut.gguf", ODD)[2] > 0.9999


@pytest.mark.parametrize(
    ("name", "arch", "config"),
    [
        ("Gemma", "gemma", {}),
        ("Gemma2", "gemma2", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
        ("Gemma3Text", "gemma3", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
        ("Bert", "bert", {}),
    ],
)
def test_llama_cpp_reads_the_layer_of_a_cut_file(tmp_path: Path, name: str, arch: str, config: dict[str, Any]) -> None:
    home = save_bpe(tmp_path / "model", name, **config)
    encoders = {layer: LayerEncoder(home, layer, device="cpu") for layer in (1, 2, 3)}
    cut_gguf(write_whole(home, tmp_path / "whole.gguf", arch), tmp_path / "cut.gguf", 2, pooling="mean")
    result = near(encoders, tmp_path / "cut.gguf", ODD)
    assert result[2] > 0.999
    assert max(result[1], result[3]) < 0.95


def test_eight_bits_are_near(tmp_path: Path) -> None:
    encoders = {layer: LayerEncoder(save_bpe(tmp_path / "model"), layer, device="cpu") for layer in (1, 2, 3)}
    exported = export_for(encoders[2], "gguf", tmp_path / "out", int8=True)
    assert exported.error is not None
    assert 1e-6 < exported.error < 5e-3
    result = near(encoders, tmp_path / "out" / "model.gguf", ODD)
    assert result[2] > 0.99 > 0.9 > max(result[1], result[3])


def test_texts_that_the_encoder_truncates_are_not_compared(tmp_path: Path) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model"), 2, device="cpu", max_length=24)  # llama.cpp truncates none
    result = export_for(encoder, "gguf", tmp_path / "out")
    assert result.error is not None
    assert result.error < 1e-5


def test_adapters_and_what_was_trained_are_in_the_file(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModel

    home = save_bpe(tmp_path / "model")
    lora = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModel.from_pretrained(home), lora).save_pretrained(tmp_path / "adapter")
    encoder = LayerEncoder(home, 2, device="cpu", adapters=[str(tmp_path / "adapter")])
    with torch.no_grad():
        encoder.transformer.layers[1].mlp.up_proj.weight *= 2
    encoders = {2: encoder, 0: LayerEncoder(home, 2, device="cpu")}
    export_for(encoder, "gguf", tmp_path / "out")
    result = near(encoders, tmp_path / "out" / "model.gguf", ODD)
    assert result[2] > 0.9999 > 0.99 > result[0]


def test_smollm_cut_and_written(tmp_path: Path) -> None:
    """The built-in model's file, cut, and its weights: reading it takes transformers half a minute, so once."""
    deeper = LayerEncoder("built-in", 13, device="cpu")
    export_for(deeper, "gguf", tmp_path / "out")
    deeper.transformer.save_pretrained(tmp_path / "model")
    deeper.tokenizer.save_pretrained(tmp_path / "model")
    encoders = {layer: LayerEncoder(str(tmp_path / "model"), layer, device="cpu") for layer in (11, 12)} | {13: deeper}
    cut_gguf(tmp_path / "out" / "model.gguf", tmp_path / "cut.gguf", 12, pooling="mean")
    export_for(encoders[12], "gguf", tmp_path / "written")
    for path in (tmp_path / "cut.gguf", tmp_path / "written" / "model.gguf"):
        result = near(encoders, path, ODD)
        assert result[12] > 0.999
        assert max(result[11], result[13]) < 0.99


def test_a_file_with_a_block_too_few_is_not_written(tmp_path: Path) -> None:
    export_for(LayerEncoder(save_bpe(tmp_path / "model"), 3, device="cpu"), "gguf", tmp_path / "whole")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about its own reader
        encoder = LayerEncoder(str(tmp_path / "whole"), 3, gguf_file="model.gguf", device="cpu")
    vars(encoder)["layer"] = 2
    with pytest.raises(CutError, match=r"llama\.cpp computes other vectors"):
        export_for(encoder, "gguf", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "whole"]


def test_queries_in_the_wrong_order_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("midlayer_encoders.extras.export.llama_cpp._interleave_halves", lambda values, heads: values)
    encoder = LayerEncoder(save_bpe(tmp_path / "model"), 2, device="cpu")
    with pytest.raises(CutError, match=r"llama\.cpp computes other vectors"):
        export_for(encoder, "gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_file_that_llama_cpp_cannot_read_and_a_timeout_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_gguf(tmp_path / "odd.gguf", "llama")
    with pytest.raises(RuntimeError):
        engine_vectors("llama", path, ["a"])
    monkeypatch.setattr(_engines, "_SECONDS", 0.01)
    with pytest.raises(RuntimeError, match="did not embed 1 short texts within"):
        engine_vectors("llama", path, ["a"])
