"""Batches planned over a whole list of inputs: like lengths together, each within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from midlayer_encoders.errors import check_count, check_texts
from midlayer_encoders.media import audio_lengths, check_taken, medium_of
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.reading.turns import turn

__all__ = ["batches_of", "count_tokens", "plan_batches"]

_MOST_MEDIA = 32  # images or waveforms in a batch
_HOP = 320  # samples that most audio models make one state of
_COUNTED = 1024  # texts tokenized at a time to count them: all at once would be held in memory


def plan_batches(lengths: Sequence[int], *, token_budget: int = 4096, max_texts: int = 256) -> list[list[int]]:
    """Return batches of positions: like lengths together, the longest first, each within the budget when padded.

    The plan depends on the whole list alone, so a run, a resumed run and one shared among processes make the same
    batches, and so the same vectors to the last bit.

    Args:
        lengths: tokens of each text.
        token_budget: texts times longest text in a batch. A text longer than that gets a batch of its own.
        max_texts: texts in a batch, at the most.

    Example:
        >>> plan_batches([3, 9, 4, 2], token_budget=12)
        [[1], [2, 0, 3]]
    """
    token_budget, max_texts = check_count("token_budget", token_budget), check_count("max_texts", max_texts)
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and len(batches[-1]) < max_texts and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def batches_of(
    source: LayerSource, inputs: Sequence[Any], *, token_budget: int = 4096, prompt: str = ""
) -> list[list[int]]:
    """Return batches over a whole list of texts, images or waveforms, as :func:`plan_batches`.

    An image counts as one token, a waveform as the states that are made of it. Where padding would change the states of
    an input, a batch holds inputs of one length.

    Args:
        source: reads the inputs.
        inputs: the whole list.
        token_budget: tokens in a batch.
        prompt: put before each text.
    """
    if not inputs:
        return []
    medium = medium_of(inputs[0], source.media)
    check_taken(medium, source.media, inputs[0], model=source.name)
    if medium == "text":
        check_texts("texts", inputs)
        lengths = count_tokens(source, [prompt + text for text in inputs])
        return _by_length(source, plan_batches(lengths, token_budget=token_budget), lengths)
    if medium == "image":
        return plan_batches([1] * len(inputs), token_budget=token_budget, max_texts=_MOST_MEDIA)
    lengths = audio_lengths(inputs, source.sampling_rate)
    states = [-(-length // _HOP) for length in lengths]
    batches = plan_batches(states, token_budget=token_budget, max_texts=_MOST_MEDIA)
    return _by_length(source, batches, lengths)


def _by_length(source: LayerSource, batches: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Return batches of one length each, where padding would change the states."""
    if not suffers_from_padding(source.transformer):
        return batches
    return [
        [position for position in batch if lengths[position] == length]
        for batch in batches
        for length in sorted({lengths[position] for position in batch}, reverse=True)
    ]


def count_tokens(source: LayerSource, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text, after truncation to the longest that the source takes."""
    counts: list[int] = []
    for start in range(0, len(texts), _COUNTED):
        some = list(texts[start : start + _COUNTED])
        with turn(source.tokenizer):
            counted = source.tokenizer(some, truncation=True, max_length=source.max_seq_length, verbose=False)
        counts += [len(ids) for ids in counted["input_ids"]]
    return counts
