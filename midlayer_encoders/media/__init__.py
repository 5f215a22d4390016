"""Images and sounds as people have them, read into one form each: an RGB image, one channel of sound and its rate."""

from __future__ import annotations

from midlayer_encoders.media._arrays import InputError
from midlayer_encoders.media.audio import Sound, audio_lengths, read_sound
from midlayer_encoders.media.images import is_pil, read_image
from midlayer_encoders.media.kinds import check_taken, media_files, medium_of

__all__ = [
    "InputError",
    "Sound",
    "audio_lengths",
    "check_taken",
    "is_pil",
    "media_files",
    "medium_of",
    "read_image",
    "read_sound",
]
