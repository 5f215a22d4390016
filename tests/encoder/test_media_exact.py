"""Images and audio end to end, compared with the family's own processor and hooks: channels, rates, masks, patch order."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from scipy.io import wavfile
from scipy.signal import resample_poly
from sentence_transformers import SentenceTransformer
from transformers import AutoFeatureExtractor, AutoImageProcessor

from midlayer_encoders import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.reading.media_inputs import InputError
from tests.encoder.test_multimodal import AUDIO_FAMILIES, by_hand, prepared
from tests.models.test_cut import expected_states
from tests.support.families import tiny
from tests.support.made_media import IMAGES, RATE, WAVEFORMS, image, waveform
from tests.support.pooled import pooled
from tests.support.tiny_folders import Folder, processor, save_tiny


def means_by_hand(name: str, items: list[Any]) -> np.ndarray:
    """Return the mean state of each input alone after two blocks, from the family's own processor and hooks."""
    return torch.stack([states.mean(0) for states in by_hand(name, items, 2, "final")]).numpy()


# --- images ----------------------------------------------------------------------------------------------------------


def image_forms(picture: Image.Image, folder: Path) -> dict[str, Any]:
    """Return a color image in the forms users pass."""
    picture.save(folder / "a.png")
    pixels = np.asarray(picture)
    clear = np.dstack([pixels, np.full(pixels.shape[:2], 255, np.uint8)])
    return {
        "PIL": picture, "path": str(folder / "a.png"), "HWC": pixels, "CHW": np.moveaxis(pixels, 2, 0),
        "tensor HWC": torch.tensor(pixels), "tensor CHW": torch.tensor(pixels).movedim(2, 0),
        "floats": pixels / 255.0, "float32 CHW": torch.tensor(pixels).movedim(2, 0).float() / 255, "RGBA": clear,
        "RGBA CHW": np.moveaxis(clear, 2, 0), "PIL RGBA": picture.convert("RGBA"), "named": {"image": picture},
        "named array": {"image": pixels},
    }  # fmt: skip


@pytest.mark.parametrize("name", ["ViT", "CLIPVision", "ImageGPT"])
def test_channel_order_is_kept_in_every_form_of_a_color_image(name: str, tiny_folder: Folder, tmp_path: Path) -> None:
    picture = image(3, (20, 28))
    inputs = image_forms(picture, tmp_path)
    swapped = Image.fromarray(np.asarray(picture)[..., ::-1].copy())
    transposed_picture = picture.transpose(Image.Transpose.TRANSPOSE)
    expected, blue, transposed = means_by_hand(name, [picture, swapped, transposed_picture])
    assert min(np.abs(expected - blue).max(), np.abs(expected - transposed).max()) > 1e-3  # either mistake shows
    vectors = LayerEncoder(tiny_folder(name), 2, device="cpu").encode(list(inputs.values()), batch_size=5)
    for form, vector in zip(inputs, vectors, strict=True):
        np.testing.assert_allclose(vector, expected, atol=3e-5, rtol=1e-4, err_msg=form)


def test_masked_autoencoder_keeps_the_order_of_its_patches(tiny_folder: Folder) -> None:
    """A mean does not show the order; the states themselves and the last state do."""
    encoder = LayerEncoder(tiny_folder("ViTMAE"), 2, device="cpu")
    expected = by_hand("ViTMAE", IMAGES[:3], 2, "final")
    for tokens, states in zip(encoder.encode(IMAGES[:3], output_value="token_embeddings"), expected, strict=True):
        assert states.shape == (17, 32)
        torch.testing.assert_close(tokens, states, atol=3e-5, rtol=1e-4)
    last = LayerEncoder(tiny_folder("ViTMAE"), 2, pooling="last", device="cpu").encode(IMAGES[:3])
    np.testing.assert_allclose(last, torch.stack([states[-1] for states in expected]).numpy(), atol=3e-5, rtol=1e-4)
    # Patches follow the order of the image: before any block, only the last patch depends on the last corner.
    pixels = np.asarray(IMAGES[0].resize((16, 16))).copy()
    changed = pixels.copy()
    changed[12:, 12:] = 255 - changed[12:, 12:]
    embedded = LayerEncoder(tiny_folder("ViTMAE"), 0, norm="none", device="cpu")
    original_tokens, changed_tokens = embedded.encode([pixels, changed], output_value="token_embeddings")
    assert (original_tokens != changed_tokens).any(dim=1).nonzero().flatten().tolist() == [16]


