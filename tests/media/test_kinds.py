import logging
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.io import wavfile

from midlayer_encoders.errors import OptionError
from midlayer_encoders.reading.media_inputs import InputError, media_files, medium_of
from tests.support.made_media import image, waveform


@pytest.mark.parametrize(
    ("item", "taken", "expected"),
    [
        ("a text", ["text"], "text"),
        ("a.png", ["text", "image"], "text"),  # there is no such file
        ("a.png", ["image"], "image"),
        ("a.wav", ["audio"], "audio"),
        (image(0), ["text"], "image"),
        (Path("a.png"), ["text"], "image"),  # so that a text model can name the input
        (np.zeros((4, 4)), ["image"], "image"),
        (np.zeros((2, 400)), ["audio"], "audio"),
        (np.zeros((4, 4, 3)), ["audio"], "image"),
        (waveform(0), ["image"], "audio"),
    ],
)
def test_kind_of_an_input(item: object, taken: list[str], expected: str) -> None:
    assert medium_of(item, taken) == expected


def test_data_frame_is_no_input() -> None:
    with pytest.raises(InputError, match=r"must each be a text, but got .*\(DataFrame\)"):
        medium_of(pd.DataFrame({"text": ["a"]}), ["text"])


def test_image_path_is_an_image_for_a_model_of_texts_and_images(tmp_path: Path) -> None:
    image(0).save(tmp_path / "a.png")
    assert medium_of(str(tmp_path / "a.png"), ["text", "image"]) == "image"
    assert medium_of(str(tmp_path / "a.png"), ["text"]) == "text"


def test_folder_is_read_in_order_and_bad_files_are_refused_or_skipped_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "below").mkdir()
    for name in ("b.png", "a.jpg", "below/c.PNG"):
        image(0).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("not one of them")
    expected = [tmp_path / name for name in ("a.jpg", "b.png", "below/c.PNG")]
    assert media_files(tmp_path, "image") == expected
    (tmp_path / "aa.png").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"aa\.png cannot be read"):
        media_files(tmp_path, "image")
    with caplog.at_level(logging.WARNING):
        assert media_files(tmp_path, "image", bad="skip") == expected
    assert re.search(r"Skipped: .*aa\.png cannot be read", caplog.text)
    wavfile.write(tmp_path / "a.wav", 8000, waveform(0)[0])
    assert media_files(tmp_path, "audio") == [tmp_path / "a.wav"]


def test_invalid_folders_and_options(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="there is none at"):
        media_files(tmp_path / "nowhere", "image")
    with pytest.raises(OptionError, match="at least one readable file"):
        media_files(tmp_path, "image")
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"damaged")
    with pytest.raises(OptionError, match=r"\.tif, \.tiff, \.webp\), but none of the 2 in .* can be read"):
        media_files(tmp_path, "image", bad="skip")
    with pytest.raises(OptionError, match="Did you mean 'skip'"):
        media_files(tmp_path, "image", bad="skipp")
