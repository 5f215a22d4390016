"""Write ``encoder/keywords.py`` from the fields of ``EncoderOptions``: ``python -m tests.encoder.generate_keywords``."""

from __future__ import annotations

from pathlib import Path

import midlayer_encoders
from midlayer_encoders.encoder.options import option_fields

PATH = Path(midlayer_encoders.__file__).parent / "encoder" / "keywords.py"

_HEAD = '''"""The options of an encoder as keywords, for editors and type checkers.

Generated from ``EncoderOptions`` by ``python -m tests.encoder.generate_keywords``; do not edit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypedDict

from midlayer_encoders._types import Combine, Norm, Pooling
from midlayer_encoders.recipes import Recipe, Template

if TYPE_CHECKING:
    import torch


class EncoderKeywords(TypedDict, total=False):
    """The keywords of :class:`~midlayer_encoders.EncoderOptions`."""

'''


def source() -> str:
    """Return the text of the module."""
    types = {name: option.metadata.get("accepts", option.type) for name, option in option_fields().items()}
    return _HEAD + "".join(f"    {name}: {type_}\n".replace("'", '"') for name, type_ in types.items())


if __name__ == "__main__":
    PATH.write_text(source())
