"""The encoder of an encoder-decoder model, saved to a plain folder."""

from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import CutError
from tests.support import tiny_types


def encode_texts(encoder: SentenceTransformer) -> torch.Tensor:
    return torch.as_tensor(encoder.encode(tiny_types.TEXTS, show_progress_bar=False))


@pytest.mark.parametrize("model_type", ["longt5", "switch_transformers"])
def test_encoder_with_its_own_class_is_loaded_by_that_class(model_type: str, tmp_path: Path) -> None:
    tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    encoder.save_pretrained(str(tmp_path / "plain"))
    plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
    assert type(plain[0].model).__name__.endswith("EncoderModel")
    torch.testing.assert_close(encode_texts(plain), encode_texts(encoder))


@pytest.mark.parametrize("model_type", ["bart", "marian"])
def test_encoder_without_a_class_of_its_own_is_not_saved(model_type: str, tmp_path: Path) -> None:
    tiny_types.build(model_type, tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    with pytest.raises(CutError, match="is part of an encoder-decoder, which a plain folder loads whole"):
        encoder.save_pretrained(str(tmp_path / "plain"))
    assert not (tmp_path / "plain").exists()
