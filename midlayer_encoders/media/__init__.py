"""Reading of images as RGB, of audio as one channel with its rate, and of lists of texts."""

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
