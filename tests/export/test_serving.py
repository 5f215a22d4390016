"""Folders for vLLM. ``tests/export/test_vllm.py`` runs vLLM."""

import json
import shlex
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer
from transformers import AutoConfig, LlamaConfig, LlamaModel

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError
from midlayer_encoders.extras.export import export_for, serving_line
from midlayer_encoders.extras.export._engines import engine_vectors
from tests.cli.calls import run
from tests.support.tiny_folders import TEXTS, Folder
from tests.support.tiny_folders import tokenizer as tiny_tokenizer

LIKE = tuple(f"text number {n} of {n * n}" for n in range(16))
CENTERED: Any = {"recipe": "one-word", "center": LIKE, "normalize": True}


def change(path: Path, **settings: Any) -> None:
    """Change settings of a JSON file; ``...`` drops one."""
    saved = json.loads(path.read_text()) | settings
    path.write_text(json.dumps({name: value for name, value in saved.items() if value is not ...}))


def _template_tokens(encoder: LayerEncoder) -> int:
    """Return the number of tokens around a text; ``max_length`` counts only the text's own."""
    return len(encoder.tokenizer("word")["input_ids"]) - len(
        encoder.tokenizer("word", add_special_tokens=False)["input_ids"]
    )


def test_a_folder_for_a_server_is_still_a_plain_one(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", max_length=20, **CENTERED)
    encoder.options = replace(encoder.options, revision="step8")
    result = export_for(encoder, "vllm", tmp_path / "out")
    assert (result.engine, result.error) == (None, None)  # neither is installed here
    np.testing.assert_array_equal(SentenceTransformer(str(result.folder)).encode(TEXTS), encoder.encode(TEXTS))
    card = json.loads((result.folder / "midlayer.json").read_text())
    assert card == {
        "target": "vllm",
        "model": encoder.spec.model,
        "revision": "step8",
        "layer": 2,
        "num_layers": 4,
        "norm": "final",
        "pooling": "last",
        "weights": encoder.spec.weights_digest,
        "max_length": 20 + _template_tokens(encoder),
        "prompt": "",
        "prompts": {},
        "error": None,
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "serve": "vllm serve . --runner pooling --dtype float32",
    }


def test_chat_templates_and_pooling_without_the_prompt_are_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    modules = [Transformer(tiny_folder("BERT")), Pooling(32, "mean", include_prompt=False)]
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "model"), create_model_card=False)
    prompted = LayerEncoder(str(tmp_path / "model"), 2, device="cpu", prompts={"ask": "hm: "})
    with pytest.raises(CutError, match=r"it pools the tokens of a prompt: pass prompts=\{\}, or pool them"):
        export_for(prompted, "vllm", tmp_path / "out")
    encoder = LayerEncoder(str(tmp_path / "model"), 2, device="cpu")
    encoder.options = replace(encoder.options, chat_template=True)
    with pytest.raises(CutError, match="it applies no chat template before embedding: leave out `chat_template`"):
        export_for(encoder, "vllm", tmp_path / "out")
    encoder.options = replace(encoder.options, chat_template=False)
    export_for(encoder, "vllm", tmp_path / "out")


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ValueError: no such' >&2; echo bye >&2; exit 1", "ValueError: no such"),
        ("echo '[[1.0]]'; echo one >&2; echo last >&2; exit 1", "last"),
        ("echo done", "no output"),
    ],
)
def test_message_of_an_engine_that_fails_is_its_error(tmp_path: Path, script: str, message: str) -> None:
    engine = tmp_path / "python"
    engine.write_text(f"#!/bin/sh\ncat > /dev/null\n{script}\n")
    engine.chmod(0o755)
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        engine_vectors("llama", tmp_path, ["a"], python=str(engine))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_line_for_vllm_names_the_dtype(tiny_folder: Folder, dtype: str) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", dtype=dtype)
    assert serving_line(encoder, "out") == f"vllm serve out --runner pooling --dtype {dtype}"


