"""transformers reads exported GGUF weights unchanged, and unsupported models are refused."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gguf_tokens import FIXTURE, sample_texts, write_vocabulary
from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError, DiskFullError
from midlayer_encoders.export import export_for
from midlayer_encoders.export._comparison import relative_error
from midlayer_encoders.models.gguf_tokenizer import build_tokenizer, read_fields
from tests.export.tiny_bpe import SPLITS, bpe_tokenizer, save_bpe
from tests.tiny_folders import TEXTS

reading = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")

Folder = Callable[[str], str]


@pytest.fixture(autouse=True)
def _not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave llama.cpp out where it is installed: tests/export/test_llama_cpp.py is about it."""
    monkeypatch.setitem(sys.modules, "xllamacpp", None)


@pytest.mark.parametrize(("int8", "most"), [(False, 3e-3), (True, 5e-2)])
def test_another_reader_finds_the_layer(
    tmp_path: Path, int8: bool, most: float, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(save_bpe(tmp_path / "model"), 2, device="cpu")
    result = export_for(encoder, "gguf", tmp_path / "out", int8=int8)
    assert (result.engine, result.error) == (None, None)
    assert "The file was not run: llama.cpp is not installed (pip install 'midlayer-encoders[gguf]')" in caplog.text
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = LayerEncoder(str(tmp_path / "out"), 2, gguf_file="model.gguf", device="cpu")
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
    written = read_fields(tmp_path / "out" / "model.gguf")
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


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: bpe_tokenizer("spaces"), "it splits texts by .*String"),
        (lambda: bpe_tokenizer(around="<s> <s> $A"), "adds more than one BOS"),
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
