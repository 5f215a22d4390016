"""Effect of repetition, randomness and length on prompt entropy at each layer (Figure 6).

Prompts are changed as token ids, so their number of tokens stays, and all of them share the model's batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import polars as pl
import torch

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import OptionError
from midlayer_encoders.metrics import Normalization, prompt_entropy
from midlayer_encoders.paper.token_ids import check_experiment, experiment_frame, ids_reader, text_values, tokenized
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.validation import check_choice

if TYPE_CHECKING:
    from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder


PromptKind: TypeAlias = Literal["repetition", "resampling", "randomness", "length"]
"""Tokens become one token of the prompt, others of its tokens, or any of the vocabulary; or the prompt ends early."""

PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)
PROBABILITIES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (8, 16, 32, 64, 128)


def replaced(
    ids: Sequence[int],
    probability: float,
    *,
    kind: PromptKind,
    vocabulary: Sequence[int],
    fixed: Sequence[int] = (),
    generator: torch.Generator,
) -> list[int]:
    """Return token ids of which each is replaced with a probability; their number stays.

    Args:
        ids: of one text.
        probability: of each token to be replaced.
        kind: ``"repetition"`` by one token drawn from the text (as the paper's examples show), ``"resampling"`` by a
            token drawn from the text anew at each place, ``"randomness"`` by one drawn from the vocabulary.
        vocabulary: ids to draw from.
        fixed: ids that stay and are not drawn: special tokens.
        generator: of the draws.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> replaced([5, 6, 7, 8], 1.0, kind="repetition", vocabulary=(), generator=generator)
        [6, 6, 6, 6]
    """
    text_tokens = [token for token in ids if token not in fixed]
    draws = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    pool = vocabulary if kind == "randomness" else text_tokens
    if not text_tokens or not pool:
        return list(ids)
    picks = torch.randint(len(pool), (len(ids),), generator=generator).tolist()
    chosen = picks if kind != "repetition" else [picks[0]] * len(ids)
    return [
        pool[pick] if token not in fixed and draw < probability else token
        for token, draw, pick in zip(ids, draws.tolist(), chosen, strict=True)
    ]


def shortened(ids: Sequence[int], length: int, *, fixed: Sequence[int] = ()) -> list[int]:
    """Return the first ``length`` token ids of a text; special tokens at its end stay at its end.

    Example:
        >>> shortened([1, 5, 6, 7, 8, 2], 4, fixed=(1, 2))
        [1, 5, 6, 2]
    """
    tail = next((index for index, token in enumerate(reversed(ids)) if token not in fixed), 0)
    return [*ids[: length - tail], *ids[len(ids) - tail :]]


def extreme_prompts(
    encoder: LayerEncoder,
    texts: Sequence[str],
    *,
    kinds: Sequence[PromptKind] = PROMPT_KINDS,
    probabilities: Sequence[float] = PROBABILITIES,
    lengths: Sequence[int] = LENGTHS,
    layers: Sequence[Layer] | str = "all",
    max_length: int = 128,
    seed: int = 0,
    dataset: str = "texts",
    token_budget: int = 4096,
) -> pl.DataFrame:
    """Return the tidy frame of prompt entropy at every layer for changed prompts.

    The same draws decide at every probability which tokens are replaced and by what, so that curves differ by the
    probability alone. Replaced prompts are measured as a share of the largest entropy (``normalization="maxEntropy"``),
    prompts of growing length in nats, as in the paper.

    Args:
        encoder: with the whole model.
        texts: two or more, of three tokens or more each.
        kinds: some of ``"repetition"``, ``"resampling"``, ``"randomness"`` and ``"length"``.
        probabilities: of a token to be replaced, each in ``[0, 1]``.
        lengths: tokens of the prefixes. Only texts that have the longest are taken: curves differ by length alone.
        layers: ``"all"`` or some.
        max_length: tokens after which a text is truncated.
        seed: of the draws.
        dataset: what the frame calls the texts.
        token_budget: tokens in a batch.

    Returns:
        The tidy columns, and ``condition`` (the kind) and ``amount`` (probability or number of tokens).
    """
    check_experiment(encoder, texts)
    _check(kinds, probabilities, lengths, max_length)
    ids = tokenized(encoder, texts, max_length=max_length)
    reader = ids_reader(encoder, layers=layers)
    rows: list[dict[str, object]] = []
    prompts: dict[tuple[PromptKind, float], list[list[int]]] = {
        (kind, amount): _changed(encoder, ids, kind, amount, seed)
        for kind in kinds
        if kind != "length"
        for amount in probabilities
    }
    if prompts:
        rows += _measured(reader, prompts, "maxEntropy", token_budget)
    if "length" in kinds:
        rows += _measured(reader, _prefixes(encoder, ids, lengths), "raw", token_budget)
    return experiment_frame(encoder, rows, dataset=dataset, extra={"condition": pl.String(), "amount": pl.Float64()})


def _check(kinds: Sequence[str], probabilities: Sequence[float], lengths: Sequence[int], max_length: int) -> None:
    for kind in kinds:
        check_choice("kinds", kind, PROMPT_KINDS)
    if not kinds:
        raise OptionError(f"`kinds` must name some of {', '.join(PROMPT_KINDS)}, but got none.")
    if any(not 0 <= p <= 1 for p in probabilities) or not probabilities:
        raise OptionError(f"`probabilities` must be in [0, 1], one or more, but got {list(probabilities)}.")
    if "length" in kinds and (not lengths or not all(3 <= length <= max_length for length in lengths)):
        raise OptionError(
            f"`lengths` must be in [3, {max_length}] (`max_length`), one or more, but got {list(lengths)}."
        )


def _changed(
    encoder: LayerEncoder, ids: Sequence[Sequence[int]], kind: PromptKind, amount: float, seed: int
) -> list[list[int]]:
    model: Any = encoder[0].model
    special = set(encoder.tokenizer.all_special_ids)
    size = min(len(encoder.tokenizer), len(model.get_input_embeddings().weight))
    vocabulary = [token for token in range(size) if token not in special] if kind == "randomness" else []
    generator = torch.Generator().manual_seed(seed)  # the same for every amount
    change = partial(replaced, kind=kind, vocabulary=vocabulary, fixed=tuple(special), generator=generator)
    return [change(text_ids, amount) for text_ids in ids]


def _prefixes(
    encoder: LayerEncoder, ids: Sequence[Sequence[int]], lengths: Sequence[int]
) -> dict[tuple[PromptKind, float], list[list[int]]]:
    long = [text_ids for text_ids in ids if len(text_ids) >= max(lengths)]
    if len(long) < 2:
        raise OptionError(
            f"`lengths` must leave 2 texts or more that are as long, but {len(long)} have {max(lengths)} tokens. "
            f"Pass longer texts, or shorter lengths (the longest text has {max(map(len, ids))})."
        )
    special = tuple(encoder.tokenizer.all_special_ids)
    return {("length", n): [shortened(text_ids, n, fixed=special) for text_ids in long] for n in sorted(lengths)}


def _measured(
    reader: LayerReader,
    prompts: Mapping[tuple[PromptKind, float], Sequence[Sequence[int]]],
    normalization: Normalization,
    token_budget: int,
) -> Iterator[dict[str, object]]:
    """Yield the mean entropy of each condition and layer; the prompts of all conditions share batches."""
    flat = [text_ids for texts in prompts.values() for text_ids in texts]
    entropy = partial(prompt_entropy, normalization=normalization)
    values = text_values(reader, flat, entropy, token_budget=token_budget)
    start = 0
    for (kind, amount), texts in prompts.items():
        means = values[:, start : start + len(texts)].mean(1)
        start += len(texts)
        for layer, value in zip(reader.layers, means.tolist(), strict=True):
            row = {"layer": layer, "name": "prompt_entropy", "value": value}
            yield row | {"condition": kind, "amount": float(amount)}
