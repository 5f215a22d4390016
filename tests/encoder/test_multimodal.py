"""LayerEncoder for images and audio: exact layers in every family, batches, export, and user errors."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer

from midlayer_encoders import LayerEncoder
from midlayer_encoders._types import NORMS, POOLINGS, Norm
from midlayer_encoders.errors import CutError, OptionError
from midlayer_encoders.reading.media_inputs import InputError
from tests.models.test_cut import expected_states
from tests.support.families import DEPTH, FAMILIES, tiny
from tests.support.made_media import IMAGES, RATE, WAVEFORMS
from tests.support.pooled import pooled
from tests.support.tiny_folders import TEXTS, Folder, processor

IMAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.modality in ("image", "pixels")]
AUDIO_FAMILIES = [name for name, family in FAMILIES.items() if family.modality in ("audio", "mel")]


def prepared(name: str, item: Any) -> dict[str, torch.Tensor]:
    """Return one input prepared by the family's own processor."""
    if name in AUDIO_FAMILIES:
        return dict(processor(name)([item[0]], sampling_rate=item[1], return_tensors="pt"))
    features = dict(processor(name)([item], return_tensors="pt"))
    return features | ({"noise": torch.arange(16.0)[None]} if name == "ViTMAE" else {})


def by_hand(name: str, items: list[Any], layer: int, norm: Norm) -> list[torch.Tensor]:
    """Return the states of each input alone, from hooks on the uncut model; for Whisper, those before the waveform's end."""
    model, states = tiny(name), []
    for item in items:
        item_states = expected_states(name, norm, model=model, inputs=prepared(name, item))[layer][0]
        states.append(item_states[: -(-len(item[0]) // 800)] if name == "Whisper" else item_states)
    return states


# test_cut compares every layer of every family; these tests cover preprocessing and pooling.
@pytest.mark.parametrize(("norm", "layers"), [("final", (0, 2)), ("none", (DEPTH,))])
@pytest.mark.parametrize("name", [*IMAGE_FAMILIES, *AUDIO_FAMILIES])
def test_layer_vector_is_the_mean_of_the_hooked_states(
    name: str, norm: Norm, layers: tuple[int, ...], tiny_folder: Folder
) -> None:
    items = (IMAGES if name in IMAGE_FAMILIES else WAVEFORMS)[:3]
    for layer in layers:
        encoder = LayerEncoder(tiny_folder(name), layer, norm=norm, device="cpu")
        assert (encoder.layer, encoder.num_layers, encoder.media) == (
            layer, DEPTH, ["image" if name in IMAGE_FAMILIES else "audio"],
        )  # fmt: skip
        expected = torch.stack([states.mean(0) for states in by_hand(name, items, layer, norm)])
        vectors = encoder.encode(items, batch_size=2)
        np.testing.assert_allclose(vectors, expected.numpy(), atol=3e-5, rtol=1e-4, err_msg=f"layer {layer}")


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("name", ["Wav2Vec2", "Wav2Vec2-stable", "Whisper"])
def test_every_pooling_uses_real_states_only(name: str, pooling: str, tiny_folder: Folder) -> None:
    items = (IMAGES if name in IMAGE_FAMILIES else WAVEFORMS)[:3]
    encoder = LayerEncoder(tiny_folder(name), 2, pooling=pooling, device="cpu")  # type: ignore[arg-type]
    expected = torch.stack([pooled(states, pooling) for states in by_hand(name, items, 2, "final")])
    np.testing.assert_allclose(encoder.encode(items), expected.numpy(), atol=3e-5, rtol=1e-4)


def test_token_embeddings_of_images_and_waveforms_are_complete(tiny_folder: Folder) -> None:
    for name, items in (("DINOv2", IMAGES), ("HuBERT", WAVEFORMS)):
        encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
        token_states = encoder.encode(items[:3], output_value="token_embeddings")
        for states, expected in zip(token_states, by_hand(name, items[:3], 2, "final"), strict=True):
            torch.testing.assert_close(states, expected, atol=3e-5, rtol=1e-4)


def test_masking_is_off_and_the_global_generator_is_unchanged(tiny_folder: Folder, tmp_path: Path) -> None:
    import transformers as tf

    model = tiny("ViTMAE")
    model.config.mask_ratio = 0.75  # as in the files of the hub
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    processor("ViTMAE").save_pretrained(tmp_path)
    assert tf.ViTMAEConfig.from_pretrained(tmp_path).mask_ratio == 0.75
    encoder = LayerEncoder(str(tmp_path), 2, pooling="last", device="cpu")
    before = torch.random.get_rng_state()
    vectors = encoder.encode(IMAGES)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(encoder.encode(IMAGES), vectors)
    np.testing.assert_allclose(
        vectors, LayerEncoder(tiny_folder("ViTMAE"), 2, pooling="last", device="cpu").encode(IMAGES)
    )


# --- accepted inputs ------------------------------------------------------------------------------------------------


def test_paths_arrays_tensors_and_modes_of_an_image_give_one_vector(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("ViT"), 2, device="cpu")
    gray = IMAGES[0].convert("L")
    gray.save(tmp_path / "a.png")
    pixels = np.asarray(gray)
    expected = encoder.encode(gray.convert("RGB"))
    forms = [gray, str(tmp_path / "a.png"), tmp_path / "a.png", pixels, pixels[..., None], torch.tensor(pixels)]
    forms += [pixels / 255.0, gray.convert("RGBA"), gray.convert("P"), gray.convert("LA"), {"image": gray}]
    for form in forms:
        np.testing.assert_allclose(encoder.encode([form])[0], expected, atol=1e-6)
    np.testing.assert_allclose(encoder.encode(tmp_path / "a.png"), expected, atol=1e-6)


def test_one_pixel_equals_an_image_of_that_color(tiny_folder: Folder) -> None:
    from PIL import Image

    for name in ("ViT", "CLIPVision", "ImageGPT"):
        encoder = LayerEncoder(tiny_folder(name), 2, device="cpu")
        pair = encoder.encode([Image.new("RGB", (1, 1), (200, 30, 90)), Image.new("RGB", (16, 16), (200, 30, 90))])
        np.testing.assert_allclose(pair[0], pair[1], atol=1e-5, err_msg=name)


def test_forms_channels_and_rates_of_a_waveform_give_one_vector(tiny_folder: Folder, tmp_path: Path) -> None:
    from scipy.io import wavfile
    from scipy.signal import resample_poly

    encoder = LayerEncoder(tiny_folder("Wav2Vec2"), 2, device="cpu")
    assert encoder.sampling_rate == RATE
    samples = (0.2 * WAVEFORMS[0][0]).astype(np.float32)
    wavfile.write(tmp_path / "a.wav", RATE, samples)
    expected = encoder.encode((samples, RATE))
    assert expected.shape == (32,)
    np.testing.assert_array_equal(encoder.encode((samples, np.int64(RATE))), expected)
    assert encoder.encode([(samples[:20], RATE)]).any()  # the shortest waveform of one state
    stereo = np.stack([samples + 0.01, samples - 0.01])
    forms = [{"array": samples, "sampling_rate": RATE}, str(tmp_path / "a.wav"), tmp_path / "a.wav", (stereo, RATE)]
    forms += [(stereo.T, RATE), (torch.tensor(samples), RATE), {"audio": {"array": samples, "sampling_rate": RATE}}]
    for form in forms:
        np.testing.assert_allclose(encoder.encode([form])[0], expected, atol=1e-4)
    fast = resample_poly(samples, 3, 1)
    by_rate = encoder.encode([(fast, 3 * RATE), (resample_poly(fast, 1, 3), RATE)])
    np.testing.assert_allclose(by_rate[0], by_rate[1], atol=1e-5)
    assert np.abs(encoder.encode((fast, RATE)) - expected).max() > 1e-2  # the wrong rate gives a different waveform


@pytest.mark.parametrize(
    ("name", "item", "message"),
    [
        ("ViT", "no such file.png", "There is no file 'no such file.png'"),
        ("ViT", WAVEFORMS[0], "must each be an image for ViT.*, but got a waveform"),
        ("Wav2Vec2", IMAGES[0], "must each be a waveform for Wav2Vec2.*, but got an image"),
        ("Llama", IMAGES[0], "must each be a text for Llama.*, but got an image"),
        ("Wav2Vec2", (np.zeros(0, dtype=np.float32), RATE), "Input 0: .*at least one sample"),
        ("Wav2Vec2", (np.ones(5, dtype=np.float32), RATE), r"Input 0: .*at least 20 samples for .*, but has 5"),
        (
            "Wav2Vec2",
            (np.ones(500, dtype=np.float32), 0),
            "must have a positive number of samples per second, but got 0",
        ),
        ("Wav2Vec2", np.ones(500, dtype=np.float32), r"must come with its rate"),
    ],
)
def test_invalid_input_error_names_the_input(name: str, item: Any, message: str, tiny_folder: Folder) -> None:
    with pytest.raises(InputError, match=message):
        LayerEncoder(tiny_folder(name), 1, device="cpu").encode([item])


def test_huge_or_corrupt_image_error_names_its_position(tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder("ViT"), 1, device="cpu", max_pixels=1000)
    with pytest.raises(InputError, match=r"Input 1: `max_pixels` is 1000.*40 x 40 = 1600"):
        encoder.encode([IMAGES[0], IMAGES[1].resize((40, 40))])
    (tmp_path / "bad.jpg").write_bytes(b"\xff\xd8 not a photograph")
    with pytest.raises(InputError, match=r"bad\.jpg cannot be read as an image"):
        encoder.encode([tmp_path / "bad.jpg"])


def test_waveform_longer_than_the_window_is_truncated_with_one_warning(
    tiny_folder: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = LayerEncoder(tiny_folder("Whisper"), 2, device="cpu")
    long_waveform = (np.tile(WAVEFORMS[0][0], 12), RATE)
    with caplog.at_level(logging.WARNING, logger="midlayer_encoders.encoder.encoding"):
        encoder.encode([(long_waveform[0][:RATE], RATE)])
        assert not caplog.records  # it fills the window
        vectors = encoder.encode([long_waveform, (long_waveform[0][:RATE], RATE)])
        encoder.encode([long_waveform])
    assert sum("is truncated" in record.message for record in caplog.records) == 1
    assert "longer than the window" in caplog.text
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-4)


# --- the plain folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        *((name, "final") for name in [*IMAGE_FAMILIES, *AUDIO_FAMILIES] if name != "Whisper"),
        ("DINOv2", "none"),
        ("Wav2Vec2", "none"),
    ],
)
def test_exported_folder_gives_the_same_vectors(name: str, norm: Norm, tiny_folder: Folder, tmp_path: Path) -> None:
    encoder = LayerEncoder(tiny_folder(name), 2, norm=norm, device="cpu")
    encoder.save_pretrained(str(tmp_path))
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    items = (
        IMAGES[:3]
        if name in IMAGE_FAMILIES
        else [{"array": array, "sampling_rate": rate} for array, rate in WAVEFORMS[:3]]
    )
    # A plain folder pools padded waveforms with their padding, so each is encoded alone.
    vectors = plain.encode(items, batch_size=3 if name in IMAGE_FAMILIES else 1)
    np.testing.assert_allclose(vectors, encoder.encode(items), atol=2e-5, rtol=1e-4)
    assert f"Layer 2 of {encoder.name}\n" in (tmp_path / "README.md").read_text()


def test_folder_that_cannot_exclude_padding_is_refused(tiny_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(CutError, match="fill a fixed window, whose end a plain folder pools"):
        LayerEncoder(tiny_folder("Whisper"), 2, device="cpu").save_pretrained(str(tmp_path))
    encoder = LayerEncoder(tiny_folder("Whisper"), 2, pooling="cls", device="cpu")
    encoder.save_pretrained(str(tmp_path))
    plain = SentenceTransformer(str(tmp_path), device="cpu")
    item = {"array": WAVEFORMS[0][0], "sampling_rate": RATE}
    np.testing.assert_allclose(plain.encode([item]), encoder.encode([item]), atol=1e-5)


# --- a module in memory --------------------------------------------------------------------------------------------


class Trunk(torch.nn.Module):
    """A stack similar to AIM: patches, blocks under a custom path, a norm, and an unused head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, 8, 8)
        layer = lambda: torch.nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)  # noqa: E731
        self.trunk = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(layer() for _ in range(3))})
        self.norm = torch.nn.LayerNorm(16)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        states = self.patches(pixels).flatten(2).transpose(1, 2)
        for block in self.trunk["blocks"]:  # type: ignore[attr-defined]
            states = block(states)
        return self.norm(states).mean(1)


def to_pixels(images: list[Any]) -> torch.Tensor:
    arrays = [np.asarray(image.resize((16, 16)), dtype=np.float32) / 255 for image in images]
    return torch.tensor(np.stack(arrays)).movedim(3, 1)


def test_plain_module_gives_every_layer_of_its_blocks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Trunk().eval()
    expected = [module.patches(to_pixels(IMAGES)).flatten(2).transpose(1, 2)]
    for block in module.trunk["blocks"]:  # type: ignore[attr-defined]
        expected.append(block(expected[-1]))
    for layer in range(4):
        for norm in NORMS:
            encoder = LayerEncoder.from_module(
                module, layer, norm=norm, processor=to_pixels, blocks="trunk.blocks", final=("norm",), device="cpu"
            )
            states = module.norm(expected[layer]) if norm == "final" else expected[layer]
            np.testing.assert_allclose(encoder.encode(IMAGES), states.mean(1).detach().numpy(), atol=1e-5)
    assert len(module.trunk["blocks"]) == 3  # type: ignore[arg-type]  # the caller's module is unchanged
    assert encoder.spec.model == "module/Trunk"
    with pytest.raises(CutError, match="Trunk is a module in memory"):
        encoder.save_pretrained(str(tmp_path))
    with pytest.raises(OptionError, match="`processor` must be a transformers processor"):
        LayerEncoder.from_module(module, 1, processor=None, blocks="trunk.blocks", device="cpu")  # type: ignore[arg-type]


@pytest.mark.long
def test_model_in_memory_matches_its_folder(tiny_folder: Folder) -> None:
    for name, medium, items in (("ViT", "image", IMAGES), ("Wav2Vec2", "audio", WAVEFORMS), ("Llama", "text", TEXTS)):
        encoder = LayerEncoder.from_module(tiny(name), 2, processor=processor(name), medium=medium, device="cpu")  # type: ignore[arg-type]
        expected = LayerEncoder(tiny_folder(name), 2, device="cpu").encode(items)
        np.testing.assert_allclose(encoder.encode(items), expected, atol=2e-5, rtol=1e-4)
