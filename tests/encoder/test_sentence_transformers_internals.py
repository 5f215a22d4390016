"""Assumptions of `encoder/sentence_transformers_internals.py` about sentence-transformers: each test fails when a release changes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.encoder.sentence_transformers_internals import transformer_around
from tests.support.families import tiny

Folder = Callable[[str], str]


class Titled(LayerEncoder):
    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        return f"# our own card for {repository} at {branch}"


def make_encoder(folder: str) -> Titled:
    return Titled(folder, -1, device="cpu")


def test_module_is_plain_and_holds_the_loaded_model(tiny_folder: Folder) -> None:
    model: Any = tiny("BERT", seed=1)  # not the weights in the folder
    module = transformer_around(model, tiny_folder("BERT"), {"model_max_length": 7}, {})
    assert type(module) is Transformer
    assert module.model is model
    assert module.config is model.config
    assert module.tokenizer.model_max_length == 7
    features = module.preprocess(["a text"])
    with torch.no_grad():
        expected = model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state
        torch.testing.assert_close(module(features)["token_embeddings"], expected)


def test_constructor_calls_the_two_overridden_methods() -> None:
    for name in ("_load_config", "_load_model"):
        assert callable(getattr(Transformer, name))
        assert f"self.{name}(" in inspect.getsource(Transformer.__init__)


def test_folder_has_our_card_and_loads_as_a_plain_one(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = make_encoder(tiny_folder("BERT"))
    encoder.save_pretrained(str(tmp_path))
    assert (tmp_path / "README.md").read_text() == "# our own card for None at None"
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    assert (encoder.encode(["a text"]) == plain.encode(["a text"])).all()


def test_trainer_loads_its_best_checkpoint_as_a_plain_one(tiny_folder: Folder, tmp_path: Path) -> None:
    from sentence_transformers.base import trainer

    make_encoder(tiny_folder("BERT")).save_pretrained(str(tmp_path))
    assert "._load_with_module_classes(" in inspect.getsource(trainer)
    loaded = Titled._load_with_module_classes(str(tmp_path), {}, device="cpu")
    assert type(loaded) is SentenceTransformer
    assert loaded.encode(["a text"]).shape == (1, 32)
