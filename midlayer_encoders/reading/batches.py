"""Batches planned over a whole list of inputs: like lengths together, each within a budget of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from midlayer_encoders.media import audio_lengths, check_taken, medium_of
from midlayer_encoders.models.padding import suffers_from_padding
from midlayer_encoders.reading.source import LayerSource
from midlayer_encoders.reading.texts import encoded
from midlayer_encoders.reading.turns import turn
from midlayer_encoders.validation import check_count, check_texts

TokenBudget: TypeAlias = int | Literal["auto"]
"""Tokens in a batch; ``"auto"`` for as many as the device runs best with."""

_ON_CPU = 4096  # tokens: what a batch holds where memory is no faster for more of it
_ON_GPU = 65536  # beyond which an H200 was no faster (benchmarks/results/sweep_gpu.md)
_LEAST = 1024
_MOST_MEDIA = 32  # images or waveforms in a batch
_HOP = 320  # samples that most audio models make one state of
_COUNTED = 4096  # texts tokenized at a time to count them: all at once would be held in memory
_TRIED = 8  # of these, counted by the tokenizer itself too


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


def check_budget(token_budget: TokenBudget) -> TokenBudget:
    """Return a number of tokens, or ``"auto"``, or raise."""
    return "auto" if token_budget == "auto" else check_count("token_budget", token_budget, "tokens")


def tokens_that_fit(source: LayerSource) -> int:
    """Return how many tokens a batch should hold on a source's device: a power of two.

    On a GPU half of the free memory is used at the most. A token takes its states, those of the widest matrix inside a
    block, and copies in float32; the blocks after the last layer, and what would make logits of it, never run.
    """
    if source.device.type != "cuda":
        return _ON_CPU
    model, config = source.transformer, getattr(source.transformer, "config", None)
    weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    width = int(getattr(config, "hidden_size", None) or min((min(one.shape) for one in weights), default=1024))
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    entry = max((one.element_size() for one in weights), default=4)
    free, _ = torch.cuda.mem_get_info(source.device)
    free += torch.cuda.memory_reserved(source.device) - torch.cuda.memory_allocated(source.device)
    fitting = free // 2 // (entry * (8 * width + 3 * inner) + 4 * 4 * width)
    return max(_LEAST, min(_ON_GPU, 1 << max(fitting.bit_length() - 1, 0)))


def batches_of(
    source: LayerSource, inputs: Sequence[Any], *, token_budget: int = 4096, max_texts: int = 256, prompt: str = ""
) -> list[list[int]]:
    """Return batches over a whole list of texts, images or waveforms, as :func:`plan_batches`.

    An image counts as one token, a waveform as the states that are made of it. Where padding would change the states of
    an input, a batch holds inputs of one length.

    Args:
        source: reads the inputs.
        inputs: the whole list.
        token_budget: tokens in a batch.
        max_texts: texts in a batch, at the most.
        prompt: put before each text.
    """
    if not inputs:
        return []
    medium = medium_of(inputs[0], source.media)
    check_taken(medium, source.media, inputs[0], model=source.name)
    if medium == "text":
        check_texts("texts", inputs)
        lengths = count_tokens(source, [prompt + text for text in inputs])
        batches = plan_batches(lengths, token_budget=token_budget, max_texts=max_texts)
        return _by_length(source, batches, lengths)
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
    tokenizer: Any = source.tokenizer
    how: dict[str, Any] = {"truncation": True, "max_length": source.max_seq_length, "verbose": False}
    for start in range(0, len(texts), _COUNTED):
        some = list(texts[start : start + _COUNTED])
        with turn(tokenizer):
            tried = [len(ids) for ids in tokenizer(some[:_TRIED], **how)["input_ids"]]
            found = encoded(tokenizer, some)  # as the call before it was set to truncate
            if found is None or [len(one) for one in found[:_TRIED]] != tried:
                found = tokenizer(some, **how)["input_ids"]
        counts += map(len, found)
    return counts
