"""What README's first example prints."""

import re

import numpy as np
import pytest

from midlayer_encoders import LayerEncoder
from tests.docs.stated import ROOT


@pytest.mark.docs
def test_readme_prints_the_layer_and_the_similarities_of_the_encoder() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf8")
    (texts,) = re.findall(r"encoder\.encode\(\[(.*)\]\)", text)
    ((layer, recipe),) = re.findall(r"# (\d+) (word-echo)\n", text)
    (similarities,) = re.findall(r"# tensor\(\[(.*)\]\)", text)
    encoder = LayerEncoder("built-in", "auto")
    vectors = encoder.encode(re.findall(r'"([^"]*)"', texts))
    assert (encoder.layer, encoder.options.recipe) == (int(layer), recipe)
    printed = [float(number) for number in similarities.split(",")]
    np.testing.assert_allclose(encoder.similarity(vectors, vectors)[0], printed, atol=6e-5)
