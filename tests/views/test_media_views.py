"""What views of images and audio do to them, measured on patterns whose change can be read back."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from midlayer_encoders.metrics.media_views import audio_view, augment_media, image_view
from midlayer_encoders.reading.media_inputs import InputError
from tests.support.made_media import IMAGES, RATE, WAVEFORMS

SQUARE, COUNT = 10, 30


def changes(line: np.ndarray) -> int:
    """Return how often a line of pixels goes from dark to bright or back."""
    bright = line > (line.max() + line.min()) / 2
    return int((bright[1:] != bright[:-1]).sum())


def test_crop_keeps_the_documented_area_and_aspect_ratio() -> None:
    """Squares of a chessboard are counted: a part of the image, enlarged, has fewer of them."""
    board = np.indices((COUNT, COUNT)).sum(axis=0) % 2 * 200 + 20
    complete = Image.fromarray(np.kron(board, np.ones((SQUARE, SQUARE))).astype(np.uint8)).convert("RGB")
    shares, ratios = [], []
    for view in range(60):
        result = np.asarray(image_view(complete, view=view).convert("L")).astype(float)
        across = max(changes(row) for row in result[5::SQUARE]) + 1
        down = max(changes(column) for column in result.T[5::SQUARE]) + 1
        shares.append(across * down / COUNT**2)
        ratios.append(across / down)
    # A square more or less may show at an edge.
    assert 0.38 < min(shares) < 0.5 < 0.9 < max(shares) <= 1.0
    assert 0.68 < min(ratios) < 0.85 < 1.18 < max(ratios) < 1.48


def test_brightness_and_color_are_scaled_within_the_documented_range() -> None:
    gray, red = Image.new("RGB", (8, 8), (120, 120, 120)), Image.new("RGB", (8, 8), (150, 90, 90))
    light = [np.asarray(image_view(gray, view=view)).mean() / 120 for view in range(60)]
    assert 0.59 < min(light) < 0.68 < 1.32 < max(light) < 1.41
    tint = []
    for view in range(60):
        r, g, _ = np.asarray(image_view(red, view=view)).astype(float).mean(axis=(0, 1))
        tint.append((r - g) / (150 - 90) / (r + 2 * g) * (150 + 2 * 90))
    # Contrast and saturation each take 0.6 to 1.4 of what sets the color apart from gray.
    assert 0.3 < min(tint) < 0.6 < 1.5 < max(tint) < 2.05


def test_a_waveform_moves_by_up_to_a_tenth_and_silence_moves_in() -> None:
    tone = np.ones(1000, dtype=np.float32)
    tone[500] = 60.0
    shifts = []
    for view in range(60):
        result = audio_view({"array": tone, "sampling_rate": RATE}, view=view)
        samples, shift = result["array"], int(result["array"].argmax()) - 500
        assert result["sampling_rate"] == RATE
        assert samples.dtype == np.float32
        shifts.append(shift)
        gone = samples[:shift] if shift > 0 else samples[shift:] if shift < 0 else samples[:0]
        rest = samples[shift:] if shift > 0 else samples[:shift] if shift < 0 else samples
        if abs(shift) > 30:
            loudness = samples[500 + shift] / 60
            assert abs(gone.mean()) < 0.5 * loudness
            assert np.median(rest) == pytest.approx(loudness, rel=0.35)
    assert -100 <= min(shifts) < -60
    assert 60 < max(shifts) <= 100


@pytest.mark.parametrize(("items", "medium"), [(IMAGES, "image"), (WAVEFORMS, "audio")])
def test_views_of_a_list_match_those_of_each_item(items: list, medium: str) -> None:  # type: ignore[type-arg]
    views = augment_media(items, medium, views=3, seed=7)  # type: ignore[arg-type]

    def array(output: object) -> np.ndarray:
        return np.asarray(output["array"] if isinstance(output, dict) else output)

    for number, view in enumerate(views):
        for place, item in enumerate(items):
            if medium == "image":
                separate = np.asarray(image_view(item, seed=7, view=number))
            else:
                separate = audio_view({"array": item[0], "sampling_rate": item[1]}, seed=7, view=number)["array"]
            np.testing.assert_array_equal(array(view[place]), separate)
        for own_rows, reference in zip(view[1:5:2], (view[1], view[3]), strict=True):
            np.testing.assert_array_equal(array(own_rows), array(reference))
        np.testing.assert_array_equal(array(view[-1]), array(view[len(items) - 1]))


def test_pixel_limit_applies_to_views(tmp_path: Path) -> None:
    IMAGES[0].save(tmp_path / "a.png")
    width, height = IMAGES[0].size
    (view,) = augment_media([tmp_path / "a.png"], "image", views=1, max_pixels=width * height)
    assert view[0].size == IMAGES[0].size
    (view,) = augment_media([tmp_path / "a.png"], "image", views=1, max_pixels=width * height - 1)
    with pytest.raises(InputError, match="pixels"):
        _ = view[0]