def test_the_folder_holds_pooling_modules_length_and_tokens(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", max_length=20, **CENTERED)
    export_for(encoder, "vllm", tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    names = ["Transformer", "Pooling", "Dense", "Normalize"]
    assert [module["type"] for module in modules] == [f"sentence_transformers.models.{name}" for name in names]
    pooling = json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())
    assert [name for name, value in pooling.items() if value is True] == ["include_prompt", "pooling_mode_lasttoken"]
    assert pooling["word_embedding_dimension"] == 32
    tokenizer_settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert tokenizer_settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert json.loads((tmp_path / "out" / "sentence_bert_config.json").read_text())[
        "max_seq_length"
    ] == 20 + _template_tokens(encoder)
    texts = [*TEXTS, " ".join(TEXTS)]
    expected = encoder.tokenizer(texts, truncation=True, max_length=48)["input_ids"]
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(48)
    assert [encoding.ids for encoding in tokenizer.encode_batch(texts)] == expected
    assert len(expected[-1]) == 48
    assert expected[-1][-1] == expected[0][-1]  # truncation keeps the end of the template


@pytest.mark.parametrize(
    ("rope", "old"),
    [
        ({"rope_type": "default", "rope_theta": 500.0}, {"rope_theta": 500.0}),
        (
            {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_rotary_positions_are_written_under_both_names_and_read_once(tmp_path: Path, rope: Any, old: Any) -> None:
    sizes: Any = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = LlamaConfig(
        **sizes, intermediate_size=64, max_position_embeddings=64, pad_token_id=0, rope_parameters=rope
    )
    LlamaModel(config).eval().save_pretrained(tmp_path / "whole")
    tiny_tokenizer().save_pretrained(tmp_path / "whole")
    export_for(LayerEncoder(str(tmp_path / "whole"), 2, device="cpu"), "vllm", tmp_path / "cut")
    written = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert {name: written[name] for name in old} == old
    reloaded: Any = AutoConfig.from_pretrained(tmp_path / "cut")
    assert {name: reloaded.rope_parameters[name] for name in rope} == rope


@pytest.mark.parametrize(
    ("name", "old"),
    [
        ("GPTNeoX", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
        ("ModernBERT", {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}),
        ("RoBERTa", {"position_embedding_type": "absolute"}),
    ],
)
def test_families_with_their_own_old_names(tiny_folder: Folder, tmp_path: Path, name: str, old: Any) -> None:
    export_for(LayerEncoder(tiny_folder(name), 2, device="cpu"), "vllm", tmp_path / "cut")
    written = json.loads((tmp_path / "cut" / "config.json").read_text())
    assert {name: written[name] for name in old} == old


@pytest.mark.parametrize(
    ("name", "layer", "options", "why"),
    [
        ("Llama", 2, {"norm": "none"}, "always applies the final norm.*pass norm='final'"),
        ("Llama", 0, {}, "no model without blocks"),
        ("Llama", 2, {"pooling": "max"}, "has no pooling 'max'"),
        ("Llama", 2, {"truncate_dim": 8}, "returns all dimensions"),
        ("Llama", 2, {"skip_first": 1}, "pools every token"),
        ("ViT", 2, {}, "embeds only texts"),
        ("Mamba", 2, {}, "'mamba'"),
    ],
)
def test_features_that_a_server_computes_differently_are_refused(
    tiny_folder: Folder, tmp_path: Path, name: str, layer: Any, options: Any, why: str
) -> None:
    encoder = LayerEncoder(tiny_folder(name), layer, device="cpu", **options)
    with pytest.raises(CutError, match=why):
        export_for(encoder, "vllm", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "result"), [("Llama", True), ("Qwen2", True), ("GPT2", False), ("GPTNeoX", False)])
def test_vllm_leaves_the_causal_mask_of_some_models_on(
    tiny_folder: Folder, tmp_path: Path, name: str, result: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midlayer_encoders.extras.export.serving._has_vllm", lambda: False)
    encoder = LayerEncoder(tiny_folder(name), 2, device="cpu", bidirectional=True)
    if result:
        export_for(encoder, "vllm", tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["is_causal"] is False
        return
    with pytest.raises(CutError, match=r"it keeps the causal mask .*leave out `bidirectional`"):
        export_for(encoder, "vllm", tmp_path / "out")


def test_the_command_that_serves_is_one_for_a_shell(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("BERT"), 2, device="cpu")
    assert shlex.split(serving_line(encoder, tmp_path / "my cut"))[2] == str(tmp_path / "my cut")


def test_vllm_does_not_find_the_shards_of_a_model_that_was_there_before(tiny_folder: Folder, tmp_path: Path) -> None:
    for name in ("model.safetensors.index.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    export_for(LayerEncoder(tiny_folder("Llama"), 2, device="cpu"), "vllm", tmp_path, overwrite=True)
    assert not (tmp_path / "model.safetensors.index.json").exists()  # it would read the files that this one names
    assert (tmp_path / "notes.txt").exists()


def test_a_prompt_that_a_server_does_not_add_causes_a_warning(
    tiny_folder: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts: Any = {"prompts": {"ask": "hm: "}, "default_prompt_name": "ask"}
    encoder = LayerEncoder(tiny_folder("Llama"), 2, device="cpu", **prompts)
    export_for(encoder, "vllm", tmp_path / "vllm")
    assert "vLLM does not add the default prompt: prepend 'hm: ' to texts" in caplog.text
    export_for(
        LayerEncoder(str(tmp_path / "vllm"), -1, device="cpu"), "vllm", tmp_path / "again"
    )  # it keeps the prompt
    card = json.loads((tmp_path / "again" / "midlayer.json").read_text())
    assert (card["prompt"], card["prompts"]) == ("hm: ", {"ask": "hm: "})


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_the_error_of_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="No module named 'vllm'"):
        engine_vectors("vllm", tmp_path, ["a"], "float32")


def test_the_command_prints_the_line_that_serves_the_folder(tiny_folder: Folder, tmp_path: Path) -> None:
    output = run("export", tiny_folder("BERT"), "--layer", "2", "--for", "vllm", "--out", str(tmp_path / "out"))
    assert f"vllm serve {shlex.quote(str(tmp_path / 'out'))} --runner pooling --dtype float32" in output
