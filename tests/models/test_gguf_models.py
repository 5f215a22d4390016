"""Vectors of GGUF files equal those of llama.cpp, whatever their fields and tensors are; other files are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel
from typer.testing import CliRunner

from midlayer_encoders import LayerEncoder
from midlayer_encoders.cli import app
from midlayer_encoders.errors import CutError, ModelNotFoundError, OptionError
from midlayer_encoders.extras.export._comparison import cosine
from midlayer_encoders.extras.export._engines import engine_vectors
from midlayer_encoders.extras.gguf.config import ARCHITECTURES, read_config
from midlayer_encoders.extras.gguf.file import read_gguf
from midlayer_encoders.extras.gguf.weights import read_weights
from tests.models.gguf_models import (
    BLOCKS,
    FIELDS,
    GROUPS,
    HEAD,
    HEADS,
    INNER,
    VOCAB,
    WIDTH,
    random_tensor,
    write_model,
)
from tests.support.tiny_folders import TEXTS

gguf = pytest.importorskip("gguf", reason="pip install 'midlayer-encoders[gguf]'")

ODD = [*TEXTS, "It's 1999 and 2026; I'LL  wait for 12345 of them — größer.", "x\n\n y  z"]
_LONG = [text for text in ODD if len(text) > 40]


def _scaling(kind: str, factor: float = 4.0, **fields: Any) -> dict[str, Any]:
    names = {f"rope.scaling.{name}": value for name, value in fields.items()}
    return {"rope.scaling.type": kind, "rope.scaling.factor": factor, **names}


def _biases(*names: str, size: int = WIDTH) -> dict[str, np.ndarray]:
    sizes = {"attn_k": GROUPS * HEAD, "attn_v": GROUPS * HEAD, "ffn_gate": INNER, "ffn_up": INNER}
    return {
        f"blk.{block}.{name}.bias": random_tensor(sizes.get(name, size), low=-0.5, high=0.5)
        for block in range(BLOCKS)
        for name in names
    }


_FREQS = {"rope_freqs.weight": random_tensor(HEAD // 2, low=1.0, high=8.0)}
_FACTORS = {
    f"rope_factors_{name}.weight": random_tensor(HEAD // 2, low=1.0, high=high)
    for name, high in (("short", 3.0), ("long", 20.0))
}
_PART = {name: values[: HEAD // 4] for name, values in _FACTORS.items()}
_YARN = _scaling("yarn", original_context_length=64)
_NO_CAUSAL = {"attention.causal": False}

#: An architecture, fields and tensors that are added, tensors that are left out.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, np.ndarray], tuple[str, ...]]] = {
    **{arch: (arch, {}, {}, ()) for arch in FIELDS},
    "llama, own output": ("llama", {}, {"output.weight": random_tensor(VOCAB, WIDTH)}, ()),
    "llama, default base": ("llama", {"rope.freq_base": None, "rope.dimension_count": None}, {}, ()),
    "llama, no groups": (
        "llama",
        {"attention.head_count_kv": None},
        {f"blk.{n}.attn_{name}.weight": random_tensor(WIDTH, WIDTH, low=-0.5) for n in range(BLOCKS) for name in "kv"},
        (),
    ),
    "llama, linear": ("llama", _scaling("linear"), {}, ()),
    "llama, linear by its old name": ("llama", {"rope.scale_linear": 2.0}, {}, ()),
    "llama, factor without type": ("llama", {"rope.scaling.factor": 8.0}, {}, ()),
    "llama, factor of type none": ("llama", _scaling("none"), {}, ()),
    "llama, factor of zero and its old name": ("llama", {"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, {}, ()),
    "llama, yarn": ("llama", _YARN, {}, ()),
    "llama, yarn of the context": ("llama", _scaling("yarn", 8.0, finetuned=True), {}, ()),
    "llama, yarn with attention": ("llama", _YARN | {"rope.scaling.attn_factor": 1.5}, {}, ()),
    "llama, attention factor": ("llama", {"rope.scaling.attn_factor": 0.8}, {}, ()),
    "llama, rope_freqs": ("llama", {}, _FREQS, ()),
    "llama, rope_freqs and linear": ("llama", _scaling("linear", 2.0), _FREQS, ()),
    "llama, longrope": ("llama", _scaling("longrope", 1.0, original_context_length=512), _FACTORS, ()),
    "llama, longrope, long factors alone": (
        "llama",
        _scaling("longrope", 1.0, original_context_length=512),
        {"rope_factors_long.weight": _FACTORS["rope_factors_long.weight"]},
        (),
    ),
    "llama, longrope with attention": (
        "llama",
        _scaling("longrope", 1.0, original_context_length=600, attn_factor=1.2),
        _FACTORS,
        (),
    ),
    "llama, long longrope": ("llama", _scaling("longrope", 1.0, original_context_length=4), _FACTORS, ()),
    "llama, longrope and factor": ("llama", _scaling("longrope", 2.0, original_context_length=512), _FACTORS, ()),
    "llama, q, k, v biases": ("llama", {}, _biases("attn_q", "attn_k", "attn_v"), ()),
    "llama, k bias": ("llama", {}, _biases("attn_k"), ()),
    "llama, all attention biases": ("llama", {}, _biases("attn_q", "attn_k", "attn_v", "attn_output"), ()),
    "llama, feed-forward biases": ("llama", {}, _biases("ffn_gate", "ffn_up", "ffn_down"), ()),
    "llama, not causal": ("llama", _NO_CAUSAL, {}, ()),
    "llama, epsilon": ("llama", {"attention.layer_norm_rms_epsilon": 0.3}, {}, ()),
    "llama, fields per block": ("llama", {"attention.head_count_kv": [GROUPS] * BLOCKS, "expert_count": 0}, {}, ()),
    "llama, last pooling": ("llama", {"pooling_type": 3}, {}, ()),
    "bert, first pooling": ("bert", {"pooling_type": 2}, {}, ()),
    "qwen2, yarn": ("qwen2", _YARN, {}, ()),
    "qwen2, all fields of yarn": (
        "qwen2",
        _YARN
        | {f"rope.scaling.yarn_{name}": 1.0 for name in ("beta_slow", "ext_factor", "attn_factor")}
        | {"rope.scaling.yarn_beta_fast": 32.0, "attention.sliding_window": 0},
        {},
        (),
    ),
    "qwen2, linear": ("qwen2", _scaling("linear"), {}, ()),
    "qwen2, not causal": ("qwen2", _NO_CAUSAL, {}, ()),
    "qwen3, own head size": ("qwen3", {"attention.key_length": None, "attention.value_length": None}, {}, ()),
    "qwen3, biases": ("qwen3", {}, _biases("attn_q", "attn_k", "attn_v"), ()),
    "qwen3, yarn": ("qwen3", _YARN, {}, ()),
    "gemma, linear": ("gemma", _scaling("linear"), {}, ()),
    "gemma2, default caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": 30.0}, {}, ()),
    "gemma2, window of 2": ("gemma2", {"attention.sliding_window": 2}, {}, ()),
    "gemma2, other period": ("gemma2", {"attention.sliding_window_pattern": 3}, {}, ()),
    "gemma2, window in all blocks": ("gemma2", {"attention.sliding_window_pattern": [1] * BLOCKS}, {}, ()),
    "gemma3, windows listed": ("gemma3", {"attention.sliding_window_pattern": [True, False] * 3 + [True]}, {}, ()),
    "gemma2, linear": ("gemma2", _scaling("linear"), {}, ()),
    "gemma2, yarn": ("gemma2", _YARN, {}, ()),
    "gemma2, depth of 27B": ("gemma2", {"block_count": 46, "attention.head_count_kv": GROUPS}, {}, ()),
    "gemma3, no window": ("gemma3", {"attention.sliding_window": None}, {}, ()),
    "gemma3, linear": ("gemma3", _scaling("linear", 8.0), {}, ()),
    "gemma3, yarn": ("gemma3", _YARN, {}, ()),
    "gemma3, own base of windows": (
        "gemma3",
        {"rope.freq_base_swa": 50.0, "attention.sliding_window_pattern": 2},
        {},
        (),
    ),
    "phi3, whole rotation": ("phi3", {"rope.dimension_count": HEAD}, {}, ()),
    "phi3, window": ("phi3", {"attention.sliding_window": 4}, {}, ()),
    "phi3, longrope": (
        "phi3",
        {"rope.scaling.original_context_length": 512, "rope.scaling.attn_factor": 1.19},
        _PART,
        (),
    ),
    "phi3, long longrope": ("phi3", {"rope.scaling.original_context_length": 4}, _PART, ()),
    "falcon, grouped": (
        "falcon",
        {"attention.head_count_kv": GROUPS},
        {
            f"blk.{n}.attn_qkv.weight": random_tensor((HEADS + 2 * GROUPS) * HEAD, WIDTH, low=-0.5)
            for n in range(BLOCKS)
        },
        (),
    ),
    "stablelm, biases": ("stablelm", {}, _biases("attn_q", "attn_k", "attn_v"), ()),
    "stablelm, parallel": ("stablelm", {}, {}, ("ffn_norm.weight", "ffn_norm.bias")),
    "stablelm, whole rotation": ("stablelm", {"rope.dimension_count": HEAD}, {}, ()),
    "starcoder2, linear": ("starcoder2", _scaling("linear"), {}, ()),
    "nemotron, yarn": ("nemotron", _YARN, {}, ()),
    "gpt2, not causal": ("gpt2", _NO_CAUSAL, {}, ()),
    "falcon, not causal": ("falcon", _NO_CAUSAL, {}, ()),
    "phi3, not causal": ("phi3", _NO_CAUSAL, {}, ()),
    "starcoder2, not causal": ("starcoder2", _NO_CAUSAL, {}, ()),
    "gemma, not causal": ("gemma", _NO_CAUSAL, {}, ()),
    "t5encoder, relu": ("t5encoder", {}, {}, ("ffn_gate.weight",)),
}


@pytest.mark.extras
@pytest.mark.parametrize("name", FILES)
def test_vectors_of_a_file_equal_those_of_llama_cpp(name: str, tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp", reason="pip install 'midlayer-encoders[gguf]'")
    arch, fields, tensors, without = FILES[name]
    path = write_model(tmp_path / "model.gguf", arch, fields, tensors, without=without)
    encoder = LayerEncoder(str(tmp_path), -1, gguf_file="model.gguf", device="cpu")
    texts = _LONG if "long longrope" in name else ODD  # transformers chooses the factors by the length of the text
    assert cosine(encoder.encode(texts), np.array(engine_vectors("llama", path, texts))) > 0.9999


@pytest.mark.long
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "falcon", "gpt2", "bloom"])
def test_weights_of_a_file_equal_those_of_transformers(arch: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", arch, {"context_length": 1024})
    encoder = LayerEncoder(str(tmp_path), -1, gguf_file="model.gguf", device="cpu")
    config = encoder.transformer.config
    expected = AutoModel.from_pretrained(tmp_path, gguf_file="model.gguf", config=config, dtype=torch.float32)
    torch.testing.assert_close(encoder.transformer.state_dict(), expected.state_dict(), rtol=0, atol=0)


_CHANGES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", _scaling("linear"), {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}),
    ("llama", _scaling("none"), {"rope_type": "default", "rope_theta": 500.0}),
    (
        "llama",
        _scaling("yarn", 1.0, original_context_length=64, attn_factor=2.0),
        {"rope_type": "yarn", "rope_theta": 500.0, "factor": 1.0, "attention_factor": 2.0}
        | {"original_max_position_embeddings": 64},
    ),
    ("stablelm", {}, {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}),
    ("llama", {"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, {"rope_type": "default", "rope_theta": 500.0}),
]


@pytest.mark.parametrize(("arch", "fields", "expected"), _CHANGES)
def test_read_config_of_scaling_fields_returns_rope_parameters(
    arch: str, fields: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    config = read_config(read_gguf(write_model(tmp_path / "model.gguf", arch, fields)))
    assert config.rope_parameters == expected


def test_read_config_of_rope_freqs_holds_the_divisors(tmp_path: Path) -> None:
    config = read_config(read_gguf(write_model(tmp_path / "model.gguf", "llama", {}, _FREQS)))
    divisors = _FREQS["rope_freqs.weight"].tolist()
    assert config.rope_parameters["short_factor"] == config.rope_parameters["long_factor"] == divisors
    assert config.rope_parameters["attention_factor"] == 1


def test_read_config_of_long_factors_alone_keeps_short_ones_at_one(tmp_path: Path) -> None:
    long = {"rope_factors_long.weight": _FACTORS["rope_factors_long.weight"]}
    path = write_model(tmp_path / "model.gguf", "llama", _scaling("longrope", 1.0, original_context_length=512), long)
    rope_parameters = read_config(read_gguf(path)).rope_parameters
    assert rope_parameters["short_factor"] == [1.0] * (HEAD // 2)
    assert rope_parameters["long_factor"] == long["rope_factors_long.weight"].tolist()


@pytest.mark.parametrize("pattern", [[1, 1, 1, 1], [True, True, True, True], [True, False, False, True]])
def test_read_config_of_listed_windows_follows_the_list(pattern: list[Any], tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "gemma2", {"attention.sliding_window_pattern": pattern})
    expected = ["sliding_attention" if flag else "full_attention" for flag in pattern]
    assert read_config(read_gguf(path)).layer_types == expected


@pytest.mark.parametrize("arch", FIELDS)
def test_tables_name_attributes_that_configs_have(arch: str, tmp_path: Path) -> None:
    table = ARCHITECTURES[arch]
    config = read_config(read_gguf(write_model(tmp_path / "model.gguf", arch)))
    assert config.model_type == table["type"]
    for attribute in [*filter(None, table.get("fields", {}).values()), *table.get("by_tensors", ())]:
        assert hasattr(type(config)(), attribute), attribute


@pytest.mark.parametrize(
    ("arch", "fields", "why"),
    [
        ("llama", {"attention.scale": 0.5}, "`llama.attention.scale` = 0.5, which transformers' LlamaConfig cannot"),
        ("llama", {"expert_count": 4}, "`llama.expert_count` = 4"),
        ("llama", {"residual_scale": 2.0}, "`llama.residual_scale` = 2.0"),
        ("llama", {"attention.sliding_window": 8}, "`llama.attention.sliding_window` = 8"),
        ("llama", {"attention.value_length": 8}, "`llama.attention.value_length` = 8"),
        ("llama", {"attention.head_count_kv": [1, 2, 2, 2]}, "has another `llama.attention.head_count_kv` for each"),
        ("llama", {"rope.dimension_count": 8}, "rotates 8 of 16 dimensions"),
        ("llama", _scaling("dynamic"), "scales its rotary embedding by 'dynamic'"),
        ("llama", _scaling("yarn", yarn_beta_fast=8.0), "`llama.rope.scaling.yarn_beta_fast` = 8.0"),
        ("llama", {"invented": 1}, "`llama.invented` = 1"),
        ("llama", {"block_count": None}, "lacks the field `llama.block_count`"),
        ("llama", {"block_count": 2**31}, "`llama.block_count` = 2147483648"),
        ("phi3", {"rope.dimension_count": 32}, "rotates 32 of 16 dimensions"),
        ("gemma3", {"rope.scaling.attn_factor": 2.0}, "scales the attention of blocks with a window, too"),
        ("qwen2", {"attention.key_length": 32}, "`qwen2.attention.key_length` = 32"),
        ("gemma2", {"rope.freq_base_swa": 77.0}, "`gemma2.rope.freq_base_swa` = 77.0"),
        ("gemma3", {"attention.sliding_window_pattern": [1, 0, 1]}, "has 3 entries in `attention.sliding_window_p"),
        ("gemma2", {"attention.sliding_window": 0}, "`attention.sliding_window` = 0"),
        ("gemma2", _scaling("none"), "`rope.scaling.factor` = 4.0 of the type 'none'"),
        ("llama", {"attention.causal": "false"}, "`llama.attention.causal` = 'false', but llama.cpp reads .* 'flag'"),
        ("llama", {"attention.causal": 0}, "`llama.attention.causal` = 0, but"),
        ("llama", {"rope.freq_base": [500.0, 600.0]}, r"`llama.rope.freq_base` = \[500.0, 600.0\], but"),
        ("llama", {"rope.scaling.factor": "4"}, "`llama.rope.scaling.factor` = '4', but"),
        ("llama", {"attention.head_count_kv": 0}, "`llama.attention.head_count_kv` = 0"),
        ("llama", {"pooling_type": 5}, "`llama.pooling_type` = 5"),
        ("llama", _scaling("yarn", original_context_length=0), "`rope.scaling.original_context_length` = 0"),
        ("llama", _scaling("yarn", original_context_length=1), "a context of 1 before scaling by yarn"),
        ("llama", _scaling("yarn", original_context_length=2**31 - 1), "a context of 2147483647 before scaling"),
        ("phi3", {"rope.dimension_count": 3}, "rotates 3 of 16 dimensions"),
        ("gemma3", {"attention.causal": False}, "`gemma3.attention.causal` = False"),
        ("bloom", {"attention.causal": False}, "`bloom.attention.causal` = False"),
        ("bert", {"attention.causal": None}, "`bert.attention.causal` = True"),
        ("phi3", _scaling("linear"), "cannot be expressed by transformers' Phi3Config"),
        ("phi3", _scaling("yarn"), "cannot be expressed by transformers' Phi3Config"),
        ("mamba", {"ssm.dt_b_c_rms": True}, "`mamba.ssm.dt_b_c_rms` = True"),
    ],
)
def test_file_with_a_field_that_is_not_read_is_refused_by_name(
    arch: str, fields: dict[str, Any], why: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", arch, fields)
    with pytest.raises(CutError, match=why) as error:
        LayerEncoder(str(path), 1, device="cpu")
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("arch", "added", "without", "why"),
    [
        ("llama", ["blk.0.attn_sinks.weight"], (), "LlamaModel has no place for: blk.0.attn_sinks.weight"),
        (
            "llama",
            ["blk.0.ffn_gate_inp.weight", "cls.weight"],
            (),
            "no place for: blk.0.ffn_gate_inp.weight, cls.weight",
        ),
        ("qwen2", ["rope_freqs.weight"], (), "no place for: rope_freqs.weight"),
        ("llama", ["rope_factors_long.weight"], (), "no place for: rope_factors_long.weight"),
        ("llama", [], ("blk.3.ffn_up.weight",), "lacks tensors of its architecture: blk.3.ffn_up.weight"),
        ("qwen2", [], ("attn_k.bias",), "lacks tensors of its architecture: blk.0.attn_k.bias, blk.1.attn_k.bias"),
        ("gpt2", [], ("output_norm.bias",), "lacks tensors of its architecture: output_norm.bias"),
        ("llama", [], ("token_embd.weight",), "lacks the tensor `token_embd.weight`"),
    ],
)
def test_file_with_unread_or_absent_tensors_is_refused_by_name(
    arch: str, added: list[str], without: tuple[str, ...], why: str, tmp_path: Path
) -> None:
    tensors = {name: random_tensor(HEAD // 2) for name in added}
    path = write_model(tmp_path / "model.gguf", arch, {}, tensors, without=without)
    with pytest.raises(CutError, match=why):
        LayerEncoder(str(path), 1, device="cpu")


@pytest.mark.parametrize(
    ("arch", "name", "values", "why"),
    [
        ("llama", "blk.0.ffn_up.weight", random_tensor(WIDTH, INNER), r"of shape \(64, 96\), but .* give \(96, 64\)"),
        ("llama", "blk.0.attn_q.bias", random_tensor(1), r"of shape \(1,\) that cannot be read"),
        ("llama", "output_norm.weight", random_tensor(WIDTH).astype(np.float64), "for F64 is not yet implemented"),
        ("llama", "rope_freqs.weight", random_tensor(1, low=1.0), r"of shape \(1,\), but rotates 16 dimensions"),
        ("llama", "rope_freqs.weight", np.ones(HEAD // 2, np.int32), "is not in float32"),
    ],
)
def test_file_with_an_unreadable_tensor_is_refused_by_name(
    arch: str, name: str, values: np.ndarray, why: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model.gguf", arch, {}, {name: values})
    with pytest.raises(CutError, match=f"has a tensor {name} {why}|has a tensor {name} .* {why}"):
        LayerEncoder(str(path), 1, device="cpu")


@pytest.mark.parametrize(("name", "value"), [("bos_token_id", "x"), ("merges", [1, 2]), ("add_bos_token", 1)])
def test_file_with_a_tokenizer_field_of_another_type_is_refused(name: str, value: Any, tmp_path: Path) -> None:
    file = read_gguf(write_model(tmp_path / "model.gguf"))
    file.fields[f"tokenizer.ggml.{name}"] = value
    with pytest.raises(CutError, match=rf"`tokenizer\.ggml\.{name}` = .*, but llama.cpp reads"):
        read_config(file)


def test_file_with_more_tokens_than_embeddings_is_refused(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", {}, {"token_embd.weight": random_tensor(VOCAB - 1, WIDTH)})
    with pytest.raises(CutError, match="has 304 tokens, but embeddings of 303"):
        LayerEncoder(str(path), 1, device="cpu")


def test_file_that_is_one_of_several_parts_is_refused(tmp_path: Path) -> None:
    file = read_gguf(write_model(tmp_path / "model.gguf"))
    file.fields["split.count"] = 2  # the other part may hold biases that are optional
    with pytest.raises(CutError, match=r"is one of 2 parts\. Merge them with llama-gguf-split --merge"):
        read_weights(file, AutoModel.from_config(read_config(file)), 1)


@pytest.mark.parametrize(("number", "expected"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_of_a_file_is_the_default(number: int | None, expected: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", "llama", {"pooling_type": number})
    assert LayerEncoder(str(path), 1, device="cpu").pooling == expected
    assert LayerEncoder(str(path), 1, device="cpu", pooling="max").pooling == "max"


@pytest.mark.long
def test_path_of_a_file_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    expected = LayerEncoder(str(tmp_path), 2, gguf_file="tiny.gguf", device="cpu")
    monkeypatch.chdir(tmp_path)
    for model in (str(path), "tiny.gguf", "./tiny.gguf"):
        encoder = LayerEncoder(model, 2, device="cpu")
        np.testing.assert_array_equal(encoder.encode(TEXTS), expected.encode(TEXTS))
        assert encoder.spec == expected.spec
    with pytest.raises(ModelNotFoundError, match=r"There is no file 'other\.gguf'\. GGUF files there: tiny\.gguf"):
        LayerEncoder("./other.gguf", 2)
    with pytest.raises(
        OptionError, match=r"`gguf_file` must be None for 'tiny\.gguf', which has its own, but got 'other\.gguf'"
    ):
        LayerEncoder("tiny.gguf", 2, gguf_file="other.gguf")
    with pytest.raises(ModelNotFoundError, match=r"but '\.' does not: .* Pass 'tiny\.gguf'\.$"):
        LayerEncoder(".", 2)


@pytest.mark.long
def test_folder_with_the_suffix_of_a_file_is_a_folder(tmp_path: Path) -> None:
    encoder = LayerEncoder(str(write_model(tmp_path / "tiny.gguf")), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "folder.gguf"))
    loaded = LayerEncoder(str(tmp_path / "folder.gguf"), -1, device="cpu")
    np.testing.assert_array_equal(loaded.encode(TEXTS), encoder.encode(TEXTS))


def test_digest_of_an_encoder_depends_on_fields_not_on_other_files(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf")
    digest = LayerEncoder(str(path), 2, device="cpu").spec.digest
    (tmp_path / "other.zip").write_text("unrelated")
    assert LayerEncoder(str(path), 2, device="cpu").spec.digest == digest
    write_model(path, fields=_scaling("linear"))
    assert LayerEncoder(str(path), 2, device="cpu").spec.digest != digest
    write_model(path, added=_FREQS)
    with_freqs = LayerEncoder(str(path), 2, device="cpu").spec.digest
    write_model(path, added={"rope_freqs.weight": _FREQS["rope_freqs.weight"] * 2})
    assert len({digest, with_freqs, LayerEncoder(str(path), 2, device="cpu").spec.digest}) == 3


@pytest.mark.long
def test_command_line_takes_the_path_of_a_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "tiny.gguf")
    result = CliRunner().invoke(app, ["export", str(path), "--layer", "2", "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    expected = LayerEncoder(str(path), 2, device="cpu").encode(TEXTS)
    np.testing.assert_allclose(LayerEncoder(str(tmp_path / "out"), -1, device="cpu").encode(TEXTS), expected, atol=1e-5)
