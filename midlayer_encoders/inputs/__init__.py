"""Images and sounds as people have them, read into one form each: an RGB image, one channel of sound and its rate."""

from __future__ import annotations

from midlayer_encoders.inputs._common import InputError
from midlayer_encoders.inputs.images import MAX_PIXELS, is_pil, read_image
from midlayer_encoders.inputs.media import Medium, check_taken, media_files, medium_of
from midlayer_encoders.inputs.sounds import Sound, read_sound

__all__ = [
    "MAX_PIXELS",
    "InputError",
    "Medium",
    "Sound",
    "check_taken",
    "is_pil",
    "media_files",
    "medium_of",
    "read_image",
    "read_sound",
]
