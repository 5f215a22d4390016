"""The private parts of sentence-transformers that this package relies on.

``tests/encoder/test_sentence_transformers_internals.py`` fails when a release renames one of them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

__all__ = ["PlainOnDisk", "encoding_order", "tokenizer_alone", "transformer_around"]


def transformer_around(loaded: nn.Module, model: str, processor_options: dict[str, Any]) -> Any:
    """Return sentence-transformers' own module around a model that is loaded already, with its processor.

    Its constructor knows only how to load a model whole, so the two methods that load are overridden while it runs;
    what is returned is a plain ``Transformer``.

    Args:
        loaded: the model.
        model: folder or name on the hub that the processor is read from.
        processor_options: of ``AutoProcessor.from_pretrained``.
    """

    class Loaded(Transformer):
        def _load_config(self, *_: Any, **__: Any) -> tuple[Any, bool]:
            return loaded.config, False

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return loaded

    module = Loaded(model, processor_kwargs=processor_options)
    module.__class__ = Transformer
    return module


@contextmanager
def tokenizer_alone(model: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Hand out a folder with the tokenizer of a model that has a processor of several media too.

    Where transformers finds the name of a processor it makes that one, which takes no text without an image.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        settings = Path(folder, "tokenizer_config.json")
        kept = json.loads(settings.read_text(encoding="utf8"))
        kept.pop("processor_class", None)
        settings.write_text(json.dumps(kept), encoding="utf8")
        yield folder


def encoding_order(encoder: SentenceTransformer, inputs: Sequence[Any]) -> list[int] | None:
    """Return the order in which ``encode`` takes its inputs, the longest first, or ``None`` where that is not known.

    It tells nobody, so that its next batch could not be prepared while one is on the device.
    """
    length: Any = getattr(encoder, "_input_length", None) or getattr(encoder, "_text_length", None)
    return None if length is None else np.argsort([-length(one) for one in inputs]).tolist()


class PlainOnDisk(SentenceTransformer):
    """A SentenceTransformer whose folder is that of a plain one, with a card of its own."""

    _branch: str | None = None  # that is pushed to, while it is

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README of a folder, or of a repository on the hub."""
        raise NotImplementedError

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Upload the folder as ``SentenceTransformer`` does; its card says how to load it from there."""
        given = inspect.signature(SentenceTransformer.push_to_hub).bind(self, *args, **kwargs)
        self._branch = given.arguments.get("revision")
        if given.arguments.get("commit_message") is None:
            given.arguments["commit_message"] = "Add new SentenceTransformer model"  # which it is there, not this class
        try:
            return super().push_to_hub(*given.args[1:], **given.kwargs)
        finally:
            self._branch = None

    def _create_model_card(self, path: str, model_name: str | None = None, *_: Any, **__: Any) -> None:
        """Write our own card: the generated one names the subclass and guesses the lineage, and has no setting."""
        text = self.model_card_text(model_name, self._branch)
        Path(path, "README.md").write_text(text, encoding="utf8")

    def _push_to_hub_usage_tip(self, repo_id: str) -> str:
        """Return what a pull request says: how to load the class that is uploaded, not this one."""
        return str(super()._push_to_hub_usage_tip(repo_id)).replace(type(self).__name__, SentenceTransformer.__name__)

    @classmethod
    def _load_with_module_classes(cls, *args: Any, **kwargs: Any) -> Any:
        """Load a checkpoint as what it is on disk, where the trainer loads its best one by the class of the model."""
        return SentenceTransformer._load_with_module_classes(*args, **kwargs)
