"""Short inputs on which a new encoder is checked, and the checks of its batches and templates."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from midlayer_encoders.encoder.inputs import (
    WITH_MASK,
    feature_extractor,
    model_features,
    sampling_rate,
    supported_media,
    to_device,
)
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.pooled_spans import PooledSpans

Features: TypeAlias = Mapping[str, Any]

#: Errors of models that run with other blocks than they were written for, and of processors with other inputs.
RUN_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError,
)  # fmt: skip


# --- inputs ----------------------------------------------------------------------------------------------------------


def probe_inputs(
    media: Sequence[str], rate: int | None, tokenizer: Any = None, *, seconds: float = 0.1
) -> tuple[Any, Any]:
    """Return a short and a longer input of a medium; the longer is ``None`` for images, whose size is fixed.

    Args:
        media: media of the model.
        rate: audio samples per second.
        tokenizer: of the model.
        seconds: length of the short waveform.
    """
    if "text" in media:
        return _probe_texts(tokenizer)
    if "image" in media:
        return probe_image(8), None
    rate = rate or 16000
    lengths = (int(seconds * rate), 3 * int(seconds * rate) // 2)
    short, longer = (np.sin(np.arange(samples, dtype=np.float32) / 20) for samples in lengths)
    return {"array": short, "sampling_rate": rate}, {"array": longer, "sampling_rate": rate}


def probe_image(width: int) -> Any:
    """Return an image of eight lines."""
    from PIL import Image

    return Image.fromarray(np.arange(24 * width).astype(np.uint8).reshape(8, width, 3))


def _probe_texts(tokenizer: Any) -> tuple[str, str]:
    texts = "a b c", "d e f g h i"
    vocabulary = getattr(tokenizer, "get_vocab", None)
    if vocabulary is None or all(tokenizer(text, verbose=False)["input_ids"] for text in texts):
        return texts
    # A special alphabet, such as for genes and molecules.
    words = [word for word in sorted(vocabulary(), key=len) if tokenizer(word, add_special_tokens=False)["input_ids"]]
    return (words[0] * 3, "".join(words[:3]) * 2) if words else texts


def probe_features(first: Any, *, seconds: float = 0.1) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the features of a short input alone, and in a padded batch with a longer one, on the module's device.

    The second is ``None`` for images, which are never padded. ``seconds`` is the length of a short waveform.
    """
    model = first.model
    media = supported_media(first.modalities)
    if not media:
        raise CutError(f"{type(model).__name__} takes no text, image or audio by itself: it cannot be an encoder.")
    tokenizer = getattr(first, "tokenizer", None)

    def features(inputs: list[Any]) -> dict[str, Any]:
        processed = first.preprocess(inputs, processing_kwargs=WITH_MASK)
        return to_device(model_features(model, processed), next(model.parameters()).device)

    with turn(first.processor if tokenizer is None else tokenizer):  # other threads may encode with it
        short, longer = probe_inputs(media, sampling_rate(first.processor), tokenizer, seconds=seconds)
        return features([short]), features([short, longer]) if longer is not None else None


@torch.no_grad()
def token_states(module: nn.Module, features: Features) -> Tensor:
    """Return the states that a first module makes of features, shape ``(B, T, D)``."""
    return module(dict(features))["token_embeddings"]  # type: ignore[no-any-return]


def close(expected: Tensor, states: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether two tensors are equal up to rounding in a dtype, their own by default."""
    if expected.shape != states.shape:
        return False
    tolerance = max(1e-3, 10 * torch.finfo(dtype or states.dtype).eps)
    # `encode` reports states that are not finite.
    largest = float(expected.nan_to_num(posinf=0, neginf=0).abs().max())
    return torch.allclose(expected, states, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


# --- checks ----------------------------------------------------------------------------------------------------------


def makes_one_size(first: Any) -> bool:
    """Return whether a processor makes the same of an image alone and beside one of another size."""
    small, wide = probe_image(8), probe_image(12)
    try:
        alone, both = first.preprocess([small]), first.preprocess([small, wide])
    except RUN_ERRORS:  # it cannot join them
        return False
    pairs = [(value.double(), both[key][:1].double()) for key, value in alone.items() if isinstance(value, Tensor)]
    return all(image.shape == other.shape and torch.allclose(image, other, atol=1e-3) for image, other in pairs)


#: Seconds of waveforms whose numbers of frames leave different rests when a model downsamples them.
_WAVEFORMS = (0.1, 0.125, 0.144, 0.1625, 0.18)


@torch.no_grad()
def check_batches(encoder: Any) -> None:
    """Raise unless a short input has the same vector alone and in a padded batch.

    transformers' extractors scale waveforms as if all padding were on the right, so one that pads on the left, and
    changes the waveforms of a batch, pads on the right here.
    """

    def is_exact(seconds: float) -> bool:
        batches = [batch for batch in probe_features(encoder[0], seconds=seconds) if batch is not None]
        vectors = [encoder(dict(batch))["sentence_embedding"][:1] for batch in batches]
        return close(vectors[0], vectors[-1])

    durations = _WAVEFORMS if "audio" in encoder.media else _WAVEFORMS[:1]
    extractor = feature_extractor(encoder[0].processor)
    if all(map(is_exact, durations)):
        return
    if getattr(extractor, "padding_side", "right") == "left":
        extractor.padding_side = "right"
        if all(map(is_exact, durations)):
            return
    raise OptionError(
        f"{encoder.name} gives a short input another vector in a padded batch than alone: its processor does not pad "
        "on the right or returns no `attention_mask`, or padding changes its states at some lengths."
    )


def check_is_causal(first: Any, features: Features, spans: PooledSpans, name: str) -> None:
    """Raise unless the first two spans are the same without the tokens after them, as in a causal model.

    Args:
        first: the first module.
        features: the features of one text in the template.
        spans: the pooling of the spans.
        name: name of the model.
    """
    mask = features.get("attention_mask", torch.ones_like(features["input_ids"]))  # a model may take none
    size = int(spans.masks(mask[:1])[1].int().argmax()) + 1
    is_row = {key: isinstance(value, Tensor) and value.ndim == 2 for key, value in features.items()}
    half = {key: value[:1, :size] if is_row[key] else value for key, value in features.items()}
    if not close(token_states(first, half), token_states(first, features)[:1, :size]):
        raise OptionError(
            f"`recipe` must pool one span in {name}, whose tokens see later ones: the first copy of the text would see "
            "the second one. Templates with {read} need a causal model."
        )
