"""From inputs to embeddings: what an encoder checks before a pass, makes of its inputs, and checks after it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from tqdm import tqdm

from midlayer_encoders._types import Layer, ReadSite
from midlayer_encoders.encoder.batches_ahead import prepared, preparing
from midlayer_encoders.encoder.identity import IdentifiedEncoder
from midlayer_encoders.encoder.inputs import (
    both_media,
    is_conversation,
    is_pair,
    named_medium,
    read_inputs,
    with_padded_column,
)
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.options import check_device, device_name
from midlayer_encoders.encoder.transformer_module import checked_length
from midlayer_encoders.errors import NotFiniteError, OptionError, short_repr
from midlayer_encoders.media import InputError, medium_of
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.batches import TokenBudget, batches_of, check_budget, tokens_that_fit
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.reading.reader import layer_reader
from midlayer_encoders.validation import check_choice, check_count, check_text

__all__ = ["InputsEncoder"]

logger = logging.getLogger(__name__)


class InputsEncoder(IdentifiedEncoder):
    """What a ``LayerEncoder`` does with its inputs: features, the pass, and embeddings at one layer or at many."""

    @property
    def max_seq_length(self) -> int | None:
        """Number of tokens after which a text is truncated; ``None`` where a model takes no text."""
        return super().max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        if isinstance(self[0], MemoryModule) or self.tokenizer is None:  # it would change the spec, and no vector
            raise OptionError(
                f"`max_seq_length` must be left alone for {self.name}, whose inputs no tokenizer of ours truncates, "
                f"but got {short_repr(value)}."
            )
        cast(Any, self[0]).max_seq_length = checked_length("max_seq_length", value, self.transformer, self.name)

    def encode(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return embeddings as ``SentenceTransformer.encode`` does, or raise where one is not finite.

        A joint model takes ``{"text": …, "image": …}`` too: the sum of both vectors, as mteb's own CLIP.

        Raises:
            InputError: for an image or waveform that cannot be read, or a medium that the model does not take.
            NotFiniteError: naming the layer and the first text whose states hold NaN or infinity.
        """
        single = self.is_singular_input(inputs)
        if not single and not isinstance(inputs, list):  # as the base class does, for one that can be read only once
            inputs = inputs.tolist() if isinstance(inputs, np.ndarray) else list(inputs)
        if self.tower_layers and any(both_media(item) for item in ([inputs] if single else inputs[:1])):
            return self._encode_both(inputs, single, *args, **kwargs)
        args, kwargs = _checked_call(self, inputs, args, kwargs)
        items = [inputs] if single else inputs
        try:
            media, name = self.media, self.name
            for item in items if not self._is_tokenizers(items) else ():
                named_medium(item, media, model=name)
            with preparing(self, items, beside=self.device.type == "cuda"):
                embeddings = super().encode(inputs, *args, **kwargs)
        except InputError as reason:  # batches are in another order: find where the caller has it
            place = next((n for n, item in enumerate(inputs) if item is reason.item), None) if not single else None
            raise InputError(f"Input {place}: {reason}" if place is not None else str(reason)) from reason
        self._check_finite(items, embeddings, single)
        return embeddings

    def encode_layers(
        self,
        inputs: Any,
        layers: Sequence[Layer] | str = "all",
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        site: ReadSite = "block",
        token_budget: TokenBudget = "auto",
        show_progress_bar: bool = False,
        convert_to_tensor: bool = False,
    ) -> Any:
        """Return the embeddings at many layers from one pass over the inputs, shape ``(L + 1, N, D)`` for all layers.

        Row ``k`` is what ``LayerEncoder(model, k).encode(inputs)`` gives, to rounding: norm, pooling, recipe and
        ``truncate_dim`` are this encoder's. For more than memory holds see :func:`~midlayer_encoders.embed`.

        Args:
            inputs: a list of texts, images or waveforms; of a single one the result is ``(L + 1, D)``.
            layers: ``"all"`` up to the encoder's own, or some; they are returned in ascending order.
            prompt_name: which of the encoder's prompts is put before each text; the default one by default.
            prompt: the prompt itself.
            site: ``"block"``, or ``"attention"`` or ``"mlp"``: what these add in each block, from layer 1 up.
            token_budget: tokens in a batch; ``"auto"`` for as many as the device runs best with.
            show_progress_bar: count the inputs on the error output.
            convert_to_tensor: return a tensor on the encoder's device instead of an array of NumPy.

        Raises:
            OptionError: for an encoder with modules after its pooling, or a joint model without ``tower``.
            NotFiniteError: naming the layer and the input whose states hold NaN or infinity.
        """
        budget = check_budget(token_budget)
        single = self.is_singular_input(inputs)
        items = [inputs] if single else list(inputs)
        put = self.prompt_text(prompt_name, prompt, items)
        reader = layer_reader(self, layers=layers, prompt=put, site=site)
        tokens = tokens_that_fit(self) if budget == "auto" else budget
        batches = batches_of(self, items, token_budget=tokens, prompt=put)
        with tqdm(total=len(items), desc="Inputs", disable=not show_progress_bar) as bar:
            found = reader.vectors(items, batches, done=bar.update)
        if not items:
            found = found.new_empty(len(reader.layers), 0, self.get_embedding_dimension() or 0)
        found = found[:, 0] if single else found
        return found.to(self.device) if convert_to_tensor else found.numpy()

    def prompt_text(self, prompt_name: str | None, prompt: str | None, inputs: Sequence[Any]) -> str:
        """Return what is put before each of the inputs: a prompt, the one of a name, or the default one for texts."""
        texts = bool(inputs) and medium_of(inputs[0], self.media) == "text"
        if prompt is not None:
            prompt = check_text("prompt", prompt)
        elif prompt_name is not None:
            check_choice("prompt_name", prompt_name, self.prompts)
            prompt = self.prompts[prompt_name] or ""
        if prompt and inputs and not texts:
            raise OptionError(f"`prompt` must be left out for images and audio, but got {short_repr(prompt)}.")
        return (self.default_prompt if texts else "") if prompt is None else prompt

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **kwargs: Any) -> dict[str, Any]:
        """Return the features of a batch; images and audio are read, and truncation is warned once."""
        return prepared(self, inputs, prompt, kwargs, lambda batch: self._preprocess(batch, prompt, **kwargs))

    def _preprocess(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        if not self._is_tokenizers(inputs):
            read = read_inputs(
                inputs, self.media, model=self.name, rate=self.sampling_rate, max_pixels=self.max_pixels
            )  # fmt: skip
            if not all(isinstance(item, str) for item in read):
                return self._preprocess_media(read, inputs, prompt=prompt, **kwargs)
            inputs = read
        with turn(self.preparer):
            return self._preprocess_texts(inputs, prompt=prompt, **kwargs)

    def _preprocess_texts(self, inputs: Sequence[Any], prompt: str | None, **kwargs: Any) -> dict[str, Any]:
        empty = bool(inputs) and not prompt and all(isinstance(text, str) and not text.strip() for text in inputs)
        if empty and not self.tokenizer(list(inputs))["input_ids"][0]:
            features: dict[str, Any] = super().preprocess(["."] * len(inputs), prompt=prompt, **kwargs)
            features["attention_mask"] = torch.zeros_like(features["attention_mask"])
            return features
        if not isinstance(self[0], MemoryModule):
            self.tokenizer.padding_side = "right"  # where positions are those of the text alone, whoever changed it
        features = super().preprocess(inputs, prompt=prompt, **kwargs)
        self._check_ids(features.get("input_ids"))
        if not self._truncation_warned:
            self._warn_truncation(inputs, features, prompt)
        return with_padded_column(features) if wants_padding(self.transformer) else features

    def _check_ids(self, ids: Tensor | None) -> None:
        """Raise where a token has no embedding: one that was added to the tokenizer alone."""
        if ids is None or self.tokenizer is None or not ids.numel():
            return
        path = None if self._anatomy is None else self._anatomy.embeddings
        size = getattr(self.transformer.get_submodule(path), "num_embeddings", None) if path else None
        if size is not None and len(self.tokenizer) > size and (last := int(ids.max())) >= size:
            raise OptionError(
                f"The tokenizer of {self.name} makes the token {self.tokenizer.convert_ids_to_tokens(last)!r}, number "
                f"{last}, but the model has embeddings for {size} tokens only. Tokens were added to the tokenizer "
                "alone: call `model.resize_token_embeddings(len(tokenizer))` and save both again."
            )

    def _is_tokenizers(self, inputs: Sequence[Any]) -> bool:
        """Return whether these are for the tokenizer as they are: conversations, or pairs of texts."""
        chat = "message" in self.modalities and all(map(is_conversation, inputs))
        return chat or ("text" in self.media and all(map(is_pair, inputs)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the modules, one thread at a time: a pass may change its model, as rotary tables that follow the length.

        Here and not in ``forward``, which ``compile`` traces.
        """
        if torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        with turn(self.transformer):
            return super().__call__(*args, **kwargs)

    def forward(self, input: dict[str, Any], **kwargs: Any) -> dict[str, Any]:  # noqa: A002  (the base class's name)
        """Run the modules; a text without tokens embeds as zero under every pooling."""
        apart = not self.training and suffers_from_padding(self.transformer)
        if not self.tower_layers and (apart or input.get("modality") in ("image", "audio")):
            return self._forward_media(input)
        if not self.counting.all:
            return self._forward_counted(input)
        features: dict[str, Any] = super().forward(input, **kwargs)
        mask, embedding = features.get("attention_mask"), features.get("sentence_embedding")
        if (
            not self.training
            and mask is not None
            and embedding is not None
            and mask.ndim == 2
            and mask.shape[0] == embedding.shape[0]  # not `len`, which a tracer takes for a constant
        ):
            features["sentence_embedding"] = embedding.masked_fill(~mask.bool().any(dim=1, keepdim=True), 0.0)
        return features

    def _forward_counted(self, features: dict[str, Any]) -> dict[str, Any]:
        """Run the modules; the pooling sees the tokens that count alone."""
        modules: list[Any] = list(self)
        made = modules[0](features)
        mask = made["attention_mask"]
        made["attention_mask"] = counted = self.counting(mask).to(mask.dtype)
        for module in modules[1:]:
            made = module(made)
        made["attention_mask"] = mask
        found = made["sentence_embedding"]
        made["sentence_embedding"] = found.masked_fill(~counted.bool().any(dim=1, keepdim=True), 0.0)
        return made  # type: ignore[no-any-return]

    def _warn_truncation(self, inputs: Sequence[Any], features: dict[str, Any], prompt: str | None) -> None:
        limit, mask = self.max_seq_length, features.get("attention_mask")
        if limit is None or mask is None or mask.ndim != 2 or int(mask.sum(dim=1).max()) < limit:
            return
        row = int(mask.sum(dim=1).argmax())
        if isinstance(inputs[row], str) and self.tokenizer is not None:
            length = len(self.tokenizer((prompt or "") + inputs[row], truncation=False, verbose=False)["input_ids"])
            if length > limit:
                self._truncation_warned = True
                logger.warning(
                    "A text of %d tokens is truncated to %d (%r…); others may be too, this is warned once. "
                    "Pass `max_length` to choose the limit, or split long texts.",
                    length, limit, inputs[row][:40],
                )  # fmt: skip

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


_ENCODE = inspect.signature(SentenceTransformer.encode)


def _checked_call(
    encoder: InputsEncoder, inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what ``encode`` was given after its inputs, by position or by name, once it is checked."""
    call = _ENCODE.bind(encoder, inputs, *args, **kwargs)
    given = call.arguments
    if "batch_size" in given:
        given["batch_size"] = check_count("batch_size", given["batch_size"], "inputs")
    if given.get("truncate_dim") is not None:
        given["truncate_dim"] = check_count("truncate_dim", given["truncate_dim"], "dimensions")
    devices = given.get("device")
    for device in devices if isinstance(devices, list | tuple) else [devices]:
        check_device(None if device is None else device_name("device", device))
    return call.args[2:], call.kwargs
