import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import wavfile

from midlayer_encoders.reading.media_inputs import InputError, read_audio
from tests.support.made_media import RATE, waveform

SAMPLES = 0.3 * waveform(0)[0]


class Decoder:
    """The object that datasets returns if torchcodec is installed."""

    def get_all_samples(self) -> object:
        class Decoded:
            data = torch.tensor(np.stack([SAMPLES, SAMPLES]))
            sample_rate = RATE

        return Decoded()


@pytest.mark.parametrize(
    "source",
    [
        (SAMPLES, RATE),
        {"array": SAMPLES, "sampling_rate": RATE},
        (torch.tensor(SAMPLES), np.int64(RATE)),
        Decoder(),
        {"array": SAMPLES, "sampling_rate": np.array(RATE)},
        {"array": torch.tensor(SAMPLES), "sampling_rate": torch.tensor(RATE)},
    ],
    ids=["pair", "dict", "tensor", "decoder", "numpy format", "torch format"],
)
def test_every_form_gives_the_same_samples(source: object) -> None:
    result = read_audio(source)
    assert result["sampling_rate"] == RATE
    assert result["array"].dtype == np.float32
    np.testing.assert_allclose(result["array"], SAMPLES, atol=1e-7)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int16, np.int32, np.uint8])
def test_wav_of_every_dtype_is_scaled_to_one(kind: type, tmp_path: Path) -> None:
    scale = {np.int16: 2**15, np.int32: 2**31, np.uint8: 2**7}.get(kind, 1)
    written = (SAMPLES.astype(np.float64) * scale + (128 if kind is np.uint8 else 0)).astype(kind)
    wavfile.write(tmp_path / "a.wav", RATE, written)
    result = read_audio(tmp_path / "a.wav")
    np.testing.assert_allclose(result["array"], SAMPLES, atol=2 / scale if scale > 1 else 1e-6)


def test_silence_and_the_extremes_of_integers_are_exact() -> None:
    for dtype, values in ((np.uint8, (0, 128, 192)), (np.int16, (-(2**15), 0, 2**14))):
        assert read_audio((np.array(values, dtype=dtype), RATE))["array"].tolist() == [-1.0, 0.0, 0.5]


def test_channels_are_averaged_for_either_axis_order() -> None:
    np.testing.assert_array_equal(read_audio((np.ones((16, 40)), RATE))["array"], np.ones(40))
    left, right = SAMPLES, 0.5 * SAMPLES
    for stereo in (np.stack([left, right]), np.stack([left, right], axis=1)):
        np.testing.assert_allclose(read_audio((stereo, RATE))["array"], 0.75 * SAMPLES, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_tone_keeps_its_pitch_at_another_rate(rate: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(rate) / rate)
    result = read_audio((tone, rate), rate=RATE)
    assert (len(result["array"]), result["sampling_rate"]) == (RATE, RATE)
    assert np.abs(np.fft.rfft(result["array"])).argmax() == 440
    middle = slice(1000, -1000)
    expected = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    np.testing.assert_allclose(result["array"][middle], expected[middle], atol=5e-3)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ((np.zeros(0), RATE), "at least one sample"),
        ((np.zeros((2, 0)), RATE), "at least one sample"),
        ((np.full(9, np.nan), RATE), "must be finite"),
        ((SAMPLES, -1), "positive number of samples per second, but got -1"),
        ((SAMPLES, True), "positive number of samples per second, but got True"),
        ((np.zeros((17, 40)), RATE), r"\(T, C\), but got \(17, 40\)"),
        ((SAMPLES, 44.1), "positive number of samples per second, but got 44.1"),
        ((np.zeros((40, 40)), RATE), r"shape \(T,\), \(C, T\) or \(T, C\), but got \(40, 40\)"),
        (SAMPLES, r"must come with its rate: \(array, 16000\)"),
        ("nowhere.wav", "There is no file 'nowhere.wav'"),
    ],
)
def test_invalid_waveforms_are_refused(source: object, text: str) -> None:
    with pytest.raises(InputError, match=text):
        read_audio(source)


def test_damaged_file_is_named_and_other_formats_name_their_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.wav").write_bytes(b"RIFF nothing")
    with pytest.raises(InputError, match=r"bad\.wav cannot be read as audio"):
        read_audio(tmp_path / "bad.wav")
    (tmp_path / "a.flac").write_bytes(b"fLaC")
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(InputError, match=r"\.flac needs the soundfile package.*convert the file to WAV"):
        read_audio(tmp_path / "a.flac")
