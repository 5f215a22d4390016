"""4- and 8-bit weights of bitsandbytes: the option, and every layer compared with the uncut quantized model."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaModel

from midlayer_encoders import LayerEncoder, tune
from midlayer_encoders.encoder.options import EncoderOptions, python_line, shell_line
from midlayer_encoders.errors import CutError, MidlayerError, OptionError
from midlayer_encoders.extras.export import export_for
from midlayer_encoders.extras.training import TuneSettings
from midlayer_encoders.models import load
from midlayer_encoders.models.load import keep_weights_unchanged
from tests.support.families import VOCAB
from tests.support.pooled import pooled
from tests.support.tiny_folders import TEXTS, Folder, tokenizer

DEPTH = 3
NEEDED = "pip install 'midlayer-encoders[quantization]'"


class StoppedError(MidlayerError):
    """Weights would be read now."""


@pytest.fixture(scope="module", params=["Llama", "BERT"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model that is wide enough for blocks of 64 weights."""
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": DEPTH, "num_attention_heads": 4}
    sizes |= {"vocab_size": VOCAB, "max_position_embeddings": 64, "pad_token_id": 0}
    path = tmp_path_factory.mktemp(request.param)
    model = LlamaModel(LlamaConfig(**sizes)) if request.param == "Llama" else BertModel(BertConfig(**sizes))
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


def states_of_uncut(folder: str, config: Any) -> list[torch.Tensor]:
    """Return the states of every layer and text of the uncut quantized model, each text alone."""
    model = AutoModel.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()
    keep_weights_unchanged(model)
    layers: list[list[torch.Tensor]] = [[] for _ in range(DEPTH + 1)]
    for text in TEXTS:
        with torch.no_grad():
            output = model(**tokenizer()(text, return_tensors="pt"), output_hidden_states=True)
            for layer, states in enumerate(output.hidden_states):
                normed = model.norm(states) if hasattr(model, "norm") and layer < DEPTH else states
                layers[layer].append(pooled(normed[0], "mean"))
    return [torch.stack(rows) for rows in layers]


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_every_layer_equals_the_uncut_quantized_model(folder: str, quantization: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDED)
    whole = LayerEncoder(folder, -1, quantization=quantization, device="cpu")
    expected = states_of_uncut(folder, whole.transformer.config.quantization_config)  # type: ignore[union-attr]
    options: dict[str, Any] = {"quantization": quantization, "device": "cpu"}
    encoders = [LayerEncoder(folder, layer, **options) for layer in range(DEPTH + 1)]
    for layer, encoder in enumerate(encoders):
        np.testing.assert_allclose(encoder.encode(TEXTS, batch_size=1), expected[layer].numpy(), atol=1e-6)
    np.testing.assert_allclose(whole.encode_layers(TEXTS), np.stack(expected), atol=2e-2)  # other batches
    plain = LayerEncoder(folder, 2, device="cpu")
    digests = {encoder.spec.digest for encoder in (*encoders, plain)}
    assert len(digests) == DEPTH + 2
    assert np.abs(plain.encode(TEXTS) - encoders[2].encode(TEXTS)).max() > 1e-3
    encoders[2].save_pretrained(str(tmp_path / "cut"))
    np.testing.assert_allclose(encoders[2].encode(TEXTS, batch_size=1), expected[2].numpy(), atol=1e-6)
    saved: Any = SentenceTransformer(str(tmp_path / "cut"), device="cpu")
    keep_weights_unchanged(saved)
    np.testing.assert_allclose(saved.encode(TEXTS, batch_size=1), expected[2].numpy(), atol=1e-6)
    again = LayerEncoder(str(tmp_path / "cut"), 1, device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS, batch_size=1), expected[1].numpy(), atol=1e-6)
    with pytest.raises(OptionError, match="`quantization` must be None for a model whose files are quantized already"):
        LayerEncoder(str(tmp_path / "cut"), 1, **options)


