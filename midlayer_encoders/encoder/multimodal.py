"""A SentenceTransformer that takes images and audio as people have them, and pools the real states of each."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn

from midlayer_encoders._types import Pooling
from midlayer_encoders.encoder.inputs import (
    check_lengths,
    media_taken,
    moved,
    pass_by_length,
    probe_inputs,
    sampling_rate,
    with_fixed_order,
    with_token_mask,
    without_needless_mask,
)
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.older_versions import ASKED_FOR, make_readable_by_older
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.sentence_transformers_internals import PlainOnDisk
from midlayer_encoders.encoder.several_layers import plain_on_disk
from midlayer_encoders.encoder.verification import close
from midlayer_encoders.errors import CutError, warn_deprecated
from midlayer_encoders.files import write_folder
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.cut import whole_around
from midlayer_encoders.models.load import has_automatic_class
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.reading.locks import turn
from midlayer_encoders.recipes.counting import Counting
from midlayer_encoders.validation import check_path

__all__ = ["MultimodalEncoder"]

logger = logging.getLogger(__name__)

# What sentence-transformers keeps among a batch's features for itself.
_BOOKKEEPING = {"modality", "task", "prompt_length", "token_embeddings", "sentence_embedding"}


def _of_whole(entry: dict[str, Any]) -> Any:
    """Return where a model with a decoder has what its encoder alone returns."""
    name = entry["method_output_name"]
    return f"encoder_{name}" if isinstance(name, str) else [f"encoder_{name[0]}", name[1]]


class MultimodalEncoder(PlainOnDisk):
    """What a ``LayerEncoder`` knows of images and audio: reading them, their masks, mteb, and what a folder can hold.

    Attributes:
        name: of the model, for errors.
        pooling: how states become one vector.
        max_pixels: of the largest image that is read.
    """

    name: str
    pooling: Pooling
    max_pixels: int
    counting: Counting
    tower_layers: dict[str, int]
    mixture: tuple[tuple[int, float], ...]
    options: EncoderOptions
    _truncation_warned: bool

    @property
    def layers(self) -> dict[str, int]:
        """The old name of ``tower_layers``."""
        warn_deprecated("`LayerEncoder.layers` is `tower_layers` now; the old name is removed in 0.4.")
        return self.tower_layers

    @property
    def media(self) -> list[str]:
        """What it takes, one at a time: ``"text"``, ``"image"``, ``"audio"``."""
        return media_taken(self.modalities)

    @property
    def transformer(self) -> nn.Module:
        """The model itself, inside the first module."""
        first: Any = self[0]
        return first.model  # type: ignore[no-any-return]

    @property
    def preparer(self) -> Any:
        """What prepares its inputs: the tokenizer, or the processor of a model without one."""
        return self.processor if self.tokenizer is None else self.tokenizer

    @property
    def default_prompt(self) -> str:
        """What is put before a text when no prompt is named; empty where there is none."""
        return self.prompts.get(self.default_prompt_name or "", "") or ""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules that follow the pooling."""
        return [type(module).__name__ for module in list(self)[2:]]

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second that its audio model was made for; waveforms at another rate are resampled."""
        return sampling_rate(self.processor) if "audio" in self.media else None

    def for_mteb(self) -> Any:
        """Return this encoder as mteb should see it: with the media that it takes.

        ``mteb.evaluate`` takes a text encoder as it is, but any local SentenceTransformer for one of text alone, and
        refuses to run tasks of images or audio on it.
        """
        from mteb.models import SentenceTransformerEncoderWrapper

        wrapped = SentenceTransformerEncoderWrapper(self, target_sampling_rate=self.sampling_rate)
        wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(update={"modalities": self.media})
        return wrapped

    # --- inputs ------------------------------------------------------------------------------------------------------

    def is_singular_input(self, inputs: Any) -> bool:  # type: ignore[override]
        """Return whether this is one input, not several; a waveform as ``(array, rate)`` is one."""
        if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(inputs[1], int | np.integer):
            return True
        return bool(super().is_singular_input(inputs))

    def _preprocess_media(self, read: Sequence[Any], inputs: Sequence[Any], **kwargs: Any) -> dict[str, Any]:
        """Return the features of inputs that were read, and as they were given, for errors."""
        model: Any = self[0].model
        if "audio" in self.media and hasattr(model, "config"):
            truncated = check_lengths(read, inputs, model, self.processor)
            if truncated and not self._truncation_warned:
                self._truncation_warned = True
                logger.warning(
                    "Audio is longer than the window of %s and is truncated; this is warned once.", self.name
                )
        if suffers_from_padding(model):  # the extractor's scaling needs the mask, the model does not
            kwargs["processing_kwargs"] = {"audio": {"return_attention_mask": True}}
        with turn(self.preparer):
            features = PlainOnDisk.preprocess(self, read, **kwargs)
        return without_needless_mask(model, with_fixed_order(model, features))

    def host_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the features of a batch that the model itself takes, where they were made."""
        features = self.preprocess(inputs, prompt=prompt)
        return {key: value for key, value in features.items() if isinstance(value, Tensor) and key not in _BOOKKEEPING}

    def model_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the features of a batch that the model itself takes, on its device."""
        return moved(self.host_inputs(inputs, prompt=prompt), self.device)

    def _forward_media(self, features: dict[str, Any]) -> dict[str, Any]:
        """Run the modules on images or audio: pooling knows which states are real."""
        first: Any = self[0]
        model = first.model

        def read(batch: dict[str, Any]) -> dict[str, Any]:
            return with_token_mask(model, first(dict(batch)))

        made = pass_by_length(read, features) if suffers_from_padding(model) else read(features)
        for module in list(self)[1:]:
            made = module(made)
        return made

    def _encode_both(self, inputs: Any, single: bool, *args: Any, **kwargs: Any) -> Any:
        """Return the sum of the vectors of each text and its image, scaled after it where that is asked."""
        scaled = kwargs.pop("normalize_embeddings", False)
        if single:
            return self._encode_both([inputs], False, *args, normalize_embeddings=scaled, **kwargs)[0]
        parts = [self.encode([item[medium] for item in inputs], *args, **kwargs) for medium in ("text", "image")]
        rows = [a + b for a, b in zip(*parts, strict=True)]
        if scaled:
            rows = [row / max(float((row * row).sum()) ** 0.5, 1e-12) for row in rows]
        if isinstance(parts[0], list):
            return rows
        return torch.stack(rows) if isinstance(parts[0], Tensor) else np.stack(rows)

    # --- the plain folder --------------------------------------------------------------------------------------------

    def save(self, path: str | None, *args: Any, **kwargs: Any) -> None:
        """Write a folder that any ``SentenceTransformer`` loads, or raise where it would give other vectors.

        It is written and checked beside ``path``: what was there stays until it is whole. Other files there stay.

        Raises:
            CutError: naming the reason.
            FolderError: a file is in its place.
            DiskFullError: no room.
        """
        check_path("path", path)
        if path is not None:  # as the base class has it
            self.save_files(path, *args, **kwargs)

    def save_files(self, path: str, *args: Any, **kwargs: Any) -> tuple[str, ...]:
        """Write a folder as :meth:`save` does, and return the files that were written, from the folder on."""
        self.check_export()
        home = Path(path)

        def write(aside: Path) -> None:
            with self._whole_on_disk(), plain_on_disk(self):
                super(MultimodalEncoder, self).save(str(aside), *args, **kwargs)
            if self.mixture and (aside / "README.md").exists():  # once more, of this encoder: it held other modules
                given = inspect.signature(SentenceTransformer.save).bind(self, str(aside), *args, **kwargs)
                self._create_model_card(str(aside), given.arguments.get("model_name"))
            make_readable_by_older(aside, self.max_seq_length)
            self.check_folder(aside, home)

        return write_folder(home, write, last=ASKED_FOR)

    @contextmanager
    def _whole_on_disk(self) -> Iterator[None]:
        """Have the first module write an encoder inside the model that it is of, as which alone it can be loaded."""
        first: Any = self[0]
        model, entries, save = first.model, first.modality_config, first.save
        if not internals.lacks_folder(model):
            yield
            return
        whole: Any = whole_around(model)
        if whole is None:
            raise CutError(
                f"{type(model).__name__} is the encoder of a model that also has a decoder, and a plain folder is "
                "loaded as the whole of it, which asks for a second text (`decoder_input_ids`). Use this encoder "
                "itself."
            )
        renamed = {key: {**entry, "method_output_name": _of_whole(entry)} for key, entry in entries.items()}
        whole.config.output_hidden_states = any(isinstance(one["method_output_name"], list) for one in renamed.values())

        def save_whole(*args: Any, **kwargs: Any) -> None:
            first.model, first.modality_config = whole, renamed
            try:
                save(*args, **kwargs)
            finally:
                first.model, first.modality_config = model, entries

        first.save = save_whole  # for this module alone: the card is of the encoder
        try:
            with turn(model):
                yield
        finally:
            del first.save

    def check_folder(self, aside: Path, home: Path) -> None:
        """Raise unless what is written for ``home``, loaded as anyone loads it, gives this encoder's vectors."""
        if self.transformer.training or self.tower_layers:
            return
        probes = probe_inputs(self.media, self.sampling_rate, self.tokenizer)
        inputs = [one for one in probes if one is not None]
        options: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
        plain: Any = SentenceTransformer(
            str(aside), device=str(self.device), model_kwargs={"dtype": self.dtype},
            trust_remote_code=self.options.trust_remote_code,
        )  # fmt: skip
        ours, theirs = self.encode(inputs, **options), plain.encode(inputs, **options)
        if not close(ours.float(), theirs.float(), self.dtype):
            raise CutError(
                f"The folder {home} would give other vectors than this encoder when sentence-transformers loads it: "
                f"transformers reads the model or the tokenizer of {type(self.transformer).__name__} otherwise from "
                "a folder. Use this encoder itself; nothing was written."
            )

    def check_export(self) -> None:
        """Raise where no plain folder gives this encoder's vectors, naming the reason."""
        model: Any = self[0].model
        if not self.counting.all:
            raise CutError(
                "A plain folder pools every token of a text, and `skip_first` and `template_tokens=False` leave some "
                "out, so its vectors would be others. Use this encoder itself, or pooling='last' with all tokens."
            )
        if isinstance(self[0], MemoryModule):
            self[0].save("a folder")
        if getattr(model, "main_input_name", "") == "input_features" and self.pooling != "cls":
            raise CutError(
                f"The states of {type(model).__name__} fill a fixed window, and the pooling of a plain folder cannot "
                "leave out those after the waveform's end, since it knows masks of the states' own length only: its "
                "vectors would be others. Use this encoder itself, or pooling='cls'."
            )
        if wants_padding(model):
            raise CutError(
                f"{type(model).__name__} runs without its causal mask only where a batch is padded, which a plain "
                "folder does not see to. Use this encoder itself, or leave out `bidirectional`."
            )
        if self.media == ["text"] and suffers_from_padding(model):
            raise CutError(
                f"Padding changes the states of a text in {type(model).__name__}, and a plain folder pads the texts of "
                "a batch: its vectors would depend on the batch. Use this encoder itself, which passes texts of one "
                "length together."
            )
        if suffers_from_padding(model) or internals.has_mask_of_states(model):
            logger.warning(
                "A plain folder pools the padding of shorter waveforms in a batch: encode with batch_size=1 there."
            )
        if not has_automatic_class(model.config):
            raise CutError(
                f"{type(model).__name__} has no automatic class in transformers, by which a plain folder is loaded. "
                "Use this encoder itself, or export a joint model without `tower`."
            )
