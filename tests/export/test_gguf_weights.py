"""transformers reads exported GGUF weights unchanged, and unsupported models are refused."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import LlamaConfig

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.export._comparison import relative_error
from midlayer_encoders.extras.export.llama_cpp import _architecture
from midlayer_encoders.extras.gguf.file import read_gguf
from midlayer_encoders.extras.gguf.tokenizer import build_tokenizer
from tests.export.tiny_bpe import SPLITS, bpe_tokenizer, save_bpe
from tests.models.gguf_models import write_model
from tests.models.gguf_tokens import FIXTURE, sample_texts, write_vocabulary
from tests.models.test_gguf_models import FILES
from tests.support.tiny_folders import TEXTS

reading = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave llama.cpp out where it is installed: tests/export/test_llama_cpp.py is about it."""
    monkeypatch.setitem(sys.modules, "xllamacpp", None)


_LLAMA_3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "config", "options", "int8", "most"),
    [
        ("Llama", {}, {}, False, 3e-3),
        ("Llama", {}, {}, True, 5e-2),
        ("Llama", {"rope_parameters": _LLAMA_3 | {"original_max_position_embeddings": 32}}, {}, False, 3e-3),
        ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}, {}, False, 3e-3),
        ("Llama", {"attention_bias": True, "mlp_bias": True}, {}, False, 3e-3),
        ("Llama", {}, {"bidirectional": True}, False, 3e-3),
        ("Mistral", {}, {}, False, 3e-3),
        ("Qwen2", {}, {}, False, 3e-3),
        ("Qwen3", {"attention_bias": True}, {}, True, 5e-2),
    ],
)
def test_export_is_read_back_with_the_same_vectors(
    tmp_path: Path,
    name: str,
    config: dict[str, Any],
    options: dict[str, Any],
    int8: bool,
    most: float,
    caplog: pytest.LogCaptureFixture,
) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model", name, **config), 2, device="cpu", **options)
    result = export_for(encoder, "gguf", tmp_path / "out", int8=int8)
    assert (result.engine, result.error) == (None, None)
    assert "The file was not run: llama.cpp is not installed (pip install 'midlayer-encoders[gguf]')" in caplog.text
    loaded = LayerEncoder(str(tmp_path / "out" / "model.gguf"), 2, device="cpu")
    assert relative_error(encoder.encode(TEXTS), loaded.encode(TEXTS)) < most
    cut = export_for(loaded, "gguf", tmp_path / "again")
    kinds = [
        {
            item.name: (item.tensor_type, item.data.tobytes())
            for item in reading.GGUFReader(folder / "model.gguf").tensors
        }
        for folder in (result.folder, cut.folder)
    ]
    assert kinds[0] == kinds[1]
    expected = reading.GGMLQuantizationType.Q8_0 if int8 else reading.GGMLQuantizationType.F16
    assert kinds[0]["blk.1.attn_q.weight"][0] == kinds[0]["token_embd.weight"][0] == expected
    assert kinds[0]["blk.1.attn_norm.weight"][0] == reading.GGMLQuantizationType.F32


@pytest.mark.long
@pytest.mark.parametrize("name", ["rope_freqs", "linear", "not causal", "q, k, v biases"])
def test_encoder_of_a_file_is_saved_and_exported_again(name: str, tmp_path: Path) -> None:
    arch, fields, tensors, _ = FILES[f"llama, {name}"]
    loaded = LayerEncoder(str(write_model(tmp_path / "model.gguf", arch, fields, tensors)), 2, device="cpu")
    loaded.save_pretrained(str(tmp_path / "saved"))
    saved = LayerEncoder(str(tmp_path / "saved"), -1, device="cpu")
    np.testing.assert_allclose(saved.encode(TEXTS), loaded.encode(TEXTS), atol=1e-5)
    export_for(saved, "gguf", tmp_path / "out")
    again = LayerEncoder(str(tmp_path / "out" / "model.gguf"), -1, device="cpu")
    assert relative_error(loaded.encode(TEXTS), again.encode(TEXTS)) < 3e-3


