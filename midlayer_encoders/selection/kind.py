"""Determine the kind of a model: by its files, or where these say nothing, by half match of texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from midlayer_encoders._types import Progress, Stage
from midlayer_encoders.metrics.label_accuracy import equal_steps, resampled_means
from midlayer_encoders.metrics.sample_metrics import LEAST_TOKENS, half_match_by_text, half_means
from midlayer_encoders.models.anatomy import resolve_layer
from midlayer_encoders.models.hub import local_only, weight_files
from midlayer_encoders.reading.batches import LayerSource, batches_of, count_steps, count_tokens, input_sizes
from midlayer_encoders.reading.causal import looks_ahead
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.selection import rules

#: Fewer texts than this are not measured.
MIN_TEXTS = 16

#: An embedding model, a causal or bidirectional text model, or a model of images or audio.
ModelKind: TypeAlias = Literal["tuned", "causal", "bidirectional", "media"]

KIND_NAMES: Mapping[ModelKind, str] = {
    "tuned": "an embedding model",
    "causal": "a causal language model that was not tuned for embeddings",
    "bidirectional": "a bidirectional model that was not tuned for embeddings",
    "media": "a model of images or audio",
}

#: How much higher half match is at the last layer of an embedding model than at any layer up to ``rules.DEPTH``.
#:
#: Untrained models lead by at most 0.09, 0.14 with three blocks, MiniLM by at least 0.28
#: (benchmarks/selection/README.md).
_MIN_LEAD = 0.15

_SHARE = 0.975  # of resampled texts that must show an embedding model
_MAX_TEXTS = 100  # with more, half match of an embedding model is no clearer
_HEAD = re.compile(r"For[A-Z]|Head")  # LlamaForCausalLM, GPT2LMHeadModel, BertForPreTraining, …
_TASK_HEAD = re.compile(r"For(\w*Classification|QuestionAnswering|MultipleChoice)$")
_CLASSIFIERS = {"classifier", "score"}  # names of weights
_SAMPLE_TEXT = "A few words to see."


@dataclass(frozen=True)
class DetectedKind:
    """The kind of a model, and what shows it.

    Attributes:
        name: the kind.
        evidence: the end of a sentence, such as ``"its folder has modules of sentence-transformers"``.
    """

    name: ModelKind
    evidence: str

    def __str__(self) -> str:
        return f"The model counts as {KIND_NAMES[self.name]}: {self.evidence}."


def detect_kind(
    source: LayerSource,
    texts: Sequence[Any] = (),
    *,
    seed: int = 0,
    token_budget: int = 4096,
    progress: Progress | None = None,
) -> DetectedKind:
    """Return the kind of a model; causal attention is detected by running the model on a few words.

    Modules of sentence-transformers show an embedding model, and so does a bidirectional model that was saved without
    the head of its pretraining. A head, a decoder or a reranker shows that it is none. Where the files say nothing,
    half match decides, with an interval.

    Args:
        source: the encoder of the whole model.
        texts: texts for half match.
        seed: seed of the resamples.
        token_budget: tokens in a batch.
        progress: called after each batch with the stage ``"kind"``, in tokens.
    """
    if "text" not in source.media:
        return DetectedKind("media", "it takes no text")
    if source.saved.modules:
        return DetectedKind("tuned", "its folder has modules of sentence-transformers")
    is_causal = not looks_ahead(source.transformer, source.anatomy, source.model_inputs([_SAMPLE_TEXT]))
    untuned: ModelKind = "causal" if is_causal else "bidirectional"
    if source.saved.saved_class == "CrossEncoder":
        evidence = "its folder is a CrossEncoder of sentence-transformers, which scores pairs of texts"
        return DetectedKind(untuned, evidence)
    saved_as = _saved_as(source.transformer)
    classes = saved_as or [parent.__name__ for parent in type(source.transformer).__mro__]
    folder = "it has no modules of sentence-transformers"
    if source.saved.saved_class:
        folder = f"its folder is a {source.saved.saved_class} of sentence-transformers"
    if head := next(filter(_HEAD.search, classes), None):
        shown = f"it was saved as {head}" if saved_as else f"its class is {head}"
        return DetectedKind(untuned, f"{shown}, with {_describe_head(head)}, and {folder}")
    parts = {name.partition(".")[0] for name in _weight_names(source)}
    others = {part for part in parts if not hasattr(source.transformer, part)}
    if "decoder" in others:
        return DetectedKind(untuned, f"it was saved with the decoder of its pretraining, and {folder}")
    if not saved_as and getattr(source.transformer, "base_model_prefix", "") in others:
        part = "a classifier" if _CLASSIFIERS & others else "the head of its pretraining"
        return DetectedKind(untuned, f"the names of its weights show {part}, and {folder}")
    if not is_causal and saved_as and saved_as[0].endswith("Model"):
        return DetectedKind("tuned", f"it was saved as {saved_as[0]}, without the head of its pretraining")
    ranks = _half_match_of(source, texts, token_budget, progress)
    if ranks is None:
        needed = f"half match needs {MIN_TEXTS} different texts of {LEAST_TOKENS} tokens or more"
        return DetectedKind(untuned, f"its files say nothing, and {needed}")
    is_tuned, (low, high) = judge_half_match(ranks, seed=seed)
    evidence = (
        f"its files say nothing, and half match of {ranks.shape[1]} texts at the last layer is {low:.2f} to {high:.2f} "
        f"above the layers up to a depth of {rules.DEPTH} (95 % interval){'' if is_tuned else ', which is too little'}"
    )
    return DetectedKind("tuned" if is_tuned else untuned, evidence)


def _describe_head(name: str) -> str:
    """Return what the head of a class is for.

    Example:
        >>> _describe_head("BertForSequenceClassification"), _describe_head("BertForMaskedLM")
        ('a head for sequence classification', 'the head of its pretraining')
    """
    if (match := _TASK_HEAD.search(name)) is None:
        return "the head of its pretraining"
    return f"a head for {re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', match[1]).lower()}"


def _weight_names(source: LayerSource) -> Sequence[str]:
    """Return the names of the weights in a model's folder, including those of a head or decoder that was not loaded.

    There are none for a module in memory and for a file of another format.
    """
    folder, revision = source.location[:2]
    return tuple(weight_files(folder, revision, local=local_only(folder, revision))) if folder else ()


def _saved_as(model: Any) -> list[str]:
    """Return the names of the classes that a model was saved as; a config may hold anything there."""
    names = getattr(getattr(model, "config", None), "architectures", None)
    listed = names if isinstance(names, list | tuple) else [names]
    return [name for name in listed if isinstance(name, str)]


def judge_half_match(ranks: Tensor, *, seed: int = 0) -> tuple[bool, tuple[float, float]]:
    """Return whether half match shows an embedding model on nearly all resampled texts, and the interval of its lead.

    Args:
        ranks: half match of each text at every layer, shape ``(L + 1, N)``.
        seed: seed of the resamples.
    """
    means = resampled_means(ranks, seed=seed)
    low, high = torch.quantile(_leads(means), torch.tensor([1 - _SHARE, _SHARE], dtype=means.dtype)).tolist()
    return bool(is_embedding_model(means).double().mean() >= _SHARE), (low, high)


def _leads(half_match: Tensor) -> Tensor:
    """Return how much higher half match is at the last layer than up to the default depth, from ``(*, L + 1)``."""
    blocks = half_match.shape[-1] - 1
    default = min(resolve_layer(rules.DEPTH, blocks), blocks - 1)
    return half_match[..., -1] - half_match[..., : default + 1].amax(dim=-1)


def is_embedding_model(half_match: Tensor) -> Tensor:
    """Return whether half match indicates that a model's last layer was trained to embed texts.

    It must be highest there, and close at least half of the gap to 1 that the layers up to ``rules.DEPTH`` leave. A
    high value alone is no evidence: in an untrained causal model the second half of a text attends to the first, and
    half match is high from the first block on.

    Args:
        half_match: of all layers, shape ``(*, L + 1)``.

    Returns:
        Shape ``(*)``, bool.

    Example:
        >>> is_embedding_model(torch.tensor([[0.2, 0.3, 0.4, 0.9], [0.2, 0.8, 0.8, 0.9]]))
        tensor([ True, False])
    """
    last = half_match[..., -1]
    lead = _leads(half_match)
    is_highest = last > half_match[..., :-1].amax(dim=-1)
    return is_highest & (lead >= _MIN_LEAD) & (1 - last <= (1 - last + lead) / 2)


def _half_match_of(
    source: LayerSource, texts: Sequence[Any], token_budget: int, progress: Progress | None
) -> Tensor | None:
    """Return half match of each text at every layer, shape ``(L + 1, N)``; ``None`` if there are too few texts."""
    distinct = list(dict.fromkeys(texts))
    lengths = count_tokens(source, distinct)
    long_enough = [text for text, length in zip(distinct, lengths, strict=True) if length >= LEAST_TOKENS]
    if len(long_enough) < MIN_TEXTS:
        return None
    sample = [long_enough[position] for position in equal_steps(len(long_enough), _MAX_TEXTS)]
    halves = read_halves(source, sample, token_budget=token_budget, progress=progress)
    return torch.stack([half_match_by_text(*by_layer.double()) for by_layer in halves])


def read_halves(
    source: LayerSource, texts: Sequence[Any], *, token_budget: int = 4096, progress: Progress | None = None
) -> list[Tensor]:
    """Return the mean state of the first and of the second half of each text at every layer, shape ``(2, N, D)``."""
    prompt = source.default_prompt
    reader = layer_reader(source, norm="none", prompt=prompt, normalize=False)
    halves: dict[int, Tensor] = {}

    def receive(layer: int, states: Tensor, mask: Tensor, positions: list[int]) -> None:
        means = half_means(states, mask).cpu()
        halves.setdefault(layer, means.new_empty(2, len(texts), means.shape[-1]))[:, positions] = means

    batches = batches_of(source, texts, token_budget=token_budget, prompt=prompt)
    sizes = input_sizes(source, texts, prompt=prompt)
    step = count_steps(sizes, batches, Stage(progress, "kind", sum(sizes)))
    for positions, _ in reader.embed(texts, batches, tokens=receive):
        step(len(positions))
    return [halves[layer] for layer in reader.layers]
