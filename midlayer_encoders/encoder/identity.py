"""The properties that describe an encoder: its spec, its anatomy, its media and its model card."""

from __future__ import annotations

import json
from typing import Any, cast

from torch import nn

from midlayer_encoders._types import EncoderSpec, Norm, Pooling
from midlayer_encoders.encoder.inputs import sampling_rate, supported_media
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.prompting import prompting_settings
from midlayer_encoders.encoder.sentence_transformers_internals import PlainOnDisk
from midlayer_encoders.encoder.spec import CardData, base_name, model_card, weights_digest
from midlayer_encoders.errors import OptionError, warn_deprecated
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy
from midlayer_encoders.recipes.counting import Counting


class DescribedEncoder(PlainOnDisk):
    """The description of a ``LayerEncoder``.

    Attributes:
        name: name of the model in results and errors.
        layer: layer after which the model ends.
        num_layers: blocks of the complete model.
        tower_layers: layer of each tower of a joint model.
        mixture: layers that are combined, and their shares.
        norm: norm of the states.
        pooling: pooling of the states.
        max_pixels: the largest image size.
    """

    name: str
    layer: int
    num_layers: int
    tower_layers: dict[str, int]
    mixture: tuple[tuple[int, float], ...]
    norm: Norm
    pooling: Pooling
    max_pixels: int
    counting: Counting
    options: EncoderOptions
    _anatomy: Anatomy | None
    _gguf_file: str | None
    _truncation_warned: bool

    @property
    def layers(self) -> dict[str, int]:
        """The old name of ``tower_layers``."""
        warn_deprecated("`LayerEncoder.layers` is `tower_layers` now; the old name is removed in 0.4.")
        return self.tower_layers

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors and scores; training the encoder changes the spec."""
        modules = [[type(module).__name__, module.get_config_dict()] for module in self]  # type: ignore[operator]
        options = self.options
        return EncoderSpec(
            model=self.name,
            revision=options.revision,
            layer=self.layer,
            num_layers=self.num_layers,
            norm=self.norm,
            pooling=self.pooling,
            max_length=self.max_seq_length,
            dtype=str(self.dtype).removeprefix("torch."),
            prompts=(
                *sorted((name, text or "") for name, text in self.prompts.items()),
                ("", self.default_prompt_name or ""),
            ),
            bidirectional=options.bidirectional,
            adapters=tuple(base_name(adapter) for adapter in options.adapters),
            chat_template=options.chat_template,
            gguf_file=self._gguf_file,
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights_digest=weights_digest(self),
            tower=options.tower,
            tower_layers=tuple(self.tower_layers.items()),
            similarity=self.similarity_fn_name,
            prompting=prompting_settings(options),
            mixture=self.mixture,
        )

    @property
    def anatomy(self) -> Anatomy:
        """The paths of the parts of the cut model. A joint model has two; see ``tower``."""
        if self.tower_layers:
            raise OptionError(
                f"`encoder` must have one stack of layers, but {self.name} has a tower of text and one of images. "
                "Load one: LayerEncoder(model, -1, tower='image')."
            )
        first: Any = self[0]
        return first.anatomy if isinstance(first, MemoryModule) else self._anatomy or find_anatomy(first.model)

    @property
    def transformer(self) -> nn.Module:
        """The model inside the first module."""
        first: Any = self[0]
        return first.model  # type: ignore[no-any-return]

    @property
    def media(self) -> list[str]:
        """The media of its inputs: ``"text"``, ``"image"``, ``"audio"``."""
        return supported_media(self.modalities)

    @property
    def preparer(self) -> Any:
        """The tokenizer, or the processor of a model without one."""
        return self.processor if self.tokenizer is None else self.tokenizer

    @property
    def sampling_rate(self) -> int | None:
        """Sampling rate of its audio model; waveforms at another rate are resampled."""
        return sampling_rate(self.processor) if "audio" in self.media else None

    @property
    def default_prompt(self) -> str:
        """The text of the default prompt; empty if there is none."""
        return self.prompts.get(self.default_prompt_name or "", "") or ""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules after the pooling."""
        return [type(module).__name__ for module in list(self)[2:]]

    def for_mteb(self) -> Any:
        """Return this encoder for mteb, with its media.

        ``mteb.evaluate`` accepts a text encoder directly, but assumes that any local SentenceTransformer supports only
        text, and refuses to run tasks of images or audio on it.
        """
        from mteb.models import SentenceTransformerEncoderWrapper

        wrapped = SentenceTransformerEncoderWrapper(self, target_sampling_rate=self.sampling_rate)
        wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(update={"modalities": self.media})
        return wrapped

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository."""
        return model_card(
            self.spec,
            parameters=sum(parameter.numel() for parameter in self.parameters()),
            trained="generated_from_trainer" in self.model_card_data.tags,
            media=self.media,
            repository=repository,
            branch=branch,
            remote_code=self.options.trust_remote_code,
            data=cast(CardData, self.model_card_data),
        )
