"""The options of an encoder as keywords, for editors and type checkers.

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

    norm: Norm
    pooling: Pooling | None
    tower: Literal["text", "image"] | None
    revision: str | None
    dtype: torch.dtype | str | None
    device: str | None
    device_map: str | None
    max_length: int | None
    prompts: Mapping[str, str] | None
    default_prompt_name: str | None
    bidirectional: bool
    adapters: Sequence[str]
    chat_template: bool
    gguf_file: str | None
    truncate_dim: int | None
    trust_remote_code: bool
    max_pixels: int
    center: Sequence[str] | None
    recipe: str | Recipe | None
    template: Template | None
    skip_first: int
    template_tokens: bool | None
    whiten: bool
    embed_filter: bool
    normalize: bool
    combine: Combine
    layer_weights: Sequence[float] | None
