"""Compute embeddings: check and prepare inputs, run the modules, and check the vectors."""

from __future__ import annotations

import inspect
import logging
import operator
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import Tensor
from tqdm import tqdm

from midlayer_encoders._types import Layer
from midlayer_encoders.arguments import TokenBudget, check_budget
from midlayer_encoders.encoder import inputs as prepare
from midlayer_encoders.encoder.first_module import MemoryModule, check_length, reads_padding
from midlayer_encoders.encoder.options import check_device, device_name
from midlayer_encoders.encoder.saving import SavableEncoder
from midlayer_encoders.encoder.sentence_transformers_internals import encoding_order, prompt_length
from midlayer_encoders.errors import NotFiniteError, OptionError, short_repr
from midlayer_encoders.models.anatomy import suffers_from_padding
from midlayer_encoders.reading import batches as plans
from midlayer_encoders.reading.ahead import ahead
from midlayer_encoders.reading.batches import is_combined
from midlayer_encoders.reading.fused import fused_blocks
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.media_inputs import InputError, medium_of
from midlayer_encoders.reading.pooling import pool, real_tokens
from midlayer_encoders.reading.reader import LayerReader, layer_reader
from midlayer_encoders.recipes import CHARACTERS_PER_TOKEN
from midlayer_encoders.token_selector import TokenSelector
from midlayer_encoders.validation import check_choice, check_count, check_text

logger = logging.getLogger(__name__)

# Features of a batch that only sentence-transformers uses.
_NOT_MODEL_INPUTS = {"modality", "task", "prompt_length", "token_embeddings", "sentence_embedding"}

Prepare: TypeAlias = Callable[[list[Any]], dict[str, Any]]
Batches: TypeAlias = Generator[tuple[list[Any], Callable[[], dict[str, Any]]], None, None]

_running: ContextVar[_BatchesAhead | None] = ContextVar("_running", default=None)  # the `encode` of this thread


def as_list(inputs: Any) -> list[Any]:
    """Return inputs as a list; ``SentenceTransformer`` also accepts other iterables."""
    if isinstance(inputs, np.ndarray):
        return inputs.tolist()  # type: ignore[no-any-return]
    return inputs if isinstance(inputs, list) else list(inputs)


