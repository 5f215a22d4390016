"""The encoder of a model that also has a decoder, written to a folder that anyone loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from benchmarks import census
from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError


def encoded(encoder: SentenceTransformer) -> torch.Tensor:
    return torch.as_tensor(encoder.encode(census.TEXTS, show_progress_bar=False))


@pytest.mark.parametrize(
    ("model_type", "layer", "norm"), [("bart", 2, "final"), ("mbart", 3, "none"), ("plbart", 0, "final")]
)
def test_it_is_loaded_inside_the_model_that_it_is_of(model_type: str, layer: int, norm: Norm, tmp_path: Path) -> None:
    census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
    vectors, parameters = encoded(encoder), sum(p.numel() for p in encoder.parameters())
    encoder.save_pretrained(str(tmp_path / "plain"))
    plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    torch.testing.assert_close(encoded(plain), vectors)
    assert not list(plain[0].model.decoder.layers)
    # The encoder itself is what it was, and so is what its card says.
    torch.testing.assert_close(encoded(encoder), vectors)
    assert type(encoder.transformer).__name__.endswith("Encoder")
    assert sum(p.numel() for p in encoder.parameters()) == parameters
    assert encoder.model_card_text() == (tmp_path / "plain" / "README.md").read_text()


def test_a_text_may_be_longer_than_its_decoder_reads(tmp_path: Path) -> None:
    census.build("led", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_decoder_position_embeddings"] = 16  # one of the texts has over 100 tokens
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "plain"))
    torch.testing.assert_close(encoded(SentenceTransformer(str(tmp_path / "plain"), device="cpu")), encoded(encoder))


@pytest.mark.parametrize("model_type", ["longt5", "switch_transformers"])
def test_one_that_has_a_class_of_its_own_is_loaded_by_it(model_type: str, tmp_path: Path) -> None:
    census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "plain"))
    plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert type(plain[0].model).__name__.endswith("EncoderModel")
    torch.testing.assert_close(encoded(plain), encoded(encoder))


def test_a_model_that_asks_for_a_second_text_is_not_written(tmp_path: Path) -> None:
    census.build("marian", tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    with pytest.raises(CutError, match="needs a second text"):
        encoder.save_pretrained(str(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "modules.json").exists()
