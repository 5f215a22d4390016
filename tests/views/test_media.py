import numpy as np
import pytest

from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics.media_views import audio_view, augment_media, image_view
from tests.support.made_media import IMAGES, RATE, WAVEFORMS, image


def arrays(views: list) -> list[np.ndarray]:  # type: ignore[type-arg]
    return [np.asarray(item["array"] if isinstance(item, dict) else item) for view in views for item in view]


@pytest.mark.parametrize(("items", "medium"), [(IMAGES, "image"), (WAVEFORMS, "audio")])
def test_views_depend_only_on_content_seed_and_number(items: list, medium: str) -> None:  # type: ignore[type-arg]
    first = augment_media(items, medium, views=3)  # type: ignore[arg-type]
    assert [len(view) for view in first] == [len(items)] * 3
    state = np.random.get_state()[1].copy()
    for a, b in zip(arrays(first), arrays(augment_media(items, medium, views=3)), strict=True):  # type: ignore[arg-type]
        np.testing.assert_array_equal(a, b)
    assert (np.random.get_state()[1] == state).all()
    backwards = augment_media(items[::-1], medium, views=2)  # type: ignore[arg-type]
    np.testing.assert_array_equal(arrays([backwards[1]])[-1], arrays([first[1]])[0])
    other_item = augment_media(items, medium, views=3, seed=1)  # type: ignore[arg-type]
    for view in range(3):
        assert np.abs(arrays([other_item[view]])[0].astype(float) - arrays([first[view]])[0]).max() > 0
    assert np.abs(arrays([first[0]])[0].astype(float) - arrays([first[1]])[0]).max() > 0


def test_image_view_is_a_crop_in_other_colors() -> None:
    bars = np.zeros((40, 60, 3), dtype=np.uint8)
    bars[:, :, 0] = np.linspace(0, 200, 60)  # red grows to the right
    from PIL import Image

    complete, mirrored, spans = Image.fromarray(bars), 0, []
    for view in range(60):
        result = np.asarray(image_view(complete, view=view)).astype(float)
        assert result.shape == (40, 60, 3)
        slope = np.diff(result[:, :, 0].mean(0)).mean()
        mirrored += slope < 0
        spans.append(abs(slope))
    assert 15 <= mirrored <= 45
    assert max(spans) > 1.5 * min(spans)  # parts of several widths, in several strengths
    assert image_view(image(0, (1, 1))).size == (1, 1)


def test_a_view_of_a_waveform_has_its_length_and_the_noise_and_gain_that_are_promised() -> None:
    tone = np.sin(np.arange(RATE) / 5).astype(np.float32)
    gains, noises = [], []
    for view in range(40):
        result = audio_view({"array": tone, "sampling_rate": RATE}, view=view)["array"]
        assert result.shape == tone.shape
        middle = result[2000:-2000]
        # The part of the view that is a wave of the tone's frequency, by least squares, and the rest.
        basis = np.stack([np.sin(np.arange(len(middle)) / 5), np.cos(np.arange(len(middle)) / 5)], axis=1)
        wave = basis @ np.linalg.lstsq(basis, middle, rcond=None)[0]
        gains.append(20 * np.log10(np.std(wave) / np.std(tone)))
        noises.append(20 * np.log10(np.std(wave) / np.std(middle - wave)))
    assert -6.3 < min(gains) < -3 < 3 < max(gains) < 6.3
    assert 9 < min(noises) < 15 < 25 < max(noises) < 31.5


def test_silent_or_tiny_waveform_has_views() -> None:
    for length in (1, 5, 100):
        result = audio_view({"array": np.zeros(length, dtype=np.float32), "sampling_rate": RATE})
        np.testing.assert_array_equal(result["array"], 0)


def test_invalid_options_are_refused() -> None:
    with pytest.raises(OptionError, match="`views` must be a whole number, 1 or more"):
        augment_media(IMAGES, "image", views=0)
    with pytest.raises(OptionError, match="Did you mean 'image'"):
        augment_media(IMAGES, "images")  # type: ignore[arg-type]
