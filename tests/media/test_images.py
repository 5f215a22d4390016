from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from midlayer_encoders.reading.media_inputs import InputError, read_image
from tests.support.made_media import image

PIXELS = np.asarray(image(0))


def pixels(source: object) -> np.ndarray:
    result = read_image(source)
    assert result.mode == "RGB"
    return np.asarray(result)


@pytest.mark.parametrize(
    "source",
    [Image.fromarray(PIXELS), PIXELS, np.moveaxis(PIXELS, 2, 0), torch.tensor(PIXELS), PIXELS / 255.0, PIXELS.astype(np.int64)],
    ids=["PIL", "HWC", "CHW", "tensor", "float", "int64"],
)  # fmt: skip
def test_every_form_gives_the_same_image(source: object) -> None:
    np.testing.assert_array_equal(pixels(source), PIXELS)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr", "LA", "RGBA"])
def test_every_mode_becomes_rgb_like_pillow(mode: str) -> None:
    inputs = Image.fromarray(PIXELS).convert(mode)
    np.testing.assert_array_equal(pixels(inputs), np.asarray(inputs.convert("RGB")))


def test_transparency_becomes_white_also_in_a_palette(tmp_path: Path) -> None:
    clear = Image.new("RGBA", (4, 4), (200, 0, 0, 0))
    assert (pixels(clear) == 255).all()
    assert (pixels(Image.new("LA", (4, 4), (90, 0))) == 255).all()
    half = Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert 125 <= pixels(half)[0, 0, 0] <= 129
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([10, 20, 30])
    palette.save(tmp_path / "p.png", transparency=0)
    assert (pixels(tmp_path / "p.png") == 255).all()


def test_sixteen_bit_images_keep_their_shades() -> None:
    deep = np.linspace(0, 65535, 16).reshape(4, 4).astype(np.uint16)
    np.testing.assert_allclose(pixels(Image.fromarray(deep))[..., 0], deep / 257, atol=0.51)


def test_photo_is_rotated_by_its_exif_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    image(0, (20, 10)).save(tmp_path / "turned.jpg", exif=exif)
    assert read_image(tmp_path / "turned.jpg").size == (10, 20)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (np.zeros((5, 5, 2)), r"with 1, 3 or 4 channels, but got \(5, 5, 2\)"),
        (np.full((4, 4, 3), 2.0), "floats from 0 to 1, but its values range from 2 to 2.*undo any normalization"),
        (np.full((4, 4, 3), np.nan), "floats from 0 to 1"),
        (np.full((4, 4, 3), 300), "integers from 0 to 255"),
        (np.linspace(-1, 2, 16).reshape(4, 4), "floats from 0 to 1, but its values range from -1 to 2"),
        (np.zeros((0, 4, 3)), "at least one pixel, but the array has 4 x 0"),
        ("nowhere.png", "There is no file 'nowhere.png'"),
        (object(), "must be PIL images, paths, arrays or tensors"),
    ],
)
def test_invalid_images_are_refused(source: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        read_image(source)


def test_damaged_image_is_named(tmp_path: Path) -> None:
    complete = tmp_path / "whole.png"
    image(0, (64, 64)).save(complete)
    for name, content in (("cut.png", complete.read_bytes()[:200]), ("text.png", b"no image"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=f"{name} cannot be read as an image.*damaged"):
            read_image(tmp_path / name)


def test_pixel_limit_applies_before_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    complete = tmp_path / "large.png"
    image(0, (60, 40)).save(complete)
    complete.write_bytes(complete.read_bytes()[:60])  # a header with the size, and no pixels
    with pytest.raises(InputError, match=r"`max_pixels` is 1000, but .*large\.png has 60 x 40 = 2400"):
        read_image(complete, max_pixels=1000)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(InputError, match=r"large\.png cannot be read as an image: .* exceeds limit"):
        read_image(complete)
    with pytest.raises(InputError, match="raise `max_pixels`"):
        read_image(image(0), max_pixels=10)
    assert read_image(Image.new("RGB", (1, 1), "red")).size == (1, 1)
