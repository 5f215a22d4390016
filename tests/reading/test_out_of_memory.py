"""A device that runs out of memory during a pass gives the same numbers or the error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import polars as pl
import pytest
import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.metrics.text_views import augment
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.selection import select
from tests.support.progress import num_tokens, record_steps
from tests.support.thinned import thinned
from tests.support.tiny_folders import Folder
from tests.test_measured_by_hand import TEXTS

POOLED = ["dataset_entropy", "cka", "anisotropy", "infonce", "dime"]
KINDS = ["long" if len(text) > 27 else "short" for text in TEXTS]


@pytest.fixture(scope="module")
def whole(tiny_folder: Folder) -> LayerEncoder:
    return LayerEncoder(tiny_folder("Llama"), -1, device="cpu", dtype="float64")


@contextmanager
def scarce(encoder: LayerEncoder, most: int) -> Iterator[list[int]]:
    """Run out of memory before the third block for batches of more than ``most`` texts; count the texts that passed.

    By then the states of layers 0, 1 and 2 were delivered and must not be counted again.
    """
    passed: list[int] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        if len(states) > most:
            raise torch.OutOfMemoryError(f"a batch of {len(states)}")
        passed.append(len(states))

    hook = encoder[0].model.layers[2].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield passed
    finally:
        hook.remove()


def assert_same(actual: pl.DataFrame, expected: pl.DataFrame) -> None:
    assert actual.drop("value").equals(expected.drop("value"))
    torch.testing.assert_close(actual["value"].to_torch(), expected["value"].to_torch(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("most", thinned([5, 1], 2))
def test_vectors_are_the_same_from_smaller_batches(whole: LayerEncoder, most: int) -> None:
    plenty = measure(whole, TEXTS, metrics=POOLED, norm="final")
    reports: list[int] = []
    with scarce(whole, most) as passed:
        frame = measure(whole, TEXTS, metrics=POOLED, norm="final", progress=record_steps(reports, "measuring"))
    assert_same(frame, plenty)
    assert sum(passed) == 3 * len(TEXTS), "every text once in each pass"
    assert sum(reports) == num_tokens(whole, TEXTS, *augment(TEXTS, views=2, seed=0))
    assert max(passed) <= most


@pytest.mark.parametrize(
    "metrics",
    ["prompt_entropy", "first_token_share", "matrix_entropy", "half_match", "block_influence", ["curvature", "cka"]],
)
def test_token_states_are_never_counted_twice(whole: LayerEncoder, metrics: str | list[str]) -> None:
    plenty = measure(whole, TEXTS, metrics=metrics)
    options: dict[str, Any] = {"metrics": metrics, "token_budget": 160}  # batches of several sizes, some of which fit
    try:
        with scarce(whole, 4) as passed:
            frame = measure(whole, TEXTS, **options)
    except torch.OutOfMemoryError as error:
        assert str(error).startswith("a batch of")  # noqa: PT017  (either outcome is right)
    else:
        assert_same(frame, plenty)
        assert sum(passed) == len(TEXTS)
    with scarce(whole, len(TEXTS)) as passed:  # with enough memory, the hook has no effect
        assert_same(measure(whole, TEXTS, **options), plenty)
    assert max(passed) > 4, "or nothing ran out above"


def test_batch_size_that_ran_out_of_memory_is_not_retried(
    whole: LayerEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes.append(len(args[0] if args else kwargs["hidden_states"]))
        if sizes[-1] > 2:
            raise torch.OutOfMemoryError

    layer_reader(whole).vectors(["one two three"], [[0]])  # tries once whether the model needs its mask
    hook = whole[0].model.layers[2].register_forward_pre_hook(before, with_kwargs=True)
    try:
        texts = [*["one two three"] * 12, *["one"] * 3]
        layer_reader(whole).vectors(texts, [*(range(start, start + 4) for start in (0, 4, 8)), range(12, 15)])
    finally:
        hook.remove()
    assert sizes == [4, 2, 2, 2, 2, 2, 2, 3, 1, 2]  # the last batch has fewer tokens, so that it is tried
    (message,) = caplog.messages  # once
    assert message.startswith("Out of memory in a batch of 4 inputs")


def test_single_text_that_does_not_fit_raises(whole: LayerEncoder) -> None:
    with scarce(whole, 0), pytest.raises(torch.OutOfMemoryError, match="a batch of 1"):
        measure(whole, TEXTS, metrics="dataset_entropy")
    assert measure(whole, TEXTS, metrics="dataset_entropy").height == 5, "no hook is left behind"


def test_labels_are_scored_from_smaller_batches(whole: LayerEncoder) -> None:
    few = [TEXTS[place % 12] for place in range(12)]  # too few texts for metrics of tokens
    kinds = KINDS[:12]
    plenty = select(whole, few, kinds, rule="last")
    with scarce(whole, 2) as passed:
        selection = select(whole, few, kinds, rule="last")
    assert_same(selection.frame, plenty.frame)
    assert selection.labels == plenty.labels
    assert sum(passed) == 12
