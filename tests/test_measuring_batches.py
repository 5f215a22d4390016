"""What ``measure`` passes through the model: every text once, in batches within the budget, in eval mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.reading.reader import layer_reader
from tests.progress import counted
from tests.test_measured_by_hand import TEXTS

Folder = Callable[[str], str]


@contextmanager
def shapes(encoder: LayerEncoder) -> Iterator[list[tuple[int, int]]]:
    """Collect texts and tokens, padding included, of every batch that enters the first block."""
    seen: list[tuple[int, int]] = []

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        seen.append((states.shape[0], states.shape[1]))

    layer_reader(encoder).vectors(TEXTS[:2], [[0, 1]])  # where it is tried, once, whether the model needs a mask
    hook = encoder[0].model.layers[0].register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def test_no_batch_of_texts_or_views_is_larger_than_the_budget(tiny_folder: Folder) -> None:
    whole = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    by_length = sorted(TEXTS, key=len)
    views = [by_length[::-1], by_length]  # where a text is short, its first view is long
    told: list[int] = []
    with shapes(whole) as seen:
        measure(whole, by_length, metrics="infonce", layers=[1], views=views, token_budget=130, progress=counted(told))
    assert [count for count, _ in seen] == told
    assert sum(told) == 3 * len(TEXTS)
    assert all(count * tokens <= 130 for count, tokens in seen), seen
    assert len(seen) < 3 * len(TEXTS) / 2, "and batches are filled"


def test_a_text_counts_as_many_tokens_as_are_left_of_it(tiny_folder: Folder) -> None:
    whole = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=16)
    long = [text for text in TEXTS if len(text) > 16][:12]
    with shapes(whole) as seen:
        measure(whole, long, metrics="dataset_entropy", layers=[1], token_budget=64)
    assert seen == [(4, 16)] * 3


def test_every_one_of_many_texts_is_passed_on(tiny_folder: Folder) -> None:
    whole = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    told: list[int] = []
    measure(whole, ["ab", "cd", "e"] * 350, metrics="anisotropy", layers=[0], progress=counted(told))
    assert sum(told) == 1050
    assert max(told) == 256, "no more texts than that in a batch, however short"


def test_an_encoder_in_training_is_measured_without_dropout(tiny_folder: Folder) -> None:
    asked: dict[str, Any] = {"metrics": ["curvature", "dataset_entropy"]}
    encoder = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    expected = measure(encoder, TEXTS, **asked)
    encoder.train()
    assert measure(encoder, TEXTS, **asked).equals(expected)