@pytest.mark.parametrize(
    "settings",
    [
        {"do_resize": False, "do_center_crop": False},
        {"do_resize": False, "do_center_crop": False, "do_pad": True},
        {"size": {"shortest_edge": 16}, "do_center_crop": False},
    ],
    ids=["sizes are kept", "padding", "shortest edge"],
)
def test_encode_images_of_many_sizes_is_exact_or_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    """DINOv2 takes images of any size, and has no mask for the padding of a smaller one."""
    save_tiny("DINOv2", tmp_path)
    config = tmp_path / "preprocessor_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    pictures = [image(1, (16, 16)), image(2, (16, 16)), image(3, (32, 16))]
    own_processor, model = AutoImageProcessor.from_pretrained(tmp_path), tiny("DINOv2")
    inputs = [dict(own_processor(picture, return_tensors="pt")) for picture in pictures]
    states = [expected_states("DINOv2", "final", model=model, inputs=features)[2][0] for features in inputs]
    expected = torch.stack([row.mean(dim=0) for row in states]).numpy()
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    np.testing.assert_allclose(encoder.encode(pictures, batch_size=1), expected, atol=3e-5, rtol=1e-4)
    np.testing.assert_allclose(encoder.encode(pictures[:2]), expected[:2], atol=3e-5, rtol=1e-4)
    layers = encoder.encode_layers(pictures, [2], token_budget=1)
    np.testing.assert_allclose(layers[0], expected, atol=3e-5, rtol=1e-4)
    with pytest.raises(InputError, match=r"Input \d: .* images of different sizes cannot be in a batch.*batch_size=1"):
        encoder.encode(pictures)
    with pytest.raises(InputError, match="token_budget=1"):
        encoder.encode_layers(pictures, [2])


