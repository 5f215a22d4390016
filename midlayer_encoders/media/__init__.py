"""Reading of images as RGB, of audio as one channel with its rate, and of lists of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midlayer_encoders.errors import deprecated_names
from midlayer_encoders.media.inputs import (
    InputError,
    Waveform,
    audio_lengths,
    check_taken,
    is_pil,
    media_files,
    medium_of,
    read_audio,
    read_image,
)

__all__ = [
    "InputError",
    "Waveform",
    "audio_lengths",
    "check_taken",
    "is_pil",
    "media_files",
    "medium_of",
    "read_audio",
    "read_image",
]

if not TYPE_CHECKING:  # otherwise type checkers would accept any name
    __getattr__ = deprecated_names(__name__, {"read_sound": "read_audio", "Sound": "Waveform"})
