"""``measure`` passes every text through the model once, in batches within the budget, in eval mode."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from midlayer_encoders import LayerEncoder, measure
from midlayer_encoders.reading.reader import layer_reader
from tests.support.progress import num_tokens, record_steps
from tests.support.tiny_folders import Folder
from tests.test_measured_by_hand import TEXTS


@contextmanager
def record_shapes(encoder: LayerEncoder) -> Iterator[list[tuple[int, int]]]:
    """Collect texts and tokens, including padding, of every batch that enters the first block."""
    batch_shapes: list[tuple[int, int]] = []

    def record(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        batch_shapes.append((states.shape[0], states.shape[1]))

    layer_reader(encoder).vectors(TEXTS[:2], [[0, 1]])  # checks once whether the model needs a mask
    hook = encoder[0].model.layers[0].register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield batch_shapes
    finally:
        hook.remove()


def test_no_batch_of_texts_or_views_is_larger_than_the_budget(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    by_length = sorted(TEXTS, key=len)
    views = [by_length[::-1], by_length]  # where a text is short, its first view is long
    steps: list[int] = []
    with record_shapes(encoder) as batch_shapes:
        measure(
            encoder,
            by_length,
            metrics="infonce",
            layers=[1],
            views=views,
            token_budget=130,
            progress=record_steps(steps, "measuring"),
        )
    assert all(step <= count * tokens for step, (count, tokens) in zip(steps, batch_shapes, strict=True))
    assert sum(steps) == num_tokens(encoder, TEXTS, *views)
    assert sum(count for count, _ in batch_shapes) == 3 * len(TEXTS)
    assert all(count * tokens <= 130 for count, tokens in batch_shapes), batch_shapes
    assert len(batch_shapes) < 3 * len(TEXTS) / 2, "batches are filled"


def test_tokens_of_the_prompt_count_towards_the_budget(tiny_folder: Folder) -> None:
    prompts = {"prompts": {"ask": "what is this about? "}, "default_prompt_name": "ask"}
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", **prompts)  # type: ignore[arg-type]
    with record_shapes(encoder) as batch_shapes:
        measure(encoder, TEXTS, metrics="dataset_entropy", layers=[1], token_budget=160)
    assert sum(count for count, _ in batch_shapes) == len(TEXTS)
    assert all(count * tokens <= 160 for count, tokens in batch_shapes), batch_shapes


def test_truncated_text_counts_its_remaining_tokens(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu", max_length=16)
    long_texts = [text for text in TEXTS if len(text) > 16][:12]
    with record_shapes(encoder) as batch_shapes:
        measure(encoder, long_texts, metrics="dataset_entropy", layers=[1], token_budget=64)
    assert batch_shapes == [(4, 16)] * 3


def test_each_of_many_texts_is_measured(tiny_folder: Folder) -> None:
    encoder = LayerEncoder(tiny_folder("Llama"), -1, device="cpu")
    steps: list[int] = []
    texts = ["ab", "cd", "e"] * 350
    with record_shapes(encoder) as batch_shapes:
        measure(encoder, texts, metrics="anisotropy", layers=[1], progress=record_steps(steps, "measuring"))
    counts = [count for count, _ in batch_shapes]
    assert sum(counts) == 1050
    assert max(counts) == 256, "the maximum number of texts in a batch"
    assert sum(steps) == num_tokens(encoder, texts)


def test_encoder_in_training_mode_is_measured_without_dropout(tiny_folder: Folder) -> None:
    options: dict[str, Any] = {"metrics": ["curvature", "dataset_entropy"]}
    encoder = LayerEncoder(tiny_folder("BERT"), -1, device="cpu")
    expected = measure(encoder, TEXTS, **options)
    encoder.train()
    assert measure(encoder, TEXTS, **options).equals(expected)
