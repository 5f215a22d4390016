"""Prompt entropy along a text (Figure 5), of extreme prompts (Figure 6), inside the blocks (Figure 15); its orders (7).

Texts are token ids, so that changed prompts have a known number of tokens and share the model's batches.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import polars as pl
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.paper.setting import MissingInputError, Setting
from benchmarks.paper.sites import block_sites, capture_sites
from midlayer_encoders.encoder.sentence_transformers_encoder import LayerEncoder
from midlayer_encoders.errors import OptionError
from midlayer_encoders.frame.curves import check_blocks
from midlayer_encoders.frame.schema import NamedSubject, tidy_frame, tidy_rows
from midlayer_encoders.metrics import Normalization, make_metrics, prompt_entropy
from midlayer_encoders.metrics.eigen import spectral_entropy
from midlayer_encoders.reading.batches import plan_batches
from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.reader import LayerReader, layer_reader

#: Replace tokens by one token of the prompt, by several tokens of the prompt, or by any token of the vocabulary.
REPLACEMENTS = ("repetition", "resampling", "randomness")

PROBABILITIES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
LENGTHS = (8, 16, 32, 64, 128)
ORDERS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
EXPONENTS = tuple(step / 8 for step in range(33))  # 0 to 4

_MIN_TOKENS = 3
_TOKEN_BUDGET = 4096
_SITE_METRICS = ("prompt_effective_rank", "prompt_entropy")


# --- texts and frames -------------------------------------------------------------------------------------------------


def _token_ids(encoder: LayerEncoder, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Return the token ids of each text, truncated; raise an error if the model or a text is too short."""
    check_blocks(encoder.layer, encoder.name)
    if len(texts) < 2:
        raise OptionError(f"`texts` must hold 2 texts or more, but got {len(texts)}.")
    longest = min(max_length, encoder.max_seq_length or max_length)
    with turn(encoder.tokenizer):
        encodings = encoder.tokenizer(list(texts), truncation=True, max_length=longest, verbose=False)
    for text, ids in zip(texts, encodings["input_ids"], strict=True):
        if len(ids) < _MIN_TOKENS:
            raise OptionError(
                f"`texts` must have {_MIN_TOKENS} tokens or more each, but {text[:40]!r} has {len(ids)}. Leave it out."
            )
    return [list(ids) for ids in encodings["input_ids"]]


def _ids_reader(encoder: LayerEncoder) -> LayerReader:
    """Return a reader of raw layers that takes lists of token ids and pads them on the right."""
    pad = encoder.tokenizer.pad_token_id or 0

    def padded(batch: list[Any]) -> dict[str, Tensor]:
        lengths = torch.tensor([len(ids) for ids in batch], device=encoder.device)
        ids = pad_sequence([torch.tensor(ids) for ids in batch], batch_first=True, padding_value=pad)
        inputs = {"input_ids": ids.to(encoder.device)}
        if int(lengths.min()) < ids.shape[1]:  # attention without a mask is faster
            inputs["attention_mask"] = (torch.arange(ids.shape[1], device=lengths.device) < lengths[:, None]).long()
        return inputs

    return replace(layer_reader(encoder, norm="none"), preprocess=padded)


