import pytest
from midlayer_encoders.callbacks._decline import describe_collapse, describe_decline


def test_last_layer_that_falls_while_another_rises_is_a_decline() -> None:
    scores = {1: [0.4, 0.5], 2: [0.5, 0.6], 4: [0.55, 0.55], 8: [0.6, 0.5]}
    message = describe_decline(scores, [3, 7], patience=1, tolerance=0.02, score_name="half_match")
    assert message is not None
    assert "last layer (7) fell from a half_match of 0.600 at step 2 to 0.500 at step 8" in message
    assert "layer 3 rose from 0.500 to 0.600" in message
    assert describe_decline(scores, [3, 7], patience=2, tolerance=0.02) is not None


@pytest.mark.parametrize(
    "scores",
    [
        {},
        {1: [0.5, 0.5]},
        {1: [0.5, 0.5], 2: [0.6, 0.6]},  # all rise
        {1: [0.5, 0.6], 2: [0.5, 0.5], 4: [0.5, 0.5]},  # none rises
        {1: [0.5, 0.6], 2: [0.6, 0.59], 4: [0.6, 0.59]},  # within the tolerance
        {1: [0.5, 0.6], 2: [0.6, 0.5], 4: [0.6, 0.59]},  # it recovered
        {1: [0.6], 2: [0.5], 4: [0.4]},  # no earlier layer
    ],
)
def test_scores_without_a_decline(scores: dict[int, list[float]]) -> None:
    assert (
        describe_decline(scores, list(range(len(next(iter(scores.values()), [])))), patience=2, tolerance=0.05) is None
    )


def test_collapsed_layer_is_described() -> None:
    assert describe_collapse({}, [0], share=0.5) is None
    assert describe_collapse({1: [2.0, 2.0], 2: [2.0, 1.1]}, [0, 5], share=0.5) is None
    message = describe_collapse({1: [2.0, 2.0], 2: [2.0, 3.0], 4: [2.0, 0.5]}, [0, 5], share=0.5)
    assert message == "the entropy of layer 5 collapsed from 3.000 nats at step 2 to 0.500 at step 4"
