"""Plan batches of inputs of similar length within a token budget, and tokenize them.

A fast tokenizer encodes in Rust, without the GIL, and then builds Python lists and dictionaries for each text, which
block other threads. Here the ids are taken from the Rust encodings directly.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from midlayer_encoders._types import Stage
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.media_inputs import audio_lengths, check_taken, medium_of
from midlayer_encoders.validation import check_count, check_texts

_CPU_TOKENS = 4096
_MAX_GPU_TOKENS = 65536  # beyond this an H200 was no faster (benchmarks/results/sweep_gpu.md)
_MIN_GPU_TOKENS = 1024
_MAX_MEDIA = {"cpu": 32, "cuda": 64}  # images or waveforms in a batch
_HOP = 320  # samples per state in most audio models
_COUNTED_TEXTS = 4096  # texts tokenized at once, to limit memory
_VERIFIED_TEXTS = 8  # of these, also counted by the plain tokenizer

#: An encoder whose layers can be read, and which prepares their inputs: a ``LayerEncoder``, of a room above this one.
LayerSource: TypeAlias = Any


def plan_batches(lengths: Sequence[int], *, token_budget: int = 4096, max_texts: int = 256) -> list[list[int]]:
    """Return batches of positions, sorted by descending length, each within the budget after padding.

    The plan depends only on the lengths, so resumed and distributed runs use the same batches and compute bitwise
    equal vectors.

    Args:
        lengths: number of tokens of each text.
        token_budget: maximum of texts times longest text in a batch; a longer text is a batch by itself.
        max_texts: maximum number of texts in a batch.

    Example:
        >>> plan_batches([3, 9, 4, 2], token_budget=12)
        [[1], [2, 0, 3]]
    """
    token_budget = check_count("token_budget", token_budget)
    max_texts = check_count("max_texts", max_texts)
    batches: list[list[int]] = []
    for position in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        longest = lengths[batches[-1][0]] if batches else 0
        if batches and len(batches[-1]) < max_texts and longest * (len(batches[-1]) + 1) <= token_budget:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def tokens_that_fit(source: LayerSource) -> int:
    """Return the number of tokens in a batch on a source's device, a power of two.

    On a GPU a batch uses at most half of the free memory: the states of a token, its widest states inside a block, and
    copies in float32.
    """
    if source.device.type != "cuda":
        return _CPU_TOKENS
    config = getattr(source.transformer, "config", None)
    weights = [parameter for parameter in source.transformer.parameters() if parameter.ndim == 2]
    width = int(getattr(config, "hidden_size", None) or min((min(weight.shape) for weight in weights), default=1024))
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    item_size = max((weight.element_size() for weight in weights), default=4)
    free, _ = torch.cuda.mem_get_info(source.device)
    free += torch.cuda.memory_reserved(source.device) - torch.cuda.memory_allocated(source.device)
    fitting = free // 2 // (item_size * (8 * width + 3 * inner) + 4 * 4 * width)
    return max(_MIN_GPU_TOKENS, min(_MAX_GPU_TOKENS, 1 << max(fitting.bit_length() - 1, 0)))


def batches_of(
    source: LayerSource, inputs: Sequence[Any], *, token_budget: int = 4096, max_texts: int = 256, prompt: str = ""
) -> list[list[int]]:
    """Return batches of texts, images or waveforms; see :func:`plan_batches`.

    An image, alone or with a text, counts as one token, a waveform as its number of states. A batch of a joint model
    holds inputs of one kind. If padding changes the states of the model, it holds inputs of one length.

    Args:
        source: the model.
        inputs: all inputs.
        token_budget: maximum number of tokens in a batch.
        max_texts: maximum number of texts in a batch.
        prompt: prompt prepended to each text.
    """
    if not inputs:
        return []
    if len(source.media) > 1:
        groups: dict[str, list[int]] = {}
        for position, item in enumerate(inputs):
            kind = "combined" if is_combined(item) else medium_of(item, source.media)
            groups.setdefault(kind, []).append(position)
        if len(groups) > 1:
            plan = partial(batches_of, source, token_budget=token_budget, max_texts=max_texts, prompt=prompt)
            parts = {kind: plan([inputs[position] for position in group]) for kind, group in groups.items()}
            return [[groups[kind][index] for index in batch] for kind, part in parts.items() for batch in part]
    medium = "image" if is_combined(inputs[0]) else medium_of(inputs[0], source.media)
    check_taken(medium, source.media, inputs[0], model=source.name)
    if medium == "text":
        check_texts("texts", inputs)
        lengths = count_tokens(source, [prompt + text for text in inputs])
    else:
        lengths = audio_lengths(inputs, source.sampling_rate) if medium == "audio" else [1] * len(inputs)
        max_texts = _MAX_MEDIA.get(source.device.type, 32)
    tokens = [-(-length // _HOP) for length in lengths] if medium == "audio" else lengths
    batches = plan_batches(tokens, token_budget=token_budget, max_texts=max_texts)
    if not suffers_from_padding(source.transformer):
        return batches
    return [
        [position for position in batch if lengths[position] == length]
        for batch in batches
        for length in sorted({lengths[position] for position in batch}, reverse=True)
    ]


def input_sizes(source: LayerSource, inputs: Sequence[Any], *, prompt: str = "") -> list[int]:
    """Return the number of tokens of each text for progress; an image or a waveform counts as one."""
    if not all(isinstance(item, str) for item in inputs):
        return [1] * len(inputs)
    check_texts("texts", inputs)
    return count_tokens(source, [prompt + text for text in inputs])


def count_steps(sizes: Sequence[int], batches: Sequence[Sequence[int]], stage: Stage) -> Callable[[int], None]:
    """Return a function that counts the sizes of the next inputs of some batches as done.

    Example:
        >>> step = count_steps([5, 7, 9], [[2, 0], [1]], Stage(lambda *report: print(*report), "labels", total=21))
        >>> step(2)
        labels 14 21
    """
    in_order = iter([sizes[position] for batch in batches for position in batch])
    return lambda count: stage.step(sum(islice(in_order, count)))


def is_combined(item: Any) -> bool:
    """Return whether an input of a joint model is a text with an image, ``{"text": …, "image": …}``."""
    return isinstance(item, Mapping) and {"text", "image"} <= set(item)


def count_tokens(source: LayerSource, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text after truncation."""
    counts: list[int] = []
    tokenizer: Any = source.tokenizer
    options: dict[str, Any] = {"truncation": True, "verbose": False}
    for start in range(0, len(texts), _COUNTED_TEXTS):
        chunk = list(texts[start : start + _COUNTED_TEXTS])
        with turn(tokenizer):
            expected = [len(ids) for ids in tokenizer(chunk[:_VERIFIED_TEXTS], **options)["input_ids"]]
            encodings = backend_encodings(tokenizer, chunk)  # with the truncation of the call above
            if encodings is None or [len(encoding) for encoding in encodings[:_VERIFIED_TEXTS]] != expected:
                encodings = tokenizer(chunk, **options)["input_ids"]
        counts += map(len, encodings)
    return counts