# --- audio -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2-stable", "Whisper"])
@pytest.mark.parametrize("rate", [8000, 22050, 48000])
def test_audio_is_resampled_to_the_model_rate(name: str, rate: int, tiny_folder: Folder, tmp_path: Path) -> None:
    samples = waveform(1, rate // 5)[0]
    divisor = np.gcd(rate, RATE)
    resampled = resample_poly(samples, RATE // divisor, rate // divisor).astype(np.float32)
    (expected,) = means_by_hand(name, [(resampled, RATE)])
    (wrong,) = means_by_hand(name, [(samples, RATE)])
    assert np.abs(expected - wrong).max() > 1e-3  # ignoring the rate is detected
    wavfile.write(tmp_path / "a.wav", rate, samples)
    image_forms = [(samples, rate), {"array": samples, "sampling_rate": rate}, str(tmp_path / "a.wav")]
    image_forms += [(torch.tensor(samples), rate), {"audio": (samples, rate)}, (np.stack([samples, samples]), rate)]
    encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
    for vector in encoder.encode(image_forms):
        np.testing.assert_allclose(vector, expected, atol=5e-5, rtol=1e-3)
    np.testing.assert_allclose(encoder.encode((samples, rate)), expected, atol=5e-5, rtol=1e-3)


def test_model_with_another_rate_gets_that_rate(tmp_path: Path) -> None:
    tiny("Wav2Vec2").save_pretrained(tmp_path)  # type: ignore[operator]
    extractor = tf.Wav2Vec2FeatureExtractor(sampling_rate=8000)
    extractor.save_pretrained(tmp_path)
    encoder = LayerEncoder(str(tmp_path), 2, device="cpu")
    assert encoder.sampling_rate == 8000
    samples = WAVEFORMS[0][0]
    slow = resample_poly(samples, 1, 2).astype(np.float32)
    (expected,) = means_by_hand("Wav2Vec2", [(slow, RATE)])  # only the samples matter
    np.testing.assert_allclose(encoder.encode((samples, RATE)), expected, atol=5e-5, rtol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2-stable", "HuBERT", "WavLM", "Whisper"])
def test_short_waveform_in_a_batch_matches_the_waveform_alone(name: str, tiny_folder: Folder) -> None:
    items = [waveform(0, 700), waveform(1, 6000), waveform(2, 700), waveform(3, 2500)]
    encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
    states = by_hand(name, items, 2, "final")
    expected = torch.stack([item_states.mean(0) for item_states in states]).numpy()
    for batch in (1, 2, 4):
        np.testing.assert_allclose(encoder.encode(items, batch_size=batch), expected, atol=5e-5, rtol=1e-3)
    # If the mask were ignored, the short waveform would be mostly padding: the difference is far above the tolerance.
    padded = np.zeros(6000, np.float32)
    padded[:700] = items[0][0]
    assert np.abs(means_by_hand(name, [(padded, RATE)])[0] - expected[0]).max() > 5e-3
    token_states = encoder.encode(items, output_value="token_embeddings")
    for tokens, item_states in zip(token_states, states, strict=True):
        torch.testing.assert_close(tokens[: len(item_states)], item_states, atol=5e-5, rtol=1e-3)
    assert [len(tokens) for tokens in token_states] == [len(item_states) for item_states in states]


def test_attention_mask_is_requested_from_extractors_that_omit_it(tiny_folder: Folder) -> None:
    assert processor("Wav2Vec2-stable").return_attention_mask is False
    items = [waveform(0, 900), waveform(1, 4000)]
    encoder = LayerEncoder(tiny_folder("Wav2Vec2-stable"), 2, device="cpu")
    inputs = encoder.model_inputs(items)
    assert inputs["attention_mask"].sum(dim=1).tolist() == [900, 4000]
    single = prepared("Wav2Vec2-stable", items[0])["input_values"][0]
    torch.testing.assert_close(inputs["input_values"][0, :900], single, atol=1e-5, rtol=1e-4)


def test_audio_model_in_memory_uses_the_attention_mask() -> None:
    items = [waveform(0, 700), waveform(1, 6000), waveform(2, 2500)]
    name = "Wav2Vec2-stable"
    encoder = LayerEncoder.from_module(tiny(name), 2, processor=processor(name), medium="audio", device="cpu")
    np.testing.assert_allclose(encoder.encode(items), means_by_hand(name, items), atol=5e-5, rtol=1e-3)


# --- padding on the left ---------------------------------------------------------------------------------------------

OF_LENGTHS = [waveform(0, 700), waveform(1, 6000), waveform(2, 700), waveform(3, 2503)]


def left_folder(name: str, folder: Path) -> str:
    """Write the family's tiny model with an extractor that pads on the left, and return the folder."""
    save_tiny(name, folder)
    settings = folder / "preprocessor_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"padding_side": "left"}))
    return str(folder)


def left_states(name: str, folder: str) -> list[torch.Tensor]:
    """Return the states of each waveform alone after two blocks of the uncut model, from the folder's own extractor."""
    states = []
    extractor = AutoFeatureExtractor.from_pretrained(folder)
    for samples, rate in OF_LENGTHS:
        inputs = dict(extractor(samples, sampling_rate=rate, return_tensors="pt", return_attention_mask=True))
        mask = inputs.pop("attention_mask")
        (row,) = expected_states(name, "final", model=tiny(name), inputs=inputs)[2]
        states.append(row[mask[0].view(-1, 2).any(dim=1)] if name == "Whisper" else row)
    return states


@pytest.mark.long
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", AUDIO_FAMILIES)
def test_encode_extractor_pads_on_the_left_is_exact(name: str, pooling: Any, tmp_path: Path) -> None:
    folder = left_folder(name, tmp_path / "whole")
    encoder = LayerEncoder(folder, 2, pooling=pooling, device="cpu")
    expected = torch.stack([pooled(states, pooling) for states in left_states(name, folder)]).numpy()
    for batch_size in (1, 2, 4):
        vectors = encoder.encode(OF_LENGTHS, batch_size=batch_size)
        np.testing.assert_allclose(vectors, expected, atol=5e-5, rtol=1e-3, err_msg=f"{batch_size}")
    np.testing.assert_allclose(encoder.encode_layers(OF_LENGTHS, [2])[0], expected, atol=5e-5, rtol=1e-3)
    if name != "Whisper":  # no plain folder pools the states of a waveform in its window
        encoder.save_pretrained(str(tmp_path / "plain"))
        plain = SentenceTransformer(str(tmp_path / "plain"), device="cpu")
        waveforms = [{"array": samples, "sampling_rate": rate} for samples, rate in OF_LENGTHS]
        np.testing.assert_allclose(plain.encode(waveforms, batch_size=1), expected, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("stable", [False, True])
def test_encode_model_with_an_adapter_after_its_blocks_is_exact(stable: bool, tmp_path: Path) -> None:
    """The adapter halves the number of states; every state of a block belongs to the waveform."""
    config = tiny("Wav2Vec2-stable" if stable else "Wav2Vec2").config  # type: ignore[attr-defined]
    config.add_adapter, config.num_adapter_layers = True, 1
    torch.manual_seed(0)
    model = tf.Wav2Vec2Model(config).eval()
    model.save_pretrained(tmp_path)
    processor("Wav2Vec2").save_pretrained(tmp_path)
    expected = []
    for item in OF_LENGTHS:
        with torch.no_grad():
            states = model(**prepared("Wav2Vec2", item), output_hidden_states=True).hidden_states[2][0]
        expected.append(states.mean(dim=0).numpy())
    encoder = LayerEncoder(str(tmp_path), 2, norm="none", device="cpu")
    np.testing.assert_allclose(encoder.encode(OF_LENGTHS), expected, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2-stable"])
def test_from_module_extractor_pads_on_the_left_is_exact(name: str) -> None:
    extractor = processor(name)
    extractor.padding_side = "left"
    encoder = LayerEncoder.from_module(tiny(name), 2, processor=extractor, medium="audio", device="cpu")
    np.testing.assert_allclose(encoder.encode(OF_LENGTHS), means_by_hand(name, OF_LENGTHS), atol=5e-5, rtol=1e-3)
    assert extractor.padding_side == "left"  # the caller's extractor is unchanged


@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2-stable"])
def test_encoder_extractor_returns_no_mask_is_refused(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    def without_mask(self: Any, *args: Any, **options: Any) -> Any:
        features = call(self, *args, **options)
        features.pop("attention_mask", None)
        return features

    call = tf.Wav2Vec2FeatureExtractor.__call__
    save_tiny(name, tmp_path)
    monkeypatch.setattr(tf.Wav2Vec2FeatureExtractor, "__call__", without_mask)
    with pytest.raises(OptionError, match="returns no `attention_mask`"):
        LayerEncoder(str(tmp_path), 2, device="cpu")


def test_encoder_padding_changes_states_at_some_lengths_is_refused(tmp_path: Path) -> None:
    config = tf.ParakeetEncoderConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_mel_bins=16,
        subsampling_conv_channels=8,
    )  # fmt: skip
    torch.manual_seed(0)
    tf.ParakeetEncoder(config).save_pretrained(tmp_path)
    tf.ParakeetFeatureExtractor(feature_size=16).save_pretrained(tmp_path)
    with pytest.raises(OptionError, match=r"another vector in a padded batch than alone: .* at some lengths"):
        LayerEncoder(str(tmp_path), 1, device="cpu")
