"""What images and audio need on their way through an encoder: reading, a fixed order of patches, masks, lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from midlayer_encoders._types import Medium
from midlayer_encoders.errors import OptionError
from midlayer_encoders.media import InputError, check_taken, medium_of, read_audio, read_image
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.reading.pooling import real_tokens
from midlayer_encoders.validation import check_text, lone_surrogate

__all__ = [
    "both_media",
    "check_lengths",
    "is_conversation",
    "is_pair",
    "least_samples",
    "media_taken",
    "moved",
    "named_medium",
    "pass_by_length",
    "probe_input",
    "probe_inputs",
    "read_inputs",
    "sampling_rate",
    "with_fixed_order",
    "with_padded_column",
    "with_token_mask",
    "without_needless_mask",
]

_log = logging.getLogger(__name__)

_MEDIA: tuple[Medium, ...] = ("text", "image", "audio")


def media_taken(modalities: Sequence[Any]) -> list[str]:
    """Return the media that a module takes one at a time.

    Example:
        >>> media_taken(["audio", ("audio", "text"), "message"])
        ['audio']
    """
    return [name for name in _MEDIA if name in modalities]


def sampling_rate(processor: Any) -> int | None:
    """Return the samples a second that a processor was made for, ``None`` where it prepares no audio."""
    rate = getattr(_extractor(processor), "sampling_rate", None)
    return int(rate) if rate is not None else None


def _extractor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", processor)


def both_media(item: Any) -> bool:
    """Return whether an input is a text and an image at once, as mteb hands them out."""
    return isinstance(item, Mapping) and {"text", "image"} <= set(item)


def read_inputs(
    items: Sequence[Any], taken: Sequence[str], *, model: str, rate: int | None, max_pixels: int
) -> list[Any]:
    """Return the inputs of a batch in the forms that processors take: texts, RGB images, waveforms at the model's rate.

    Args:
        items: as :func:`~midlayer_encoders.media.read_image` and :func:`~midlayer_encoders.media.read_audio` take
            them, each perhaps under the name of its medium, as ``{"image": …}``.
        taken: the media that the model takes.
        model: its name, for errors.
        rate: samples a second that it was made for.
        max_pixels: of an image.

    Raises:
        InputError: saying why an input cannot be read or taken; its ``item`` is that input.
    """
    made: list[Any] = []
    for item in items:
        try:
            made.append(_read(item, taken, model, rate, max_pixels))
        except InputError as reason:
            reason.item = item
            raise
    return made


def _read(item: Any, taken: Sequence[str], model: str, rate: int | None, max_pixels: int) -> Any:
    medium, given = named_medium(item, taken, model=model)
    if medium == "image":
        return read_image(given, max_pixels=max_pixels)
    return given if medium == "text" else read_audio(given, rate=rate)


def named_medium(item: Any, taken: Sequence[str], *, model: str) -> tuple[Medium, Any]:
    """Return which medium an input is, and the input itself without its name, or raise where it cannot be taken."""
    if type(item) is str and list(taken) == ["text"] and lone_surrogate(item) is None:
        return "text", item  # what nearly all inputs are: asked of each of a million
    named = next(iter(item)) if isinstance(item, Mapping) and len(item) == 1 else None
    given = item if named not in _MEDIA else item[named]
    try:
        medium: Medium = medium_of(given, taken) if named not in _MEDIA else named
        check_taken(medium, taken, given, model=model)
        if medium == "text":
            check_text("inputs", given)
    except (InputError, OptionError) as reason:
        raise InputError(str(reason), item=item) from None
    return medium, given


def is_conversation(item: Any) -> bool:
    """Return whether an input is a message, or several, as a chat template takes them."""
    if isinstance(item, Mapping):
        return {"role", "content"} <= set(item) and all(isinstance(item[key], str) for key in ("role", "content"))
    messages = item if isinstance(item, list) else []
    return bool(messages) and all(isinstance(message, Mapping) and is_conversation(message) for message in messages)


def is_pair(item: Any) -> bool:
    """Return whether this is a pair of texts, which sentence-transformers hands to the tokenizer as such."""
    return isinstance(item, tuple) and len(item) == 2 and all(isinstance(text, str) for text in item)


def least_samples(config: Any) -> int:
    r"""Return the samples that the convolutions before a model's blocks need to make one state.

    .. math::
        n_{i-1} = (n_i - 1)\, s_i + k_i, \qquad n_I = 1

    Example:
        >>> from types import SimpleNamespace
        >>> least_samples(SimpleNamespace(conv_kernel=(10, 3, 3, 3, 3, 2, 2), conv_stride=(5, 2, 2, 2, 2, 2, 2)))
        400
    """
    least = 1
    steps = zip(getattr(config, "conv_kernel", ()), getattr(config, "conv_stride", ()), strict=True)
    for kernel, stride in reversed(list(steps)):
        least = (least - 1) * stride + kernel
    return least


def check_lengths(waveforms: Sequence[Any], items: Sequence[Any], model: nn.Module, processor: Any) -> bool:
    """Raise where a waveform is too short for a model to make one state; return whether one is truncated."""
    least = least_samples(model.config)
    lengths = [len(waveform["array"]) for waveform in waveforms]
    for waveform, item, length in zip(waveforms, items, lengths, strict=True):
        if length < least:
            shortest = f"{least} samples ({1000 * least / waveform['sampling_rate']:.0f} ms)"
            raise InputError(
                f"A waveform must have at least {shortest}, of which {type(model).__name__} makes one state, but has "
                f"{length}.",
                item=item,
            )
    longest = getattr(_extractor(processor), "n_samples", None)
    return longest is not None and max(lengths) > longest


# --- in the forward pass --------------------------------------------------------------------------------------------


def with_fixed_order(model: nn.Module, features: dict[str, Any]) -> dict[str, Any]:
    """Return features in which a masked autoencoder is told to leave its patches in their order.

    Even with nothing masked it shuffles them by noise that it draws from the global generator.
    """
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "mask_ratio") or "pixel_values" not in features:
        return features
    pixels = features["pixel_values"]
    patches = (pixels.shape[-2] // config.patch_size) * (pixels.shape[-1] // config.patch_size)
    return {**features, "noise": torch.arange(float(patches), device=pixels.device).expand(len(pixels), patches)}


def without_needless_mask(model: nn.Module, features: dict[str, Any]) -> dict[str, Any]:
    """Return features without a mask that hides nothing, for models that were trained without one."""
    mask = features.get("attention_mask")
    if mask is None or not suffers_from_padding(model) or not bool(mask.all()):
        return features
    return _without_mask(features)


def _without_mask(features: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in features.items() if key != "attention_mask"}


def with_token_mask(model: nn.Module, features: dict[str, Any]) -> dict[str, Any]:
    """Return features whose mask is of the states, as pooling wants it, not of the samples or spectra."""
    states = features["token_embeddings"]
    return {**features, "attention_mask": real_tokens(features.get("attention_mask"), states, model=model).long()}


def with_padded_column(features: Mapping[str, Any]) -> dict[str, Any]:
    """Return the features of texts with one column more, which the mask hides."""
    size = features["input_ids"].shape
    return {
        key: torch.nn.functional.pad(value, (0, 1)) if isinstance(value, Tensor) and value.shape == size else value
        for key, value in features.items()
    }


def moved(features: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return features with their tensors on a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}


def pass_by_length(forward: Callable[[dict[str, Any]], dict[str, Any]], features: dict[str, Any]) -> dict[str, Any]:
    """Return what ``forward`` makes of texts or waveforms, passed in parts of one length each, without padding."""
    if "attention_mask" not in features:
        return forward(features)
    size = features["attention_mask"].shape[1]
    lengths = features["attention_mask"].sum(dim=1).clamp(min=1)
    parts: list[tuple[Tensor, dict[str, Any]]] = []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        kept = _without_mask(features).items()
        cropped = {key: _cropped(value, rows, length, size) for key, value in kept}
        parts.append((rows, forward(cropped)))
    return {**features, **{name: _joined(parts, name) for name in ("token_embeddings", "attention_mask")}}


def _cropped(value: Any, rows: Tensor, length: int, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[rows, :length] if value.ndim > 1 and value.shape[1] == size else value[rows]


def _joined(parts: Sequence[tuple[Tensor, dict[str, Any]]], name: str) -> Tensor:
    """Return the rows of all parts in their places, those that are shorter with zeros after them."""
    values = [(rows, made[name]) for rows, made in parts]
    longest, first = max(value.shape[1] for _, value in values), values[0][1]
    whole: Tensor = first.new_zeros((sum(len(rows) for rows, _ in values), longest, *first.shape[2:]))
    for rows, value in values:
        whole[rows, : value.shape[1]] = value
    return whole


def probe_inputs(taken: Sequence[str], rate: int | None, tokenizer: Any = None) -> tuple[Any, Any]:
    """Return a small input of a medium that the model takes and a longer one, ``None`` for images, which have a size.

    100 and 150 ms of audio; texts of which the tokenizer makes tokens.
    """
    if "text" in taken:
        return _probe_texts(tokenizer)
    if "image" in taken:
        from PIL import Image

        return Image.fromarray(np.arange(3 * 64, dtype=np.uint8).reshape(8, 8, 3)), None
    rate = rate or 16000
    waves = [np.sin(np.arange(samples, dtype=np.float32) / 20) for samples in (rate // 10, 3 * rate // 20)]
    return {"array": waves[0], "sampling_rate": rate}, {"array": waves[1], "sampling_rate": rate}


def _probe_texts(tokenizer: Any) -> tuple[str, str]:
    texts = "a b c", "d e f g h i"
    known = getattr(tokenizer, "get_vocab", None)
    if known is None or all(tokenizer(text, verbose=False)["input_ids"] for text in texts):
        return texts
    # An alphabet of its own, as those of genes and molecules.
    words = [word for word in sorted(known(), key=len) if tokenizer(word, add_special_tokens=False)["input_ids"]]
    return (words[0] * 3, "".join(words[:3]) * 2) if words else texts


def probe_input(taken: Sequence[str], rate: int | None, tokenizer: Any = None) -> Any:
    """Return the first of :func:`probe_inputs`."""
    return probe_inputs(taken, rate, tokenizer)[0]
