"""Every layer from one pass, compared with an encoder cut at each layer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import LayerIndexError, OptionError
from tests.support.made_media import IMAGES, WAVEFORMS
from tests.support.tiny_folders import TEXTS, Folder, save_joint


@pytest.mark.parametrize(
    ("family", "inputs", "options"),
    [
        ("Llama", TEXTS, {}),
        ("Llama", TEXTS, {"recipe": "one-word", "norm": "none", "truncate_dim": 5}),
        ("Llama", TEXTS, {"normalize": True, "truncate_dim": 5}),
        ("BERT", TEXTS, {"pooling": "cls", "prompts": {"q": "query: "}, "default_prompt_name": "q"}),
        ("ViT", IMAGES, {}),
        ("Wav2Vec2", WAVEFORMS, {}),
    ],
)
def test_each_row_matches_the_encoder_cut_at_that_layer(
    family: str, inputs: list[Any], options: dict[str, Any], tiny_folder: Folder
) -> None:
    folder = tiny_folder(family)
    encoder = LayerEncoder(folder, -1, device="cpu", **options)
    layers = encoder.encode_layers(inputs)
    assert layers.shape[:2] == (encoder.num_layers + 1, len(inputs))
    for layer, vectors in enumerate(layers):
        cut = LayerEncoder(folder, layer, device="cpu", **options)
        np.testing.assert_allclose(vectors, cut.encode(inputs, batch_size=1), atol=2e-5, rtol=1e-4)


def test_shapes_types_and_prompts(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", prompts={"q": "query: "})
    vectors = encoder.encode_layers(TEXTS, [0, 0.5, -1], convert_to_tensor=True, token_budget=40)
    assert isinstance(vectors, torch.Tensor)
    np.testing.assert_allclose(vectors, encoder.encode_layers(TEXTS)[[0, 2, 4]], atol=1e-5)
    assert encoder.encode_layers(TEXTS[0], [1]).shape == (1, vectors.shape[2])
    assert encoder.encode_layers([]).shape == (5, 0, vectors.shape[2])
    for prompt_kwargs in ({"prompt_name": "q"}, {"prompt": "query: "}):
        expected = encoder.encode(TEXTS, batch_size=1, **prompt_kwargs)
        np.testing.assert_allclose(encoder.encode_layers(TEXTS, [-1], **prompt_kwargs)[0], expected, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize(("token_budget", "num_passes"), [(1, 6), (10**6, 1), ("auto", 1)])
def test_token_budget_bounds_the_batches(token_budget: Any, num_passes: int, tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("GPT2"), 1, device="cpu")
    encoder.encode_layers(TEXTS)  # tries once whether the model needs its mask
    sizes: list[int] = []
    encoder.transformer.register_forward_pre_hook(
        lambda _, __, inputs: sizes.append(len(inputs["input_ids"])), with_kwargs=True
    )
    encoder.encode_layers(TEXTS, token_budget=token_budget)
    assert (len(sizes), sum(sizes)) == (num_passes, len(TEXTS))


def test_invalid_calls_are_refused(tiny_folder: Folder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    with pytest.raises(LayerIndexError, match=r"in \[0, 4\]"):
        encoder.encode_layers(TEXTS, [9])
    with pytest.raises(OptionError, match="`prompt_name` must be one of"):
        encoder.encode_layers(TEXTS, prompt_name="qeury")
    with pytest.raises(OptionError, match=r"has the module Dense\. Create it without `center`"):
        LayerEncoder(
            tiny_folder("Llama"), -1, device="cpu", center=[f"text {number}" for number in range(16)]
        ).encode_layers(TEXTS)
    with pytest.raises(OptionError, match=r"has the module Dense\. Create it without `center`"):
        LayerEncoder(
            save_joint("CLIP", tmp_path), -1, device="cpu", center=[f"text {number}" for number in range(16)]
        ).encode_layers(TEXTS)
    with pytest.raises(OptionError, match="`prompt` does not apply to images"):
        LayerEncoder(tiny_folder("ViT"), -1, device="cpu").encode_layers(IMAGES, prompt="a photo: ")
    encoder.encode_layers(TEXTS, [0], show_progress_bar=True)
    assert "6/6" in capsys.readouterr().err
