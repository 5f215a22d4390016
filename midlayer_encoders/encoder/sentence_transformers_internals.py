"""The private parts of sentence-transformers that this package relies on.

``tests/encoder/test_sentence_transformers_internals.py`` fails when a release renames one of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from torch import nn

from midlayer_encoders.files import read_json, write_json


def transformer_around(
    loaded: nn.Module, model: str, processor_options: dict[str, Any], settings: Mapping[str, Any]
) -> Any:
    """Return sentence-transformers' module around a loaded model, with its processor.

    The constructor of ``Transformer`` only loads complete models, so a subclass overrides its loading methods.

    Args:
        loaded: the model.
        model: folder or name on the hub of the processor.
        processor_options: of ``AutoProcessor.from_pretrained``.
        settings: other keywords of ``Transformer``.
    """

    class Loaded(Transformer):
        def _load_config(self, *_: Any, **__: Any) -> tuple[Any, bool]:
            return loaded.config, False

        def _load_model(self, *_: Any, **__: Any) -> Any:
            return loaded

    module = Loaded(model, processor_kwargs=processor_options, **settings)
    module.__class__ = Transformer
    return module


@contextmanager
def tokenizer_alone(model: str, options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a folder with only the tokenizer of a model whose processor requires an image with each text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model, **options)
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        path = Path(folder, "tokenizer_config.json")
        config = read_json(path)
        config.pop("processor_class", None)
        write_json(path, config)
        yield folder


class _WithoutTransformer(SentenceTransformer):
    """The ``SentenceTransformer`` of a folder, with a placeholder for its first module."""

    first_type: str | None = None

    def _load_module_class_from_ref(self, class_ref: str, *args: Any, **kwargs: Any) -> Any:
        if self.first_type is not None:
            return super()._load_module_class_from_ref(class_ref, *args, **kwargs)
        self.first_type = class_ref
        return _Placeholder


class _Placeholder(nn.Module):
    """Holds the settings of a ``Transformer`` module instead of its model."""

    settings: dict[str, Any]
    path: str

    @classmethod
    def load(cls, model: str, **kwargs: Any) -> Self:
        names = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
        placeholder = cls()
        placeholder.path = kwargs["subfolder"]
        placeholder.settings = Transformer.load_config(model, **{name: kwargs[name] for name in names})
        return placeholder


def without_transformer(model: str, **options: Any) -> Any:
    """Return the ``SentenceTransformer`` of a folder or name on the hub without its transformer.

    Its first module has only the attributes ``settings``, the keywords of the folder's ``Transformer``, and ``path``,
    its subfolder. ``first_type`` is the type of that module.
    """
    return _WithoutTransformer(model, device="cpu", **options)


def prompt_length(first: Any, prompt: str) -> int:
    """Return the number of tokens of a prompt before a text, which a pooling may leave out."""
    return first._get_prompt_length(prompt) or 0


def encoding_order(encoder: SentenceTransformer, inputs: Sequence[Any]) -> list[int] | None:
    """Return the order in which ``encode`` processes its inputs, longest first, or ``None`` if it is unknown."""
    length: Any = getattr(encoder, "_input_length", None) or getattr(encoder, "_text_length", None)
    return None if length is None else np.argsort([-length(item) for item in inputs]).tolist()
