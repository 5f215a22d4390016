"""Compute embeddings: check and prepare inputs, run the modules, and check the vectors."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor
from tqdm import tqdm

from midlayer_encoders.arguments import TokenBudget
from midlayer_encoders.encoder import inputs as prepare
from midlayer_encoders.encoder.first_module import reads_padding
from midlayer_encoders.encoder.options import check_device, device_name
from midlayer_encoders.encoder.sentence_transformers_internals import encoding_order
from midlayer_encoders.errors import NotFiniteError, OptionError, short_repr
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.reading import batches as plans
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.media_inputs import InputError, medium_of
from midlayer_encoders.reading.pooling import pool, real_tokens
from midlayer_encoders.reading.reader import LayerReader
from midlayer_encoders.recipes import CHARACTERS_PER_TOKEN
from midlayer_encoders.validation import check_choice, check_count, check_text

logger = logging.getLogger(__name__)

#: Features of a batch that only sentence-transformers uses.
NOT_MODEL_INPUTS = {"modality", "task", "prompt_length", "token_embeddings", "sentence_embedding"}

_prefetch: ContextVar[BatchPrefetch | None] = ContextVar("_prefetch", default=None)  # of this thread's `encode`


def as_list(inputs: Any) -> list[Any]:
    """Return inputs as a list; ``SentenceTransformer`` also accepts other iterables."""
    if isinstance(inputs, np.ndarray):
        return inputs.tolist()  # type: ignore[no-any-return]
    return inputs if isinstance(inputs, list) else list(inputs)


def encode(encoder: Any, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return embeddings as ``SentenceTransformer.encode`` does, with these arguments; see ``LayerEncoder.encode``."""
    single = encoder.is_singular_input(inputs)
    inputs = inputs if single else as_list(inputs)
    items = [inputs] if single else inputs
    call = inspect.signature(SentenceTransformer.encode).bind(encoder, inputs, *args, **kwargs)
    for name, unit in (("batch_size", "inputs"), ("truncate_dim", "dimensions")):
        if name in call.arguments and (call.arguments[name] is not None or name == "batch_size"):
            call.arguments[name] = check_count(name, call.arguments[name], unit)
    devices = call.arguments.get("device")
    for device in devices if isinstance(devices, list | tuple) else [devices]:
        check_device(None if device is None else device_name("device", device))
    try:
        for item in items if not is_for_tokenizer(encoder, items) else ():
            prepare.split_medium(item, encoder.media, model=encoder.name)
        prefetch = BatchPrefetch(encoder, items, in_background=encoder.device.type == "cuda")
        with prefetch.running():
            embeddings = SentenceTransformer.encode(*call.args, **call.kwargs)
    except InputError as reason:  # `encode` reorders inputs: find the caller's position
        position = next((n for n, item in enumerate(inputs) if item is reason.item), None) if not single else None
        raise InputError(f"Input {position}: {reason}" if position is not None else str(reason)) from reason
    check_finite(encoder, items, embeddings, single)
    return embeddings


def read_vectors(
    encoder: Any, reader: LayerReader, items: list[Any], budget: TokenBudget, prompt: str, show_progress_bar: bool
) -> Tensor:
    """Return the vectors of the layers of a reader, shape ``(L, N, D)``, from one pass over the inputs."""
    tokens = plans.tokens_that_fit(encoder) if budget == "auto" else budget
    batches = plans.batches_of(encoder, items, token_budget=tokens, prompt=prompt)
    with tqdm(total=len(items), desc="Inputs", disable=not show_progress_bar) as bar:
        vectors = reader.vectors(items, batches, done=bar.update)
    return vectors if items else vectors.new_empty(len(reader.layers), 0, encoder.get_embedding_dimension() or 0)


# --- inputs ----------------------------------------------------------------------------------------------------------


