"""Determine the kind of a model by its files and by its attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from midlayer_encoders.models.hub import local_only, weight_files
from midlayer_encoders.reading.batches import LayerSource
from midlayer_encoders.reading.causal import looks_ahead

#: An embedding model, a causal or bidirectional text model, or a model of images or audio.
ModelKind: TypeAlias = Literal["tuned", "causal", "bidirectional", "media"]

KIND_NAMES: Mapping[ModelKind, str] = {
    "tuned": "an embedding model",
    "causal": "a causal language model that was not tuned for embeddings",
    "bidirectional": "a bidirectional model that was not tuned for embeddings",
    "media": "a model of images or audio",
}

_HEAD = re.compile(r"For[A-Z]|Head")  # LlamaForCausalLM, GPT2LMHeadModel, BertForPreTraining, …
_SAMPLE_TEXT = "A few words to see."


@dataclass(frozen=True)
class DetectedKind:
    """The kind of a model, and what shows it.

    Attributes:
        name: the kind.
        evidence: the end of a sentence, such as ``"its folder has modules of sentence-transformers"``.
    """

    name: ModelKind
    evidence: str

    def __str__(self) -> str:
        return f"The model counts as {KIND_NAMES[self.name]}: {self.evidence}."


def detect_kind(source: LayerSource) -> DetectedKind:
    """Return the kind of a model; causal attention is detected by running the model on a few words.

    Modules of sentence-transformers show an embedding model, and so does a bidirectional model that was saved without
    the head of its pretraining. Every other model counts as one that was not tuned for embeddings.

    Args:
        source: the encoder of the whole model.
    """
    if "text" not in source.media:
        return DetectedKind("media", "it takes no text")
    if source.saved.modules:
        return DetectedKind("tuned", "its folder has modules of sentence-transformers")
    model = source.transformer
    is_causal = not looks_ahead(model, source.anatomy, source.model_inputs([_SAMPLE_TEXT]))
    saved_as, saved_class = _saved_as(model), source.saved.saved_class
    head = next(filter(_HEAD.search, saved_as or [parent.__name__ for parent in type(model).__mro__]), None)
    other_parts = {part for part in _saved_parts(source) if not hasattr(model, part)}
    folder = f"its folder is a {saved_class}" if saved_class else "it has no modules"
    if saved_class == "CrossEncoder":
        evidence = f"{folder} of sentence-transformers, which scores pairs of texts"
    elif head:
        evidence = f"{'it was saved as' if saved_as else 'its class is'} {head}, and {folder} of sentence-transformers"
    elif "decoder" in other_parts:
        evidence = f"it was saved with the decoder of its pretraining, and {folder} of sentence-transformers"
    elif not saved_as and getattr(model, "base_model_prefix", "") in other_parts:
        evidence = f"the names of its weights show a head, and {folder} of sentence-transformers"
    elif not is_causal and saved_as and saved_as[0].endswith("Model"):
        return DetectedKind("tuned", f"it was saved as {saved_as[0]}, without the head of its pretraining")
    else:
        evidence = "its files do not show that it was tuned"
    return DetectedKind("causal" if is_causal else "bidirectional", evidence)


def _saved_as(model: Any) -> list[str]:
    """Return the names of the classes that a model was saved as; a config may hold anything there."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    listed = names if isinstance(names, list | tuple) else [names]
    return [name for name in listed if isinstance(name, str)]


def _saved_parts(source: LayerSource) -> set[str]:
    """Return the first parts of the names of a folder's weights, including a head or decoder that was not loaded.

    There are none for a module in memory and for a file of another format.
    """
    folder, revision = source.location[:2]
    names = weight_files(folder, revision, local=local_only(folder, revision)) if folder else ()
    return {name.partition(".")[0] for name in names}
