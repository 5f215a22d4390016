"""Reading of waveforms as one channel of floats at the model's sampling rate."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from midlayer_encoders.errors import short_repr
from midlayer_encoders.files import expand_home
from midlayer_encoders.media._arrays import InputError, as_array, check_file, damaged

_MOST_CHANNELS = 16  # an array with more on both axes is not a waveform


class Waveform(TypedDict):
    """One channel of audio, float32, shape ``(T,)``, and its sampling rate, in the format of sentence-transformers."""

    array: npt.NDArray[np.float32]
    sampling_rate: int


def read_audio(source: Any, *, rate: int | None = None) -> Waveform:
    """Return one channel of audio as floats at the requested rate.

    Channels are averaged, integers are scaled to the range from -1 to 1, and SciPy's polyphase filter resamples other
    rates.

    Args:
        source: ``{"array": …, "sampling_rate": …}``, ``(array, rate)``, the path of a file, or a decoder of torchcodec.
            SciPy reads WAV files, the optional package soundfile all others. The longer axis of a two-dimensional array
            is time.
        rate: sampling rate of the model; ``None`` keeps the rate of the waveform.

    Raises:
        InputError: if the audio is empty, has no rate, is not finite, or is unreadable.

    Example:
        >>> waveform = read_audio((np.ones((2, 8000), dtype=np.int16), 8000), rate=16000)
        >>> waveform["array"].shape, waveform["sampling_rate"]
        ((16000,), 16000)
    """
    array, source_rate, name = _samples_and_rate(source)
    if isinstance(source_rate, bool) or not isinstance(source_rate, int | np.integer) or source_rate < 1:
        raise InputError(f"The rate of {name} must be a positive number of samples a second, but got {source_rate!r}.")
    samples = _one_channel(array, name)
    if rate is not None and rate != source_rate:
        samples = _resampled(samples, int(source_rate), rate)
    return {"array": samples, "sampling_rate": rate or int(source_rate)}


def audio_lengths(waveforms: Sequence[Any], rate: int | None) -> list[int]:
    """Return the number of samples of each waveform at the model's rate; this reads files."""
    return [len(read_audio(waveform, rate=rate)["array"]) for waveform in waveforms]


def _samples_and_rate(source: Any) -> tuple[npt.NDArray[Any], Any, str]:
    """Return the samples, the rate, and a name for messages."""
    if isinstance(source, str | Path):
        return *_open_audio(expand_home(source)), str(source)
    if isinstance(source, Mapping) and {"array", "sampling_rate"} <= set(source):
        return as_array(source["array"]), source["sampling_rate"], "the waveform"
    if isinstance(source, tuple) and len(source) == 2:
        return as_array(source[0]), source[1], "the waveform"
    if hasattr(source, "get_all_samples"):  # a decoder of torchcodec, which datasets returns
        samples = source.get_all_samples()
        return samples.data.numpy(), samples.sample_rate, "the waveform"
    raise InputError(
        "A waveform must come with its rate: (array, 16000) or {'array': array, 'sampling_rate': 16000}, "
        f"but got {short_repr(source)}."
    )


def _open_audio(path: Path) -> tuple[npt.NDArray[Any], int]:
    check_file(path, "waveforms or paths of audio files")
    try:
        if path.suffix.lower() == ".wav":
            from scipy.io import wavfile

            with warnings.catch_warnings():
                warnings.simplefilter("ignore", wavfile.WavFileWarning)  # chunks other than samples
                rate, samples = wavfile.read(path)
        else:
            samples, rate = importlib.import_module("soundfile").read(path, dtype="float32")
    except ImportError:
        raise InputError(
            f"{path} cannot be read: {path.suffix or 'a file without a suffix'} needs the soundfile package. "
            "Install it (pip install soundfile), or convert the file to WAV."
        ) from None
    except Exception as error:  # SciPy raises even UnboundLocalError for damaged files
        raise damaged(path, "audio", error) from error
    return samples, int(rate)


def _one_channel(array: npt.NDArray[Any], name: str) -> npt.NDArray[np.float32]:
    if array.ndim == 2 and min(array.shape) <= _MOST_CHANNELS:
        array = array if array.shape[0] >= array.shape[1] else array.T
    elif array.ndim != 1:
        raise InputError(f"The array of {name} must have shape (T,), (C, T) or (T, C), but got {array.shape}.")
    if not array.size:
        raise InputError(f"`inputs` must be waveforms of at least one sample, but {name} is empty.")
    if array.dtype.kind == "u":  # 8-bit WAV: 128 is silence
        samples = array.astype(np.float32) / np.float32(128) - 1
    elif array.dtype.kind == "b":
        raise InputError(f"The samples of {name} must be numbers, but are bools.")
    elif array.dtype.kind == "i":
        samples = array.astype(np.float32) / np.float32(-float(np.iinfo(array.dtype).min))
    else:
        samples = array.astype(np.float32)
    samples = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    if not np.isfinite(samples).all():
        raise InputError(f"The samples of {name} must be finite, but hold NaN or infinity.")
    return samples


def _resampled(samples: npt.NDArray[np.float32], rate: int, new_rate: int) -> npt.NDArray[np.float32]:
    from scipy.signal import resample_poly

    common = math.gcd(rate, new_rate)
    return np.asarray(resample_poly(samples, new_rate // common, rate // common), dtype=np.float32)
