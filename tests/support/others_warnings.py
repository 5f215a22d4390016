"""Known warnings of mteb and its dependencies, listed so that any other warning still fails a test."""

import pytest

MTEB = [
    pytest.mark.filterwarnings(f"ignore:{message}")
    for message in (
        "The fill_missing parameter is deprecated",
        "The `get_sentence_embedding_dimension` method has been renamed",
        "To copy construct from a tensor",
        "Precision is ill-defined",
        "An input array is constant",
        "lbfgs failed to converge",
        "Number of distinct clusters",
    )
]
