"""The prompts that a folder of sentence-transformers keeps, read as ``SentenceTransformer`` reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from midlayer_encoders.encoder.older_versions import read_json
from midlayer_encoders.errors import ModelNotFoundError
from midlayer_encoders.models.hub import local_only, model_file

__all__ = ["SavedPrompts", "saved_prompts"]

logger = logging.getLogger(__name__)

_FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class SavedPrompts:
    """The prompts of a folder.

    Attributes:
        texts: by name.
        default: name of the one that is put before a text when none is asked for.
    """

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None


def saved_prompts(model: str, revision: str | None = None, *, gguf_file: str | None = None) -> SavedPrompts:
    """Return the prompts of a folder, or of a name on the hub; none where ``SentenceTransformer`` finds none.

    Args:
        model: folder or name.
        revision: of the name.
        gguf_file: file of the weights, where that is what there is to ask the hub for.

    Raises:
        ModelNotFoundError: where there is no such model, or the file is not what sentence-transformers writes.
    """
    local = local_only(model, revision, filename=gguf_file or "config.json")
    find = partial(model_file, model, revision=revision, local=local)
    try:
        modules = find("modules.json")
        settings = None if modules is None else find(_FILE)
    except OSError as reason:  # transformers has no other for a name that none can have
        raise ModelNotFoundError(
            f"`model` must be a folder or a name on the hub, but got {model!r}: {reason}"
        ) from reason
    if modules is None or settings is None:
        return SavedPrompts()
    try:
        config = read_json(Path(settings))
        # A reranker's prompts are for pairs, those of other kinds for their own vectors.
        if config.get("model_type", "SentenceTransformer") != "SentenceTransformer":
            return SavedPrompts()
        texts = {name: text or "" for name, text in (config.get("prompts") or {}).items()}
        found = SavedPrompts(texts, config.get("default_prompt_name"))
        if not all(isinstance(text, str) for text in texts.values()):
            raise TypeError("a prompt is no string")
        # As in every SentenceTransformer, these two are there, and empty, where nothing else is said.
        if found.default is not None and found.default not in {"query", "document", *texts}:
            raise ValueError(f"the default, {found.default!r}, is none of the prompts")
        leaves_out = any(texts.values()) and not _pools_prompts(read_json(Path(modules)), find)
    except (AttributeError, TypeError, ValueError) as reason:
        raise ModelNotFoundError(
            f"`model` must hold a {_FILE} whose `prompts` are names and texts, but that of {model!r} is not so "
            f"({reason}). Correct it, or pass `prompts` yourself, {{}} for none."
        ) from reason
    if leaves_out:
        logger.warning(
            "The prompts of %s are not used: its own pooling leaves out their tokens, which this encoder would pool. "
            "Pass `prompts` to have them, pooled with the text, or `prompts={}` for none.", model,
        )  # fmt: skip
    return SavedPrompts() if leaves_out else found


def _pools_prompts(modules: list[dict[str, Any]], find: Any) -> bool:
    """Return whether the pooling counts the tokens of a prompt; Instructor's kind does not."""
    paths = [one["path"] for one in modules if one["type"].endswith(".Pooling")]
    files = [find(f"{path}/config.json") for path in paths]
    return all(read_json(Path(file)).get("include_prompt", True) for file in files if file is not None)
