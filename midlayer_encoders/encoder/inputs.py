"""Read and prepare inputs: their medium, their files, masks, and batches without padding."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from midlayer_encoders._types import Medium
from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.reading.media_inputs import InputError, check_taken, is_pil, medium_of, read_audio, read_image
from midlayer_encoders.validation import check_text, lone_surrogate

_MEDIA: tuple[Medium, ...] = ("text", "image", "audio")
#: Some extractors need a mask to scale waveforms, but return none by default.
WITH_MASK = {"audio": {"return_attention_mask": True}}


def supported_media(modalities: Sequence[Any]) -> list[str]:
    """Return the single media among the modalities of a module.

    Example:
        >>> supported_media(["audio", ("audio", "text"), "message"])
        ['audio']
    """
    return [name for name in _MEDIA if name in modalities]


def sampling_rate(processor: Any) -> int | None:
    """Return the sampling rate that a processor expects, or ``None`` if it does not process audio."""
    rate = getattr(feature_extractor(processor), "sampling_rate", None)
    return int(rate) if rate is not None else None


def feature_extractor(processor: Any) -> Any:
    """Return what prepares waveforms: a part of a processor, or the processor itself."""
    return getattr(processor, "feature_extractor", processor)


def read_inputs(
    items: Sequence[Any], media: Sequence[str], *, model: str, rate: int | None, max_pixels: int
) -> list[Any]:
    """Return a batch in the forms that processors expect: texts, RGB images, waveforms at the model's rate.

    Args:
        items: inputs of ``read_image`` and ``read_audio``, or mappings from a medium to one, such as
            ``{"image": …}``.
        media: the media of the model.
        model: its name in errors.
        rate: its sampling rate.
        max_pixels: the largest image size.

    Raises:
        InputError: if an input cannot be read; its ``item`` is that input.
    """
    readers: dict[str, Callable[[Any], Any]]
    readers = {"image": partial(read_image, max_pixels=max_pixels), "audio": partial(read_audio, rate=rate)}
    inputs: list[Any] = []
    for item in items:
        medium, content = split_medium(item, media, model=model)
        try:
            inputs.append(readers[medium](content) if medium in readers else content)
        except InputError as reason:
            reason.item = item
            raise
    return inputs


def split_medium(item: Any, media: Sequence[str], *, model: str) -> tuple[Medium, Any]:
    """Return the medium and the content of an input, or raise if the model does not support it."""
    if type(item) is str and list(media) == ["text"] and lone_surrogate(item) is None:
        return "text", item  # the usual case, for up to millions of texts
    name = next(iter(item)) if isinstance(item, Mapping) and len(item) == 1 else None
    content = item[name] if name in _MEDIA else item
    try:
        medium: Medium = name if name in _MEDIA else medium_of(content, media)
        check_taken(medium, media, content, model=model)
        if medium == "text":
            check_text("inputs", content)
    except (InputError, OptionError) as reason:
        raise InputError(str(reason), item=item) from None
    return medium, content


def is_conversation(item: Any) -> bool:
    """Return whether an input is a message, or a list of messages, for a chat template."""
    if isinstance(item, Mapping):
        return {"role", "content"} <= set(item) and all(isinstance(item[key], str) for key in ("role", "content"))
    messages = item if isinstance(item, list) else []
    return bool(messages) and all(isinstance(message, Mapping) and is_conversation(message) for message in messages)


def is_pair(item: Any) -> bool:
    """Return whether an input is a pair of texts, which sentence-transformers passes to the tokenizer."""
    return isinstance(item, tuple | list) and len(item) == 2 and all(isinstance(text, str) for text in item)


def least_samples(config: Any) -> int:
    r"""Return the number of samples from which the convolutions before a model's blocks make one state.

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


def check_sizes(images: Sequence[Any], items: Sequence[Any], name: str) -> None:
    """Raise if images of a batch differ in size, for a processor that makes something else of them together."""
    sizes = [image.size if is_pil(image) else None for image in images]
    if different := [item for item, size in zip(items, sizes, strict=True) if size != sizes[0]]:
        raise InputError(
            f"The processor of {name} does not bring images to one size, so images of different sizes cannot be in a "
            "batch. Pass batch_size=1, or token_budget=1 to read many layers.",
            item=different[0],
        )


def check_lengths(waveforms: Sequence[Any], items: Sequence[Any], model: nn.Module, processor: Any) -> bool:
    """Raise if a waveform is too short for one state; return whether one is truncated."""
    least = least_samples(model.config)
    lengths = [len(waveform["array"]) for waveform in waveforms]
    for item, length in zip(items, lengths, strict=True):
        if length < least:
            message = f"A waveform must have at least {least} samples for {type(model).__name__}, but has {length}."
            raise InputError(message, item=item)
    longest = getattr(feature_extractor(processor), "n_samples", None)
    return longest is not None and max(lengths) > longest


# --- in the forward pass --------------------------------------------------------------------------------------------


def model_features(model: nn.Module, features: dict[str, Any]) -> dict[str, Any]:
    """Return features as a model needs them.

    Even without a mask, a masked autoencoder shuffles its patches by noise from the global generator: it gets ascending
    noise. A model that was trained without a mask gets none if it hides nothing.
    """
    config: Any = getattr(model, "config", None)
    mask = features.get("attention_mask")
    if hasattr(config, "mask_ratio") and "pixel_values" in features:
        pixels = features["pixel_values"]
        patches = (pixels.shape[-2] // config.patch_size) * (pixels.shape[-1] // config.patch_size)
        noise = torch.arange(float(patches), device=pixels.device).expand(len(pixels), patches)
        features = {**features, "noise": noise}
    return _without_mask(features) if mask is not None and suffers_from_padding(model) and mask.all() else features


def _without_mask(features: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in features.items() if key != "attention_mask"}


def to_device(features: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return features with their tensors on a device."""
    return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in features.items()}


def forward_by_length(forward: Callable[[dict[str, Any]], dict[str, Any]], features: dict[str, Any]) -> dict[str, Any]:
    """Run ``forward`` on unpadded groups of equal length, and return the joined results."""
    if "attention_mask" not in features:
        return forward(features)
    mask = features["attention_mask"]
    starts = mask.int().argmax(dim=1, keepdim=True)  # 0 unless padded on the left
    lengths = mask.sum(dim=1).clamp(min=1)
    groups: list[tuple[Tensor, dict[str, Any]]] = []
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        places = starts[rows] + torch.arange(length, device=mask.device)
        cropped = {key: _crop(value, rows, places, mask.shape[1]) for key, value in _without_mask(features).items()}
        groups.append((rows, forward(cropped)))
    joined = {name: _join_groups(groups, name) for name in ("token_embeddings", "attention_mask")}
    joined["attention_mask"] *= mask.any(dim=1, keepdim=True)  # a text without tokens ran as one token of padding
    return {**features, **joined}


def _crop(value: Any, rows: Tensor, places: Tensor, size: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value[rows[:, None], places] if value.ndim > 1 and value.shape[1] == size else value[rows]


def _join_groups(groups: Sequence[tuple[Tensor, dict[str, Any]]], name: str) -> Tensor:
    """Return the rows of all groups in their original order, padded with zeros."""
    order = torch.cat([rows for rows, _ in groups]).argsort().tolist()
    results = [result for _, group in groups for result in group[name]]
    return pad_sequence([results[row] for row in order], batch_first=True)