def _batches(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    return plan_batches([len(text_ids) for text_ids in ids], token_budget=_TOKEN_BUDGET)


def _text_values(
    reader: LayerReader, ids: Sequence[Sequence[int]], function: Callable[[Tensor, Tensor], Tensor], size: int = 1
) -> Tensor:
    """Return the values of each layer and text, shape ``(L, N, size)`` float64, from one pass.

    ``function`` maps states ``(B, T, D)`` and their mask ``(B, T)`` to ``size`` values or fewer for each text.
    """
    values = torch.full((len(reader.layers), len(ids), size), torch.nan, dtype=torch.float64)

    def receive(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        text_values = function(states, mask)
        values[reader.layers.index(layer), positions, : text_values.shape[1]] = text_values.double().cpu()

    for _ in reader.embed(ids, _batches(ids), tokens=receive):
        pass
    return values


def _frame(
    encoder: LayerEncoder, rows: Iterable[Mapping[str, Any]], dataset: str = "texts", **extra: Any
) -> pl.DataFrame:
    """Return the tidy frame of rows with ``layer``, ``value``, any ``name`` and the columns in ``extra``."""
    tidy = []
    spec = encoder.spec  # reads every weight
    for row in rows:
        cells = {column: row[column] for column in extra}
        name = row.get("name", "prompt_entropy")
        values = {row["layer"]: row["value"]}
        tidy += tidy_rows(values, spec, kind="metric", dataset=dataset, name=name, extra=cells)
    return tidy_frame(tidy, extra=extra)


# --- Figure 5: along the text -----------------------------------------------------------------------------------------


def entropy_along(
    encoder: LayerEncoder, texts: Sequence[str], *, stride: int = 1, max_length: int = 128, dataset: str = "texts"
) -> pl.DataFrame:
    """Return the tidy frame of prompt entropy along texts: mean and deviation over texts at each position.

    A causal model gives the tokens of a prefix the states that they have in the whole text, so one pass serves all
    prefixes.

    Args:
        encoder: an encoder with the whole model, which must be causal.
        texts: two or more texts of at least three tokens each, such as worked solutions.
        stride: number of tokens between the measured prefixes.
        max_length: number of tokens after which a text is truncated.
        dataset: name of the texts in the frame.

    Returns:
        The tidy columns, and ``position`` (tokens so far), ``deviation`` (standard deviation over texts) and ``texts``
        (number of texts that are that long).
    """
    ids = _token_ids(encoder, texts, max_length)
    reader = _ids_reader(encoder)
    if looks_ahead(reader.model, reader.anatomy, reader.preprocess([ids[0]])):
        raise OptionError(
            f"`encoder` must hold a causal model, whose states serve all prefixes, but the first token of "
            f"{encoder.name} attends to the last. Pass another model."
        )
    num_prefixes = max(map(len, ids)) // stride
    values = _text_values(reader, ids, partial(_prefix_entropies, stride=stride), num_prefixes)
    rows = [
        {
            "layer": layer,
            "value": float(finite.mean()),
            "position": stride * (prefix + 1),
            "deviation": float(finite.std(correction=0)),
            "texts": len(finite),
        }
        for layer, layer_values in zip(reader.layers, values, strict=True)
        for prefix, column in enumerate(layer_values.T)
        if len(finite := column[column.isfinite()])
    ]
    return _frame(encoder, rows, dataset, position=pl.Int64(), deviation=pl.Float64(), texts=pl.Int64())


def _entropies(states: Tensor, mask: Tensor, normalization: Normalization = "raw") -> Tensor:
    return prompt_entropy(states, mask, normalization=normalization)[:, None]


def _prefix_entropies(states: Tensor, mask: Tensor, stride: int) -> Tensor:
    """Return the prompt entropy of every ``stride``-th prefix of each text, NaN where the text is shorter."""
    lengths = torch.arange(stride, mask.shape[1] + 1, stride, device=mask.device)
    inside = torch.arange(mask.shape[1], device=mask.device) < lengths[:, None]
    entropies = [prompt_entropy(text.expand(len(lengths), -1, -1), inside) for text in states]
    return torch.stack(entropies).masked_fill(mask.sum(dim=1)[:, None] < lengths, torch.nan)


# --- Figure 6: extreme prompts ----------------------------------------------------------------------------------------


def replaced(
    ids: Sequence[int],
    probability: float,
    *,
    kind: str,
    vocabulary: Sequence[int],
    fixed: Sequence[int] = (),
    generator: torch.Generator,
) -> list[int]:
    """Return a copy of token ids in which each is replaced with the same probability.

    Args:
        ids: token ids of one text.
        probability: probability of replacing a token.
        kind: ``"repetition"`` replaces by one token drawn from the text (as in the paper's examples), ``"resampling"``
            by tokens drawn from the text independently, ``"randomness"`` by tokens drawn from the vocabulary.
        vocabulary: ids to draw from.
        fixed: ids that are neither replaced nor drawn, such as special tokens.
        generator: random generator of the draws.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> replaced([5, 6, 7, 8], 1.0, kind="repetition", vocabulary=(), generator=generator)
        [6, 6, 6, 6]
    """
    draws = torch.rand(len(ids), generator=generator, dtype=torch.float64)
    pool = vocabulary if kind == "randomness" else [token for token in ids if token not in fixed]
    if not pool:
        return list(ids)
    picks = torch.randint(len(pool), (len(ids),), generator=generator).tolist()
    if kind == "repetition":
        picks = [picks[0]] * len(ids)
    return [
        pool[pick] if token not in fixed and draw < probability else token
        for token, draw, pick in zip(ids, draws.tolist(), picks, strict=True)
    ]


def shortened(ids: Sequence[int], length: int, *, fixed: Sequence[int] = ()) -> list[int]:
    """Return the first ``length`` token ids of a text; special tokens at the end are kept.

    Example:
        >>> shortened([1, 5, 6, 7, 8, 2], 4, fixed=(1, 2))
        [1, 5, 6, 2]
    """
    tail = next((index for index, token in enumerate(reversed(ids)) if token not in fixed), 0)
    return [*ids[: length - tail], *ids[len(ids) - tail :]]


def extreme_prompts(
    encoder: LayerEncoder, texts: Sequence[str], *, max_length: int = 128, seed: int = 0
) -> pl.DataFrame:
    """Return the tidy frame of prompt entropy at every layer for repeated, random and growing prompts.

    The same random draws are used at every probability, so that curves differ by the probability alone. As in the
    paper, the entropy of replaced prompts is a share of the largest entropy (``normalization="maxEntropy"``), and that
    of prompts of growing length, which are prefixes of the longest texts, is in nats.

    Args:
        encoder: an encoder with the whole model.
        texts: two or more texts of at least three tokens each.
        max_length: number of tokens after which a text is truncated.
        seed: seed of the draws.

    Returns:
        The tidy columns, and ``condition`` (one of :data:`REPLACEMENTS` or ``"length"``) and ``amount`` (probability or
        number of tokens).
    """
    ids = _token_ids(encoder, texts, max_length)
    fixed = tuple(encoder.tokenizer.all_special_ids)
    model: Any = encoder[0].model
    size = min(len(encoder.tokenizer), len(model.get_input_embeddings().weight))
    vocabulary = [token for token in range(size) if token not in fixed]
    prompts: dict[tuple[str, float], list[list[int]]] = {}
    for kind in REPLACEMENTS:
        for probability in PROBABILITIES:
            generator = torch.Generator().manual_seed(seed)
            change = partial(replaced, kind=kind, vocabulary=vocabulary, fixed=fixed, generator=generator)
            prompts[kind, probability] = [change(text_ids, probability) for text_ids in ids]
    lengths = [length for length in LENGTHS if length <= max_length]
    long_texts = [text_ids for text_ids in ids if len(text_ids) >= max(lengths)]
    if len(long_texts) < 2:
        raise OptionError(
            f"`texts` must hold 2 texts or more of {max(lengths)} tokens, but got {len(long_texts)}. Pass longer "
            f"texts, or a smaller `max_length` (the longest text has {max(map(len, ids))} tokens)."
        )
    prefixes: dict[tuple[str, float], list[list[int]]] = {
        ("length", length): [shortened(text_ids, length, fixed=fixed) for text_ids in long_texts] for length in lengths
    }
    rows = [*_mean_entropies(encoder, prompts, "maxEntropy"), *_mean_entropies(encoder, prefixes, "raw")]
    return _frame(encoder, rows, condition=pl.String(), amount=pl.Float64())


def _mean_entropies(
    encoder: LayerEncoder, prompts: Mapping[tuple[str, float], list[list[int]]], normalization: Normalization
) -> Iterator[dict[str, Any]]:
    """Yield the mean entropy of each condition and layer; the prompts of all conditions share batches."""
    reader = _ids_reader(encoder)
    function = partial(_entropies, normalization=normalization)
    values = _text_values(reader, [text_ids for texts in prompts.values() for text_ids in texts], function)[..., 0]
    parts = torch.split(values, [len(texts) for texts in prompts.values()], dim=1)
    for (condition, amount), part in zip(prompts, parts, strict=True):
        for layer, value in zip(reader.layers, part.mean(dim=1).tolist(), strict=True):
            yield {"layer": layer, "value": value, "condition": condition, "amount": float(amount)}


# --- Figure 15: inside the blocks -------------------------------------------------------------------------------------


def subblocks(encoder: LayerEncoder, texts: Sequence[str], *, max_length: int = 128) -> pl.DataFrame:
    """Return the tidy frame of effective rank and prompt entropy at the sites inside each block, from one pass.

    Args:
        encoder: an encoder with the whole model.
        texts: two or more texts of at least three tokens each.
        max_length: number of tokens after which a text is truncated.

    Returns:
        The tidy columns, and ``site``; see :func:`~benchmarks.paper.sites.block_sites`. The layer of a site
        is that of the block's output, ``1`` to ``num_layers``.
    """
    ids = _token_ids(encoder, texts, max_length)
    reader = _ids_reader(encoder)
    layers = list(range(1, reader.anatomy.num_layers + 1))
    sites = list(block_sites(reader.anatomy.block(reader.model, 1), getattr(reader.model, "config", None)))
    metrics = {site: make_metrics(_SITE_METRICS, layers) for site in sites}
    for batch in _batches(ids):
        inputs = dict(reader.preprocess([ids[position] for position in batch]))
        real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()

        def receive(layer: int, site: str, states: Tensor, real: Tensor = real) -> None:
            for metric in metrics[site].values():
                metric.update(states, real.to(states.device), layer=layer)

        with torch.inference_mode():
            capture_sites(reader.model, inputs, receive, anatomy=reader.anatomy, layers=layers, sites=sites)
    rows = [
        {"layer": layer, "name": name, "value": value, "site": site}
        for site, site_metrics in metrics.items()
        for name, metric in site_metrics.items()
        for layer, value in zip(layers, metric.compute().tolist(), strict=True)
    ]
    return _frame(encoder, rows, site=pl.String())


# --- Figure 5: along the sequence -----------------------------------------------------------------------------------


def along_solutions(setting: Setting) -> pl.DataFrame:
    """Return prompt entropy along worked solutions."""
    texts = setting.solutions[: 2 * setting.limit]
    if not texts:
        raise MissingInputError("It needs worked solutions: pass --solutions FILE (the paper uses GSM8K).")
    options: dict[str, Any] = {"stride": 4, "max_length": 2 * setting.max_length, "dataset": "solutions"}
    return setting.for_each_model(partial(entropy_along, texts=texts, **options))


# --- Figure 6: extreme prompts --------------------------------------------------------------------------------------


def changed_prompts(setting: Setting) -> pl.DataFrame:
    """Return prompt entropy of repeated, random and growing prompts."""
    texts = setting.required_texts()
    measure = partial(extreme_prompts, texts=texts, max_length=setting.max_length, seed=setting.seed)
    return setting.for_each_model(measure)


# --- Figure 7: orders -----------------------------------------------------------------------------------------------


def order_entropies(
    orders: Sequence[float] = ORDERS, exponents: Sequence[float] = EXPONENTS, *, size: int = 128
) -> pl.DataFrame:
    r"""Return the tidy frame of entropies of every order on power-law spectra, and the share of the smaller half.

    .. math::
        S_\alpha(\lambda) \quad\text{and}\quad S_\alpha(\lambda) - S_\alpha(\lambda_1, \dots, \lambda_{n/2}), \qquad
        \lambda_i = i^{-\beta}

    ``tail_share`` is the second divided by the first: the share of the entropy that the smaller half of the eigenvalues
    contributes.

    Args:
        orders: :math:`\alpha`, each ``> 0``.
        exponents: :math:`\beta`, each ``>= 0``; ``0`` is a flat spectrum.
        size: number of eigenvalues n, two or more.

    Returns:
        The tidy columns, with ``"matrix_entropy"`` (over log n) and ``"tail_share"`` as names, and ``alpha`` and
        ``beta``.

    Example:
        >>> flat = order_entropies([2.0], [0.0], size=8)
        >>> [(name, round(value, 4)) for name, value in flat.select("name", "value").iter_rows()]
        [('matrix_entropy', 1.0), ('tail_share', 0.3333)]
    """
    subject = NamedSubject("power law", f"n={size}", 0)
    rows: list[dict[str, Any]] = []
    for beta in exponents:
        spectrum = torch.diag(torch.arange(1, size + 1, dtype=torch.float64) ** -beta)
        for alpha in orders:
            whole = float(spectral_entropy(spectrum, alpha=alpha, method="exact"))
            head = float(spectral_entropy(spectrum[: size // 2, : size // 2], alpha=alpha, method="exact"))
            extra = {"alpha": alpha, "beta": beta}
            for name, value in (("matrix_entropy", whole / math.log(size)), ("tail_share", (whole - head) / whole)):
                rows += tidy_rows({0: value}, subject, kind="metric", dataset="i^-beta", name=name, extra=extra)
    return tidy_frame(rows, extra={"alpha": pl.Float64(), "beta": pl.Float64()})


# --- Figure 15: inside the blocks -----------------------------------------------------------------------------------


def inside_blocks(setting: Setting) -> pl.DataFrame:
    """Return token metrics at every site inside the blocks."""
    return setting.for_each_model(partial(subblocks, texts=setting.required_texts(), max_length=setting.max_length))