def backend_encodings(tokenizer: Any, texts: Sequence[str]) -> Sequence[Any] | None:
    """Return the Rust encodings of texts, or None if the tokenizer is not a fast one.

    The tokenizer's last call sets truncation and padding, so hold its lock (:func:`turn`) over both calls.
    """
    encode = getattr(getattr(tokenizer, "backend_tokenizer", None), "encode_batch_fast", None)
    return None if encode is None else encode(list(texts))


class TextInputs:
    """Computes the same inputs as a plain preprocessing function, faster.

    The first batch is computed both ways; if the results differ, all batches use the plain function. Blank texts,
    other media and the first batch with a truncated text, which causes a warning, always use it.

    Args:
        tokenizer: the tokenizer.
        plain: returns the inputs of a batch; must not change between batches.
        prompt: prompt that ``plain`` prepends to each text.
    """

    def __init__(self, tokenizer: Any, plain: Callable[[list[Any]], dict[str, Any]], prompt: str = "") -> None:
        self.tokenizer = tokenizer
        self.plain = plain
        self.prompt = prompt
        self.trusted: bool | None = False if tokenizer is None else None
        self._other_inputs: dict[str, Any] = {}  # the same in all batches, such as zeros for BERT's token types
        self._has_warned = False

    def __call__(self, inputs: list[Any]) -> dict[str, Any]:
        """Return the inputs of a batch on the CPU."""
        if self.trusted is False or not all(isinstance(text, str) and text.strip() for text in inputs):
            return self.plain(inputs)
        if self.trusted is None:
            plain = self.plain(inputs)
            self._other_inputs = {name: plain[name] for name in plain.keys() - {"input_ids", "attention_mask"}}
            self.trusted = _equal(plain, self._quick(inputs, plain))
            return plain
        features = self._quick(inputs, {})
        return self.plain(inputs) if features is None else features

    def _quick(self, texts: Sequence[str], plain: dict[str, Any]) -> dict[str, Any] | None:
        tokenizer = self.tokenizer
        prompted = [self.prompt + text for text in texts]
        with turn(tokenizer):
            tokenizer(prompted[:1], truncation=True, verbose=False)  # sets the truncation of the backend
            encodings = backend_encodings(tokenizer, prompted)
        if encodings is None:
            return None
        lengths = np.array([len(encoding) for encoding in encodings])
        if not plain and not self._has_warned and lengths.max() >= tokenizer.model_max_length:
            self._has_warned = True
            return None
        real = np.arange(lengths.max()) < lengths[:, None]
        if tokenizer.padding_side == "left":
            real = real[:, ::-1]
        ids = np.full(real.shape, tokenizer.pad_token_id, dtype=np.int64)
        ids[real] = np.concatenate([encoding.ids for encoding in encodings])
        if not plain and ids.max() >= tokenizer.vocab_size:  # the plain function verifies added tokens
            return None
        features = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(real.astype(np.int64))}
        return features | {
            name: torch.zeros_like(features["input_ids"]) if isinstance(value, Tensor) else value
            for name, value in self._other_inputs.items()
        }


def _equal(plain: dict[str, Any], quick: dict[str, Any] | None) -> bool:
    """Return True if all plain inputs are present with equal types and values."""
    return quick is not None and all(
        value.dtype == quick[name].dtype and torch.equal(value, quick[name])
        if isinstance(value, Tensor) and isinstance(quick.get(name), Tensor)
        else name in quick and quick[name] is value
        for name, value in plain.items()
    )