@pytest.mark.parametrize(("int8", "pooling", "number"), [(False, "cls", 2), (True, "last", 3)])
def test_every_setting_of_the_model_is_written(tmp_path: Path, int8: bool, pooling: Any, number: int) -> None:
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    sizes = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}  # no multiple of Q8_0's 32
    options: Any = {"max_position_embeddings": 80, "rms_norm_eps": 0.0625, "rope_parameters": rope, **sizes}
    folder = save_bpe(tmp_path / "model", **options)
    encoder = LayerEncoder(folder, 2, device="cpu", pooling=pooling, bidirectional=True)
    export_for(encoder, "gguf", tmp_path / "out", int8=int8)
    reader = reading.GGUFReader(tmp_path / "out" / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert {name: value for name, value in fields.items() if name.startswith(("general.", "llama."))} == {
        "general.architecture": "llama",
        "general.name": encoder.name,
        "general.file_type": 7 if int8 else 1,  # mostly Q8_0, mostly F16
        "general.quantization_version": reading.GGML_QUANT_VERSION,
        "llama.block_count": 2,
        "llama.context_length": 80,
        "llama.embedding_length": 48,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 3,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 0.0625,
        "llama.attention.causal": False,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 5000.0,
        "llama.pooling_type": number,
        "llama.vocab_size": 304,
    }
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (kinds["blk.0.attn_q.weight"], kinds["blk.0.ffn_down.weight"]) == ("F16", "Q8_0" if int8 else "F16")
    card = json.loads((tmp_path / "out" / "midlayer.json").read_text())
    assert (card["file"], card["cosine"], list(card["versions"])) == ("model.gguf", None, ["gguf"])


def test_added_tokens_and_the_unknown_token_are_described(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens(["zzz"])
    tokenizer.unk_token = "</s>"
    folder = save_bpe(tmp_path / "model", tokenizer=tokenizer)
    export_for(LayerEncoder(folder, 1, device="cpu"), "gguf", tmp_path / "out")
    fields = read_gguf(tmp_path / "out" / "model.gguf").fields
    assert fields["tokenizer.ggml.tokens"][300] == "zzz"
    assert fields["tokenizer.ggml.token_type"][299:302] == [1, 4, 5]  # normal, user-defined, unused
    assert fields["tokenizer.ggml.unknown_token_id"] == 1


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("around", "starts", "ends"), [("$A", False, False), ("<s> $A </s>", True, True)])
def test_the_tokenizer_is_described(tmp_path: Path, split: str, around: str, starts: bool, ends: bool) -> None:
    tokenizer = bpe_tokenizer(split, around=around)
    export_for(
        LayerEncoder(save_bpe(tmp_path / "model", tokenizer=tokenizer), 1, device="cpu"), "gguf", tmp_path / "out"
    )
    fields = reading.GGUFReader(tmp_path / "out" / "model.gguf").fields
    output = {name.removeprefix("tokenizer.ggml."): field.contents() for name, field in fields.items()}
    assert (output["pre"], output["add_bos_token"], output["add_eos_token"]) == (split, starts, ends)
    assert (output["bos_token_id"], output["eos_token_id"], output["padding_token_id"]) == (0, 1, 1)
    assert output["tokens"] == [*tokenizer.convert_ids_to_tokens(range(300)), *(f"[PAD{n}]" for n in range(300, 304))]
    assert output["token_type"] == [3, 3, *[1] * 298, *[5] * 4]  # control, normal, unused


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_a_tokenizer_from_a_file_is_described_again(tmp_path: Path, pre: str) -> None:
    fields = json.loads(FIXTURE.read_text("utf8"))["vocabularies"]["gpt2"] | {"pre": pre, "add_bos_token": False}
    write_vocabulary(tmp_path / "model.gguf", fields)
    encoder = LayerEncoder(str(tmp_path), 1, gguf_file="model.gguf", device="cpu")
    encoder.save_pretrained(str(tmp_path / "saved"))
    export_for(LayerEncoder(str(tmp_path / "saved"), 1, device="cpu"), "gguf", tmp_path / "out")
    written = read_gguf(tmp_path / "out" / "model.gguf").fields
    assert written["tokenizer.ggml.pre"] == pre
    assert [build_tokenizer(written)(text)["input_ids"] for text in sample_texts(200)] == [
        encoder.tokenizer(text)["input_ids"] for text in sample_texts(200)
    ]


_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Llama", {"rope_parameters": _YARN}, "rotary embedding is 'yarn'"),
        ("Llama", {"hidden_act": "gelu"}, "activation is 'gelu'"),
        ("Mistral", {"sliding_window": 8}, "sliding window"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0, "sliding_window": 8}, "sliding window"),
        ("GPTNeoX", {}, "type 'gpt_neox'.*supported types are llama, mistral, qwen2, qwen3.*convert_hf_to_gguf"),
    ],
)
def test_a_model_that_llama_cpp_runs_differently_is_refused(
    tmp_path: Path, name: str, options: dict[str, Any], why: str
) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model", name, **options), 1, device="cpu")
    with pytest.raises(CutError, match=why):
        export_for(encoder, "gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def _sentencepiece() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    result = bpe_tokenizer().backend_tokenizer
    bytes_too = Tokenizer(models.BPE(vocab=result.get_vocab(), merges=[], byte_fallback=True))
    return PreTrainedTokenizerFast(tokenizer_object=bytes_too, eos_token="</s>", pad_token="</s>")


def _lowercase() -> Any:
    result = bpe_tokenizer()
    result.backend_tokenizer.normalizer = normalizers.Lowercase()
    return result


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: bpe_tokenizer("spaces"), "it splits texts by .*String"),
        (lambda: bpe_tokenizer(around="<s> <s> $A"), "adds more than one BOS"),
        (_lowercase, r"it normalizes texts \(Lowercase\)"),
        (_sentencepiece, "whose scores tokenizer.json does not hold"),
    ],
)
def test_a_tokenizer_that_llama_cpp_reads_differently_is_refused(
    tmp_path: Path, make: Callable[[], Any], why: str
) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model", tokenizer=make()), 1, device="cpu")
    with pytest.raises(CutError, match=f"tokenizer cannot be exported as GGUF: .*{why}.*convert_hf_to_gguf"):
        export_for(encoder, "gguf", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_partial_rotation_is_refused() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(CutError, match="its rotary embedding is 'default' over 50% of a head"):
        _architecture(LlamaConfig(rope_parameters=rope))


def test_weights_that_overflow_float16_are_named(tmp_path: Path) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model"), 1, device="cpu")
    with torch.no_grad():
        encoder.transformer.layers[0].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(CutError, match=r"blk\.0\.ffn_up\.weight overflows float16: pass int8=True"):
        export_for(encoder, "gguf", tmp_path / "out")
    export_for(encoder, "gguf", tmp_path / "out", int8=True)


def test_a_full_disk_leaves_nothing(small_disk: Path, tmp_path: Path) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model"), 4, device="cpu")
    (small_disk / "filler").write_bytes(bytes(2**20 - 100_000))
    with pytest.raises(DiskFullError, match="is full"):
        export_for(encoder, "gguf", small_disk / "out")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]