def test_norm_none_and_engines_of_a_quantized_encoder(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason=NEEDED)
    options: dict[str, Any] = {"quantization": "8bit", "device": "cpu"}
    raw = LayerEncoder(folder, -1, norm="none", **options)  # a blank block follows the last one
    assert type(raw[0]) is type(LayerEncoder(folder, -1, norm="none", device="cpu")[0]), "read by the same plan"
    normed = LayerEncoder(folder, -1, **options)
    features = raw.model_inputs(TEXTS[:1])
    with torch.no_grad():
        states = raw[0](dict(features))["token_embeddings"]
        final = getattr(normed.transformer, "norm", torch.nn.Identity())
        torch.testing.assert_close(final(states), normed[0](dict(features))["token_embeddings"])
    for target in ("onnx", "gguf", "vllm"):
        with pytest.raises(CutError, match=r"bitsandbytes quantized them\. Create the encoder without `quantization`"):
            export_for(normed, target, tmp_path / target)  # type: ignore[arg-type]
    pairs = [{"anchor": text, "positive": f"{text}!"} for text in TEXTS]
    with pytest.raises(OptionError, match="`quantization` must be None to tune"):
        tune(normed, None, pairs, out=tmp_path / "tuned", tasks=(), settings=TuneSettings(held_out=0, checkpoints=0))


def test_option_is_printed_and_validated() -> None:
    options = EncoderOptions(quantization="4bit")
    assert python_line("m", 3, options) == "LayerEncoder('m', layer=3, quantization='4bit')"
    assert shell_line("m", 3, options, out="o") == "midlayer export m --layer 3 --quantization 4bit --out o"
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"quantization": "4-bit"}, "`quantization` must be one of '4bit', '8bit'"),
        ({"quantization": "4bit", "adapters": ["a"]}, "`adapters` must be empty with `quantization`.*merge_and_unload"),
        ({"model_kwargs": {"quantization_config": {}}, "adapters": ["a"]}, "`adapters` must be empty with"),
        ({"quantization": "4bit", "gguf_file": "f.gguf"}, "`gguf_file` must be None with `quantization`"),
        ({"quantization": "4bit", "model_kwargs": {"quantization_config": {}}}, "`quantization` must be None with"),
    ]
    for keywords, message in wrong:
        with pytest.raises(OptionError, match=message):
            EncoderOptions(**keywords)


def pretend_installed(patch: pytest.MonkeyPatch, *devices: str) -> list[dict[str, Any]]:
    """Pretend that bitsandbytes supports some devices, and return the keywords of models instead of reading weights."""
    calls: list[dict[str, Any]] = []

    def record(*_: Any, **keywords: Any) -> Any:
        calls.append(keywords)
        raise StoppedError("stopped")

    package = SimpleNamespace(__version__="0.46.1", supported_torch_devices=set(devices))
    patch.setitem(sys.modules, "bitsandbytes", package)  # type: ignore[arg-type]
    patch.setattr("transformers.utils.quantization_config.importlib.metadata.version", lambda _: "0.50.2")
    patch.setattr(load.internals, "read_weights", record)
    return calls


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_config_is_passed_on_to_transformers(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch, dtype: str | None
) -> None:
    calls = pretend_installed(monkeypatch, "cpu")
    for quantization in ("4bit", "8bit"):
        with pytest.raises(StoppedError):
            LayerEncoder(tiny_folder("Llama"), 2, quantization=quantization, dtype=dtype, device="cpu")  # type: ignore[arg-type]
    four, eight = (call["quantization_config"].to_dict() for call in calls)
    assert (four["load_in_4bit"], four["bnb_4bit_quant_type"]) == (True, "nf4")
    assert four["bnb_4bit_compute_dtype"] == (dtype or "float32")
    assert eight["load_in_8bit"]
    assert [call["device_map"] for call in calls] == ["cpu", "cpu"]
    assert not any("quantization" in call for call in calls)


def test_missing_package_and_device_are_refused_before_weights_are_read(
    tiny_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = pretend_installed(monkeypatch, "cuda")
    with pytest.raises(OptionError, match=r"`quantization` must be None on 'cpu', which bitsandbytes 0.46.1 does not"):
        LayerEncoder(tiny_folder("Llama"), 2, quantization="4bit", device="cpu")
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(OptionError, match=r"needs bitsandbytes, which is not installed: pip install 'midlayer-enc"):
        LayerEncoder(tiny_folder("Llama"), 2, quantization="8bit", device="cpu")
    assert calls == []
