"""What mteb and the libraries under it warn of by themselves, named, so that a warning of ours still fails a test."""

from __future__ import annotations

import pytest

MTEB = [
    pytest.mark.filterwarnings(f"ignore:{words}")
    for words in (
        "The fill_missing parameter is deprecated",
        "The `get_sentence_embedding_dimension` method has been renamed",
        "To copy construct from a tensor",
        "Precision is ill-defined",
        "An input array is constant",
        "lbfgs failed to converge",
        "Number of distinct clusters",
    )
]