class EmbeddingEncoder(SavableEncoder):
    """A ``LayerEncoder``'s methods that compute embeddings, at one layer or at many."""

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens after which a text is truncated, with a template and one copy; ``None`` without texts."""
        return super().max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if isinstance(self[0], MemoryModule) or self.tokenizer is None:  # it would change the spec but no vector
            raise OptionError(f"`max_seq_length` must be left alone for {self.name}, which is not tokenized here.")
        if self.counting.placed.copies > 1:
            raise OptionError(
                "`max_seq_length` must be left alone with a template that repeats the text, because both copies have "
                f"to fit. Write LayerEncoder({self.name!r}, …, max_length={value}) instead."
            )
        cast(Any, self[0]).max_seq_length = check_length("max_seq_length", value, self.transformer, self.name)

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise if one is not finite.

        A joint model such as CLIP also accepts ``{"text": …, "image": …}`` and returns the sum of both vectors.

        Raises:
            InputError: for an image or waveform that cannot be read, or a medium that the model does not support.
            NotFiniteError: naming the layer and the first text whose vector has NaN or infinity.
        """
        if (layer := kwargs.get("layer")) is not None:
            raise OptionError(
                f"`layer` must be given to the encoder: LayerEncoder(model, layer={layer!r}), or to "
                f"encode_layers(inputs, layers=[{layer!r}])."
            )
        single = self.is_singular_input(inputs)
        inputs = inputs if single else as_list(inputs)
        items = [inputs] if single else inputs
        call = inspect.signature(SentenceTransformer.encode).bind(self, inputs, *args, **kwargs)
        for name, unit in (("batch_size", "inputs"), ("truncate_dim", "dimensions")):
            if name in call.arguments and (call.arguments[name] is not None or name == "batch_size"):
                call.arguments[name] = check_count(name, call.arguments[name], unit)
        devices = call.arguments.get("device")
        for device in devices if isinstance(devices, list | tuple) else [devices]:
            check_device(None if device is None else device_name("device", device))
        try:
            media = self.media
            for item in items if not self._is_for_tokenizer(items) else ():
                prepare.split_medium(item, media, model=self.name)
            with preparing_ahead(self, items, beside=self.device.type == "cuda"):
                embeddings = super().encode(*call.args[1:], **call.kwargs)
        except InputError as reason:  # `encode` reorders inputs: find the caller's position
            position = next((n for n, item in enumerate(inputs) if item is reason.item), None) if not single else None
            raise InputError(f"Input {position}: {reason}" if position is not None else str(reason)) from reason
        self._check_finite(items, embeddings, single)
        return embeddings

    def encode_layers(
        self,
        inputs: Any,
        layers: Sequence[Layer] | str = "all",
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        token_budget: TokenBudget = "auto",
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> Any:
        """Return the embeddings at many layers from one pass over the inputs, shape ``(L + 1, N, D)`` for all layers.

        Row ``k`` equals ``LayerEncoder(model, k).encode(inputs)`` up to rounding, with this encoder's norm, pooling,
        recipe and ``truncate_dim``; for a joint model such as CLIP, ``LayerEncoder(model, k / L)``, whose layers are
        numbered by its images. See :func:`~midlayer_encoders.embed` for vectors
        that do not fit in memory.

        Args:
            inputs: a list of texts, images or waveforms; for a single one the result is ``(L + 1, D)``.
            layers: ``"all"`` up to the encoder's layer, or a list; they are returned in ascending order.
            prompt_name: name of the prompt before each text; the default prompt by default.
            prompt: text of the prompt.
            token_budget: tokens in a batch; ``"auto"`` chooses a number for the device.
            show_progress_bar: show the progress on standard error.
            convert_to_tensor: return a tensor on the encoder's device instead of a NumPy array.

        Raises:
            OptionError: for an encoder with modules after its pooling.
            NotFiniteError: naming the layer and the input whose states have NaN or infinity.
        """
        budget = check_budget(token_budget)
        single = self.is_singular_input(inputs)
        items = [inputs] if single else list(inputs)
        prompt = self.prompt_text(prompt_name, prompt, items)
        reader = self.vector_reader(layers, prompt=prompt)
        tokens = plans.tokens_that_fit(self) if budget == "auto" else budget
        batches = plans.batches_of(self, items, token_budget=tokens, prompt=prompt)
        with tqdm(total=len(items), desc="Inputs", disable=not show_progress_bar) as bar:
            vectors = reader.vectors(items, batches, done=bar.update)
        if not items:
            vectors = vectors.new_empty(len(reader.layers), 0, self.get_embedding_dimension() or 0)
        vectors = vectors[:, 0] if single else vectors
        return vectors.to(self.device) if convert_to_tensor else vectors.numpy()

    def vector_reader(self, layers: Sequence[Layer] | str = "all", *, prompt: str = "") -> LayerReader:
        """Return a reader of the vectors of layers."""
        return layer_reader(self, layers=layers, prompt=prompt)

    # --- inputs ------------------------------------------------------------------------------------------------------

    def is_singular_input(self, inputs: Any) -> bool:  # type: ignore[override]
        """Return whether this is a single input; a waveform as ``(array, rate)`` is one, a column of a frame is not."""
        if hasattr(inputs, "to_list"):  # a Series of pandas or polars
            return False
        if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], int | np.integer):
            return True
        return bool(super().is_singular_input(inputs))

    def prompt_text(self, prompt_name: str | None, prompt: str | None, inputs: Sequence[Any]) -> str:
        """Return the prompt before each input: the given one, the named one, or the default one for texts."""
        texts = bool(inputs) and (is_combined(inputs[0]) or medium_of(inputs[0], self.media) == "text")
        if prompt is not None:
            prompt = check_text("prompt", prompt)
        elif prompt_name is not None:
            check_choice("prompt_name", prompt_name, self.prompts)
            prompt = self.prompts[prompt_name] or ""
        if prompt and inputs and not texts:
            raise OptionError(f"`prompt` does not apply to images and audio, but got {short_repr(prompt)}.")
        return (self.default_prompt if texts else "") if prompt is None else prompt

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; images and audio are read, and truncation is reported once."""

        def prepare_batch(batch: list[Any]) -> dict[str, Any]:
            return self._preprocess(batch, prompt, **kwargs)

        running = _running.get()
        if running is None or running.encoder is not self:
            return prepare_batch(list(inputs))
        return running.take(list(inputs), (prompt, kwargs), prompt, prepare_batch)

    def _preprocess(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        if not self._is_for_tokenizer(inputs):
            rate = self.sampling_rate
            read = prepare.read_inputs(inputs, self.media, model=self.name, rate=rate, max_pixels=self.max_pixels)
            if not all(isinstance(item, str) for item in read):
                return self._preprocess_media(read, inputs, prompt=prompt, **kwargs)
            inputs = read
        with turn(self.preparer):
            return self._preprocess_texts(inputs, prompt=prompt, **kwargs)

    def _preprocess_media(self, read: Sequence[Any], inputs: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features of inputs that were read; errors refer to the original ``inputs``."""
        model: Any = self.transformer
        if "audio" in self.media and hasattr(model, "config"):
            truncated = prepare.check_lengths(read, inputs, model, self.processor)
            if truncated and not self._truncation_warned:
                self._truncation_warned = True
                logger.warning("Audio is longer than the window of %s and is truncated; reported once.", self.name)
        if not self._makes_one_size:
            prepare.check_sizes(read, inputs, self.name)
        if suffers_from_padding(model):  # the extractor's scaling needs the mask, the model does not
            kwargs["processing_kwargs"] = prepare.WITH_MASK
        # A processor has no state, unlike a tokenizer or what a user's own function may have.
        is_shared = self.tokenizer is not None or isinstance(self[0], MemoryModule)
        with turn(self.preparer) if is_shared else nullcontext():
            features = super().preprocess(read, **kwargs)
        return prepare.model_features(model, features)

    def _preprocess_texts(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        empty = bool(inputs) and not prompt and all(isinstance(text, str) and not text.strip() for text in inputs)
        if empty and not self.tokenizer(list(inputs))["input_ids"][0]:
            features: dict[str, Any] = super().preprocess(["."] * len(inputs), prompt=prompt, **kwargs)
            features["attention_mask"] = torch.zeros_like(features["attention_mask"])
            return features
        if not isinstance(self[0], MemoryModule) and not reads_padding(self.transformer):
            self.tokenizer.padding_side = "right"  # which leaves positions unchanged
        features = super().preprocess(inputs, prompt=prompt, **kwargs)
        self._check_ids(features.get("input_ids"))
        if not self._truncation_warned:
            self._warn_truncation(inputs, features, prompt)
        if not self._unknown_warned:
            self._warn_unknown(inputs, features)
        if self.spans is not None and not self._empty_warned:
            self._warn_empty(features)
        return features

    def _check_ids(self, ids: Tensor | None) -> None:
        """Raise if a token has no embedding because only the tokenizer was extended."""
        if ids is None or self.tokenizer is None or not ids.numel():
            return
        path = None if self._anatomy is None else self._anatomy.embeddings
        size = getattr(self.transformer.get_submodule(path), "num_embeddings", None) if path else None
        if size is not None and len(self.tokenizer) > size and (last := int(ids.max())) >= size:
            raise OptionError(
                f"The tokenizer of {self.name} makes the token {self.tokenizer.convert_ids_to_tokens(last)!r}, but the "
                "model has no embedding for it. Call `model.resize_token_embeddings(len(tokenizer))`; save both again."
            )

    def _is_for_tokenizer(self, inputs: Sequence[Any]) -> bool:
        """Return whether inputs go to the tokenizer directly: conversations, or pairs of texts."""
        chat = "message" in self.modalities and all(map(prepare.is_conversation, inputs))
        return chat or ("text" in self.media and all(map(prepare.is_pair, inputs)))

    def host_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for a batch, on the host."""
        features = self.preprocess(inputs, prompt=prompt).items()
        return {key: value for key, value in features if isinstance(value, Tensor) and key not in _NOT_MODEL_INPUTS}

    @property
    def leaves_out_prompts(self) -> bool:
        """Whether the pooling leaves out the tokens of a prompt."""
        return not all(getattr(module, "include_prompt", True) for module in self)

    def pooled_tokens(self, prompt: str) -> TokenSelector:
        """Return which tokens to pool after a prompt."""
        length = prompt_length(self[0], prompt) if prompt and self.leaves_out_prompts else 0
        return replace(self.counting, prompt_tokens=length)

    def model_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs for a batch, on its device."""
        return prepare.to_device(self.host_inputs(inputs, prompt=prompt), self.device)

    # --- the forward pass --------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the modules, one thread at a time, since a pass may change the model, such as its rotary tables.

        ``forward`` takes no lock because ``compile`` traces it.
        """
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        is_compiled = any(module._compiled_call_impl is not None for module in (self, *self))
        with turn(self.transformer), nullcontext() if is_compiled else fused_blocks(self.transformer):
            return super().__call__(*args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: A002  (the base class's name)
        """Run the modules; the vector of a text without tokens is zero."""
        first, *later = cast(Any, list(self))
        unpadded = not self.training and suffers_from_padding(first.model)
        is_media = not self.has_heads and (unpadded or input.get("modality") in ("image", "audio"))
        if not is_media and self.counting.all:
            features: dict[str, Any] = super().forward(input, **kwargs)
            return features if self.training else _without_empty(features, features.get("attention_mask"))
        features = self._media_states(input) if is_media else first(input)
        mask = features["attention_mask"]
        prompt_tokens = int(features.pop("prompt_length", 0)) if self.leaves_out_prompts else 0
        counting = replace(self.counting, prompt_tokens=prompt_tokens)
        features["attention_mask"] = counted = counting(mask, input.get("input_ids")).to(mask.dtype)
        for module in later:
            if self.pooling == "weightedmean" and isinstance(module, PoolingModule):
                # sentence-transformers also numbers the tokens that are left out, each release in another way.
                states = features["token_embeddings"]
                features["sentence_embedding"] = pool(states, counted.bool(), self.pooling).to(states.dtype)
            else:
                features = module(features)
        features["attention_mask"] = mask
        return _without_empty(features, counted)

    def _media_states(self, features: dict[str, Any]) -> dict[str, Any]:
        """Return the states of images, audio or texts that must not be padded, with their mask."""
        first: Any = self[0]

        def read(batch: dict[str, Any]) -> dict[str, Any]:
            output = first(dict(batch))
            mask = real_tokens(output.get("attention_mask"), output["token_embeddings"], model=first.model)
            return {**output, "attention_mask": mask.long()}

        return prepare.forward_by_length(read, features) if suffers_from_padding(first.model) else read(features)

    def _warn_truncation(self, inputs: Sequence[Any], features: dict[str, Any], prompt: str | None) -> None:
        limit = self.max_seq_length
        mask = features.get("attention_mask")
        if limit is None or mask is None or mask.ndim != 2 or self.tokenizer is None:
            return
        tokens = mask.sum(dim=1).tolist()
        characters = [len(text) if isinstance(text, str) else 0 for text in inputs]
        row = max(range(len(tokens)), key=tokens.__getitem__)
        placed = self.counting.placed
        if placed.copies > 1 and max(characters) > CHARACTERS_PER_TOKEN * (limit - placed.added):
            row = characters.index(max(characters))  # its end was removed before the text was tokenized
        elif tokens[row] < limit:
            return
        if characters[row] and (length := self._count_tokens((prompt or "") + inputs[row])) > tokens[row]:
            self._truncation_warned = True
            length, kept = ((count - placed.added) // placed.copies for count in (length, tokens[row]))
            logger.warning(
                f"A text of {length} tokens is truncated to {kept} ({inputs[row][:40]!r}…); reported once. "
                "Pass `max_length` to choose the limit, or split long texts."
            )

    def _count_tokens(self, text: str) -> int:
        """Return the number of tokens of a text in its template, without truncation; both copies of one count."""
        placed = self.counting.placed
        if placed.copies == 1:
            return len(self.tokenizer(text, truncation=False, verbose=False)["input_ids"])
        plain: Any = self[0].tokenizer_without_template
        ids = plain(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        return placed.added + placed.copies * len(ids)

    def _warn_unknown(self, inputs: Sequence[Any], features: dict[str, Any]) -> None:
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        special = [token for token in getattr(self.tokenizer, "all_special_ids", ()) if token != unknown]
        names = ("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id")
        mask = features.get("attention_mask")
        if unknown is None or mask is None or unknown in [getattr(self.tokenizer, name, None) for name in names]:
            return
        words = features["input_ids"][mask.bool()]
        words = words[~torch.isin(words, torch.tensor(special, dtype=words.dtype))]
        share = float((words == unknown).float().mean()) if len(words) else 0.0
        if share > 0.5:
            self._unknown_warned = True
            logger.warning(
                f"{share:.0%} of the tokens of a batch ({str(inputs[0])[:40]!r}…) are unknown to the tokenizer of "
                f"{self.name}; reported once. Texts of unknown tokens have equal vectors: check letter case, language "
                "and alphabet."
            )

    def _warn_empty(self, features: dict[str, Any]) -> None:
        if bool((features["attention_mask"].sum(dim=1) <= self.counting.placed.added).any()):
            self._empty_warned = True
            logger.warning("An empty text has no copies: its vector is that of the end of its prompt; reported once.")

    def _check_finite(self, inputs: Sequence[Any], embeddings: Any, single: bool) -> None:
        rows = [embeddings] if single else embeddings
        if isinstance(rows, np.ndarray | Tensor) and torch.as_tensor(rows).isfinite().all():
            return
        for text, row in zip(inputs, rows, strict=True):
            if isinstance(row, np.ndarray | Tensor) and not torch.as_tensor(row).isfinite().all():
                raise NotFiniteError(
                    f"Layer {self.layer} of {self.name} gives NaN or infinity for {str(text)[:80]!r} "
                    f"in {self.dtype}. Load it with dtype='float32', or check the weights."
                )


def _without_empty(features: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
    """Return the features with zeros as the vectors of inputs without tokens."""
    vectors = features.get("sentence_embedding")
    # Not `len`, which a tracer makes a constant.
    if mask is None or vectors is None or mask.ndim != 2 or mask.shape[0] != vectors.shape[0]:
        return features
    return {**features, "sentence_embedding": vectors.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)}


# --- batches that are prepared ahead ---------------------------------------------------------------------------------


class _BatchesAhead:
    """The batches of one call of ``encode``."""

    def __init__(self, encoder: SentenceTransformer, inputs: Sequence[Any], beside: bool) -> None:
        self.encoder = encoder
        self.inputs = inputs
        self.beside = beside
        self.prepare: Prepare | None = None
        self.batches: Batches | None = None
        self.arguments: Any = None

    def take(self, batch: list[Any], arguments: Any, prompt: str | None, prepare: Prepare) -> dict[str, Any]:
        """Return the features of a batch, prepared ahead unless the batch or the arguments are unexpected."""
        if self.prepare is None or self.batches is None:  # the first batch, which has the batch size
            self.prepare = plans.TextInputs(self.encoder.tokenizer, prepare, prompt or "")
            self.batches = self._start(self.prepare, len(batch))
            self.arguments = arguments
        if self.arguments != arguments:
            return prepare(batch)
        expected, result = next(self.batches, ([object()], dict))
        if len(expected) == len(batch) and all(map(operator.is_, expected, batch)):
            return result()
        self.batches.close()
        return self.prepare(batch)

    def _start(self, prepare: Prepare, size: int) -> Batches:
        """Prepare batches in another thread, or none if their order is unknown."""
        is_worthwhile = self.beside and len(self.inputs) > 2 * size
        order = (encoding_order(self.encoder, self.inputs) if is_worthwhile else None) or []
        starts = range(0, len(order), size)
        return ahead(prepare, [[self.inputs[n] for n in order[start : start + size]] for start in starts])


@contextmanager
def preparing_ahead(encoder: SentenceTransformer, inputs: Sequence[Any], *, beside: bool) -> Iterator[None]:
    """Prepare the batches of ``encode`` inside this block quickly and ahead of time.

    ``SentenceTransformer.encode`` prepares each batch only after the previous one has run. Its order is known, so
    another thread can prepare the next batches.

    Args:
        encoder: the encoder.
        inputs: the inputs of ``encode``.
        beside: whether another thread prepares batches ahead of time.
    """
    running = _BatchesAhead(encoder, inputs, beside)
    token = _running.set(running)
    try:
        yield
    finally:
        _running.reset(token)
        if running.batches is not None:
            running.batches.close()
