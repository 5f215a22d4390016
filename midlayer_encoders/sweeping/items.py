"""What tasks hold: the key under which a text, image or waveform is stored, and the images or audio of a task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from midlayer_encoders.media import is_pil, read_audio, read_image
from midlayer_encoders.store import text_key

__all__ = ["item_key", "task_media"]


def item_key(item: Any, prompt: str = "") -> str:
    """Return the key of a text under a prompt, of an image by its pixels, of a waveform by its samples."""
    if isinstance(item, str):
        return text_key(item, prompt)
    if is_pil(item):
        # As the model sees it: images with a palette have equal bytes and other colors.
        seen = read_image(item, max_pixels=max(item.width * item.height, 1))
        head, content = f"{seen.mode} {seen.size} ", seen.tobytes()
    else:
        waveform = read_audio(item)
        head, content = f"{waveform['sampling_rate']} ", waveform["array"].tobytes()
    digest = hashlib.blake2b(head.encode(), digest_size=16)
    digest.update(content)
    return digest.hexdigest()


def task_media(task: Any, medium: str) -> list[Any]:
    """Return the images or audio of a task, in the order in which they stand in its data."""
    if not task.data_loaded:
        task.load_data()
    return list(_media(task.dataset, medium))


def _media(data: Any, medium: str) -> Iterator[Any]:
    """Every image or waveform in datasets nested in subsets and splits: the columns that datasets decodes as such."""
    if hasattr(data, "features") and hasattr(data, "column_names") and not isinstance(data.column_names, dict):
        for column, feature in data.features.items():
            if type(feature).__name__.lower() == medium:
                yield from (item for item in data[column] if item is not None)
    elif isinstance(data, Mapping):
        for item in data.values():
            yield from _media(item, medium)