def preprocess(encoder: Any, inputs: list[Any], prompt: str | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the features of a batch, which a call of ``encode`` may have prepared ahead of time."""

    def prepare_batch(batch: list[Any]) -> dict[str, Any]:
        read: Sequence[Any] = batch
        if not is_for_tokenizer(encoder, batch):
            rate, pixels = encoder.sampling_rate, encoder.max_pixels
            read = prepare.read_inputs(batch, encoder.media, model=encoder.name, rate=rate, max_pixels=pixels)
            if not all(isinstance(item, str) for item in read):
                return _preprocess_media(encoder, read, batch, prompt=prompt, **kwargs)
        with turn(_preparer(encoder)):
            return _preprocess_texts(encoder, read, prompt, **kwargs)

    prefetch = _prefetch.get()
    if prefetch is None or prefetch.encoder is not encoder:
        return prepare_batch(inputs)
    return prefetch.take(inputs, (prompt, kwargs), prepare_batch)


def prompt_text(encoder: Any, prompt_name: str | None, prompt: str | None, inputs: Sequence[Any]) -> str:
    """Return the prompt before each input; see ``LayerEncoder.prompt_text``."""
    texts = bool(inputs) and (plans.is_combined(inputs[0]) or medium_of(inputs[0], encoder.media) == "text")
    if prompt is not None:
        prompt = check_text("prompt", prompt)
    elif prompt_name is not None:
        check_choice("prompt_name", prompt_name, encoder.prompts)
        prompt = encoder.prompts[prompt_name] or ""
    if prompt and inputs and not texts:
        raise OptionError(f"`prompt` does not apply to images and audio, but got {short_repr(prompt)}.")
    default: str = encoder.default_prompt if texts else ""
    return default if prompt is None else prompt


def is_for_tokenizer(encoder: Any, inputs: Sequence[Any]) -> bool:
    """Return whether inputs go to the tokenizer directly: conversations, or pairs of texts."""
    chat = "message" in encoder.modalities and all(map(prepare.is_conversation, inputs))
    return chat or ("text" in encoder.media and all(map(prepare.is_pair, inputs)))


def _preparer(encoder: Any) -> Any:
    """Return the tokenizer, or the processor of a model without one."""
    return encoder.processor if encoder.tokenizer is None else encoder.tokenizer


def _preprocess_media(encoder: Any, read: Sequence[Any], inputs: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
    """Return the features of inputs that were read; errors refer to the original ``inputs``."""
    model = encoder.transformer
    is_audio = "audio" in encoder.media and hasattr(model, "config")
    if is_audio and prepare.check_lengths(read, inputs, model, encoder.processor):
        message = "Audio is longer than the window of %s and is truncated; reported once."
        _warn_once(encoder, "truncation", message, encoder.name)
    if not encoder.makes_one_size:
        prepare.check_sizes(read, inputs, encoder.name)
    if suffers_from_padding(model):  # the extractor's scaling needs the mask, the model does not
        kwargs["processing_kwargs"] = prepare.WITH_MASK
    # A processor has no state, unlike a tokenizer or what a user's own function may have.
    is_shared = encoder.tokenizer is not None or encoder.in_memory
    with turn(_preparer(encoder)) if is_shared else nullcontext():
        features = SentenceTransformer.preprocess(encoder, read, **kwargs)
    return prepare.model_features(model, features)


def _preprocess_texts(encoder: Any, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
    empty = bool(inputs) and not prompt and all(isinstance(text, str) and not text.strip() for text in inputs)
    if empty and not encoder.tokenizer(list(inputs))["input_ids"][0]:
        features: dict[str, Any] = SentenceTransformer.preprocess(encoder, ["."] * len(inputs), prompt=prompt, **kwargs)
        features["attention_mask"] = torch.zeros_like(features["attention_mask"])
        return features
    if not encoder.in_memory and not reads_padding(encoder.transformer):
        encoder.tokenizer.padding_side = "right"  # which leaves positions unchanged
    features = SentenceTransformer.preprocess(encoder, inputs, prompt=prompt, **kwargs)
    _check_ids(encoder, features.get("input_ids"))
    _warn_truncation(encoder, inputs, features, prompt)
    placed = encoder.counting.placed
    if placed.question and bool((features["attention_mask"].sum(dim=1) <= placed.added).any()):
        message = "An empty text has no copies: its vector is the end of its prompt; reported once."
        _warn_once(encoder, "empty", message)
    return features


def _check_ids(encoder: Any, ids: Tensor | None) -> None:
    """Raise if a token has no embedding because only the tokenizer was extended."""
    if ids is None or encoder.tokenizer is None or not ids.numel():
        return
    path = encoder.stack and encoder.stack.embeddings
    size = getattr(encoder.transformer.get_submodule(path), "num_embeddings", None) if path else None
    if size is not None and len(encoder.tokenizer) > size and (last := int(ids.max())) >= size:
        raise OptionError(
            f"The tokenizer of {encoder.name} makes the token {encoder.tokenizer.convert_ids_to_tokens(last)!r}, but "
            "the model has no embedding for it. Call `model.resize_token_embeddings(len(tokenizer))`; save both again."
        )


# --- warnings, each once for an encoder ------------------------------------------------------------------------------


def _warn_once(encoder: Any, topic: str, message: str, *values: Any) -> None:
    if topic not in encoder.warned:
        encoder.warned.add(topic)
        logger.warning(message, *values)


def _warn_truncation(encoder: Any, inputs: Sequence[Any], features: dict[str, Any], prompt: str | None) -> None:
    limit, mask, tokenizer = encoder.max_seq_length, features.get("attention_mask"), encoder.tokenizer
    if limit is None or mask is None or mask.ndim != 2 or tokenizer is None or "truncation" in encoder.warned:
        return
    tokens = mask.sum(dim=1).tolist()
    characters = [len(text) if isinstance(text, str) else 0 for text in inputs]
    row = max(range(len(tokens)), key=tokens.__getitem__)
    placed = encoder.counting.placed
    if placed.copies > 1 and max(characters) > CHARACTERS_PER_TOKEN * (limit - placed.added):
        row = characters.index(max(characters))  # its end was removed before the text was tokenized
    elif tokens[row] < limit:
        return
    if not characters[row]:
        return
    own, special = (tokenizer, True) if placed.copies == 1 else (encoder[0].tokenizer_without_template, False)
    text = (prompt or "") + inputs[row]
    length = len(own(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"])
    length = length if placed.copies == 1 else placed.added + placed.copies * length
    if length > tokens[row]:
        length, kept_length = ((count - placed.added) // placed.copies for count in (length, tokens[row]))
        message = (
            "A text of %d tokens is truncated to %d (%r…); reported once. Pass `max_length` to choose the limit, or "
            "split long texts."
        )
        _warn_once(encoder, "truncation", message, length, kept_length, inputs[row][:40])


# --- the forward pass ------------------------------------------------------------------------------------------------


def forward(encoder: Any, inputs: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Run the modules of an encoder; the vector of a text without tokens is zero."""
    first, *later = list(encoder)
    unpadded = not encoder.training and suffers_from_padding(first.model)
    is_media = encoder.pooling != "head" and (unpadded or inputs.get("modality") in ("image", "audio"))
    if not is_media and encoder.counting.all:
        features: dict[str, Any] = SentenceTransformer.forward(encoder, inputs, **kwargs)
        return features if encoder.training else _without_empty(features, features.get("attention_mask"))
    features = _media_states(first, inputs) if is_media else first(inputs)
    mask = features["attention_mask"]
    prompt_tokens = int(features.pop("prompt_length", 0)) if encoder.leaves_out_prompts else 0
    counting = replace(encoder.counting, prompt_tokens=prompt_tokens)
    features["attention_mask"] = counted = counting(mask, inputs.get("input_ids")).to(mask.dtype)
    for module in later:
        if encoder.pooling == "weightedmean" and isinstance(module, PoolingModule):
            # sentence-transformers also numbers the tokens that are left out, each release in another way.
            states = features["token_embeddings"]
            features["sentence_embedding"] = pool(states, counted.bool(), encoder.pooling).to(states.dtype)
        else:
            features = module(features)
    features["attention_mask"] = mask
    return _without_empty(features, counted)


def _media_states(first: Any, features: dict[str, Any]) -> dict[str, Any]:
    """Return the states of images, audio or texts that must not be padded, with their mask."""

    def read(batch: dict[str, Any]) -> dict[str, Any]:
        output = first(dict(batch))
        mask = real_tokens(output.get("attention_mask"), output["token_embeddings"], model=first.model)
        return {**output, "attention_mask": mask.long()}

    return prepare.forward_by_length(read, features) if suffers_from_padding(first.model) else read(features)


def _without_empty(features: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
    """Return the features with zeros as the vectors of inputs without tokens."""
    vectors = features.get("sentence_embedding")
    # Not `len`, which a tracer makes a constant.
    if mask is None or vectors is None or mask.ndim != 2 or mask.shape[0] != vectors.shape[0]:
        return features
    return {**features, "sentence_embedding": vectors.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)}


def check_finite(encoder: Any, inputs: Sequence[Any], embeddings: Any, single: bool) -> None:
    """Raise a :class:`NotFiniteError` for the first input whose vector has NaN or infinity."""
    rows = [embeddings] if single else embeddings
    if isinstance(rows, np.ndarray | Tensor) and torch.as_tensor(rows).isfinite().all():
        return
    for text, row in zip(inputs, rows, strict=True):
        if isinstance(row, np.ndarray | Tensor) and not torch.as_tensor(row).isfinite().all():
            raise NotFiniteError(
                f"Layer {encoder.layer} of {encoder.name} gives NaN or infinity for {str(text)[:80]!r} "
                f"in {encoder.dtype}. Load it with dtype='float32', or check the weights."
            )


# --- batches that are prepared ahead ---------------------------------------------------------------------------------


class BatchPrefetch:
    """Prepares the batches of one call of ``encode`` quickly, and on a GPU in another thread while others run.

    ``SentenceTransformer.encode`` prepares each batch only after the previous one has run, in an order that is known.

    Args:
        encoder: the encoder.
        inputs: the inputs of ``encode``.
        in_background: whether another thread prepares batches.
    """

    def __init__(self, encoder: SentenceTransformer, inputs: Sequence[Any], *, in_background: bool) -> None:
        self.encoder = encoder
        self.inputs = inputs
        self.in_background = in_background
        self.arguments: Any = None
        self.prepare: plans.TextInputs | None = None
        self.batches: Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None] = ahead(dict, [])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serve the batches of this encoder in this thread inside this block; no thread outlives it."""
        token = _prefetch.set(self)
        try:
            yield
        finally:
            _prefetch.reset(token)
            self.batches.close()

    def take(
        self, batch: list[Any], arguments: tuple[str | None, Any], prepare_batch: Callable[[list[Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        """Return the features of a batch, prepared ahead unless the batch or the arguments are unexpected."""
        if self.prepare is None:  # the first batch, which has the batch size
            self.arguments = arguments
            self.prepare = plans.TextInputs(self.encoder.tokenizer, prepare_batch, arguments[0] or "")
            is_worthwhile = self.in_background and len(self.inputs) > 2 * len(batch)
            order = (encoding_order(self.encoder, self.inputs) if is_worthwhile else None) or []
            starts = range(0, len(order), len(batch))
            items = [[self.inputs[n] for n in order[start : start + len(batch)]] for start in starts]
            self.batches = ahead(self.prepare, items)
        if self.arguments != arguments:
            return prepare_batch(batch)
        expected, result = next(self.batches, ([], None))
        if result is not None and len(expected) == len(batch) and all(map(operator.is_, expected, batch)):
            return result()
        self.batches.close()
        return self.prepare(batch)
