"""What padding does to a model: whether the states of real inputs change with it."""

from __future__ import annotations

from torch import nn

__all__ = ["suffers_from_padding"]


def suffers_from_padding(model: nn.Module) -> bool:
    """Return whether padding changes the states of the waveform before it, whatever the mask says.

    The base models of Wav2Vec2, HuBERT and WavLM norm each channel over all of time, padding included, and were
    trained without a mask: their waveforms pass in batches of one length, unpadded.
    """
    return getattr(getattr(model, "config", None), "feat_extract_norm", None) == "group"
