"""A tiny model of every type that transformers registers, saved to a folder with a processor, and inputs for it."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.support.tiny_configs import MOST_PARAMETERS, randomized, tiny_config
from tests.support.tiny_folders import tokenizer

TOLERANCE = 2e-4  # relative to the largest value: another order of summation
TEXTS = [
    "a cat sat on a mat",
    "ox",
    "the quick brown fox jumps over the lazy dog while seven wizards box quietly in the old mill by the sea at dawn",
    "stock markets fell sharply",
]


def pictures() -> list[Any]:
    """Return three images of noise."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 255, (3, 16, 16, 3), dtype=np.uint8)
    return [Image.fromarray(picture) for picture in noise]


def waveforms() -> list[dict[str, Any]]:
    """Return three waveforms of different lengths, at 16 kHz."""
    noise = np.random.default_rng(0)
    return [
        {"array": noise.standard_normal(samples).astype(np.float32), "sampling_rate": 16000}
        for samples in (4000, 2400, 5600)
    ]


MEDIA = {"input_ids": "text", "pixel_values": "image", "input_values": "audio", "input_features": "audio"}
INPUTS = {"text": lambda: list(TEXTS), "image": pictures, "audio": waveforms}


def long_tokenizer() -> Any:
    """Return a character tokenizer for texts of up to 128 tokens."""
    made = tokenizer()
    made.model_max_length = 128
    return made


def processor_of(model_type: str, medium: str, main: str, config: Any) -> Any:
    """Return the tokenizer, image processor or feature extractor of a model."""
    import transformers as tf

    if medium == "text":
        return long_tokenizer()
    if medium == "image":
        edge = getattr(config, "image_size", 16) or 16
        size = dict(zip(("height", "width"), edge if isinstance(edge, list | tuple) else (edge, edge), strict=True))
        return tf.ViTImageProcessorPil(size=size)
    mels = next((getattr(config, name) for name in _MELS if isinstance(getattr(config, name, None), int)), 8)
    if model_type == "audio-spectrogram-transformer":
        return tf.ASTFeatureExtractor(num_mel_bins=mels, max_length=config.max_length)
    if model_type.startswith(("parakeet", "nemotron", "canary", "cohere_asr")):
        try:
            return tf.ParakeetFeatureExtractor(feature_size=mels)
        except ImportError as reason:
            raise NotBuiltError("its feature extractor needs librosa, which is not installed") from reason
    if model_type in _SEAMLESS:
        return tf.SeamlessM4TFeatureExtractor(
            feature_size=config.feature_projection_input_dim // 2,
            num_mel_bins=config.feature_projection_input_dim // 2,
            stride=2,
        )
    if main == "input_features":
        return tf.WhisperFeatureExtractor(feature_size=mels, chunk_length=1, hop_length=400, n_fft=400)
    return tf.Wav2Vec2FeatureExtractor(return_attention_mask=getattr(config, "feat_extract_norm", "") == "layer")


_MELS = ("num_mel_bins", "n_mels", "mel_bins", "input_feat_per_channel")
_SEAMLESS = ("wav2vec2-bert",)


PADDED = {"siglip", "siglip2", "aimv2"}  # text towers trained with padding to the maximum length


def prepared(processor: Any, medium: str, item: Any, padded: int = 0) -> dict[str, Any]:
    """Return the processed inputs for one item, without padding unless the model always uses it."""
    if medium == "text" and padded:
        return dict(processor(item, padding="max_length", max_length=padded, truncation=True, return_tensors="pt"))
    if medium == "text":
        return {"input_ids": torch.tensor([processor(item)["input_ids"]])}
    if medium == "image":
        return {"pixel_values": processor(item, return_tensors="pt")["pixel_values"]}
    return dict(processor(item["array"], sampling_rate=item["sampling_rate"], return_tensors="pt"))


class NotBuiltError(Exception):
    """No tiny model of a type can be built or run here."""


def build(model_type: str, folder: Path) -> tuple[nn.Module, str, Any]:
    """Write a tiny model of a type and its processor to a folder; return the uncut model, its medium and processor."""
    import transformers as tf

    try:
        config = tiny_config(model_type)
        with torch.device("meta"):
            main = tf.AutoModel.from_config(config)
        size = sum(parameter.numel() for parameter in main.parameters())
    except ImportError as reason:
        raise NotBuiltError(f"needs a library that is not installed: {str(reason).strip().splitlines()[0]}") from reason
    except Exception as reason:
        raise NotBuiltError(f"config: {type(reason).__name__}: {first_line(reason)}") from reason
    if size > MOST_PARAMETERS:
        raise NotBuiltError(f"its config cannot be made small: {size / 1e6:.0f}M parameters")
    torch.manual_seed(0)
    try:
        model = randomized(tf.AutoModel.from_config(config))
    except ArithmeticError as reason:
        raise NotBuiltError(f"random weights: {type(reason).__name__}: {first_line(reason)}") from reason
    medium = MEDIA.get(str(model.main_input_name))
    if medium is None:
        raise NotBuiltError(f"its input `{model.main_input_name}` is not text, an image or audio")
    processor = processor_of(model_type, medium, str(model.main_input_name), model.config)
    model.save_pretrained(folder)
    model.config.use_cache = False  # type: ignore[assignment]  # caches are not compared
    if joint(model):
        images = processor_of(model_type, "image", "", model.config.vision_config)
        tf.CLIPProcessor(images, long_tokenizer()).save_pretrained(folder)
    else:
        if medium == "text" and hasattr(model.config, "vision_config"):  # its processor prepares images too
            tf.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
        processor.save_pretrained(folder)
    if medium == "text":  # transformers selects the tokenizer class by the model in the folder
        processor = tf.AutoTokenizer.from_pretrained(folder)
        processor.padding_side = "right"
    return model, medium, processor


def joint(model: Any) -> bool:
    """Return whether a model has a text tower and an image tower with a shared embedding space."""
    return all(
        hasattr(model, name) for name in ("text_model", "vision_model", "get_text_features", "get_image_features")
    )


def uncut_of(model: Any, tower: str | None) -> nn.Module:
    """Return the module whose layers are compared: a tower, or the encoder of an encoder-decoder model."""
    if tower is not None:
        return getattr(model, {"text": "text_model", "image": "vision_model"}[tower])  # type: ignore[no-any-return]
    if getattr(model.config, "is_encoder_decoder", False):
        return model.get_encoder()  # type: ignore[no-any-return]
    if hasattr(getattr(model, "language_model", None), "lm_head"):  # Llama 4, whose output is logits
        return model.language_model.model  # type: ignore[no-any-return]
    return model


def first_line(reason: BaseException) -> str:
    """Return the first line of an error's text, at most 300 characters."""
    return " ".join(str(reason).split())[:300]


def error(got: Any, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; infinite if shapes differ."""
    value = torch.as_tensor(np.asarray(got)) if not isinstance(got, Tensor) else got
    if value.shape != expected.shape or not bool(value.isfinite().all()):
        return float("inf")
    return float(f"{float((value - expected).abs().max() / expected.abs().max().clamp(min=1e-6)):.1e}")


def registered() -> list[str]:
    """Return every model type for which transformers has a base model."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)
