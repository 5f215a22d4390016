"""The encoder of an encoder-decoder model, saved to a plain folder."""

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


def encode_texts(encoder: SentenceTransformer) -> torch.Tensor:
    return torch.as_tensor(encoder.encode(census.TEXTS, show_progress_bar=False))


@pytest.mark.parametrize(
    ("model_type", "layer", "norm"), [("bart", 2, "final"), ("mbart", 3, "none"), ("plbart", 0, "final")]
)
def test_encoder_is_loaded_inside_its_encoder_decoder_model(
    model_type: str, layer: int, norm: Norm, tmp_path: Path
) -> None:
    census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), layer, norm=norm, device="cpu")
    vectors, parameters = encode_texts(encoder), sum(p.numel() for p in encoder.parameters())
    encoder.save_pretrained(str(tmp_path / "plain"))
    plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    torch.testing.assert_close(encode_texts(plain), vectors)
    assert not list(plain[0].model.decoder.layers)
    # Saving changes neither the encoder nor its card.
    torch.testing.assert_close(encode_texts(encoder), vectors)
    assert type(encoder.transformer).__name__.endswith("Encoder")
    assert sum(p.numel() for p in encoder.parameters()) == parameters
    assert encoder.model_card_text() == (tmp_path / "plain" / "README.md").read_text()


def test_text_may_be_longer_than_the_decoder_allows(tmp_path: Path) -> None:
    census.build("led", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["max_decoder_position_embeddings"] = 16  # one of the texts has over 100 tokens
    (tmp_path / "config.json").write_text(json.dumps(config))
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "plain"))
    torch.testing.assert_close(
        encode_texts(SentenceTransformer(str(tmp_path / "plain"), device="cpu")), encode_texts(encoder)
    )


@pytest.mark.parametrize("model_type", ["longt5", "switch_transformers"])
def test_encoder_with_its_own_class_is_loaded_by_that_class(model_type: str, tmp_path: Path) -> None:
    census.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "plain"))
    plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert type(plain[0].model).__name__.endswith("EncoderModel")
    torch.testing.assert_close(encode_texts(plain), encode_texts(encoder))


def test_model_that_needs_a_second_text_is_not_saved(tmp_path: Path) -> None:
    census.build("marian", tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    with pytest.raises(CutError, match="needs a second text"):
        encoder.save_pretrained(str(tmp_path / "plain"))
    assert not (tmp_path / "plain" / "modules.json").exists()
