"""What an encoder is: the spec that identifies its vectors, where its model keeps its parts, and its card."""

from __future__ import annotations

import json
from typing import Any, cast

from midlayer_encoders._types import EncoderSpec, Norm
from midlayer_encoders.encoder.memory_module import MemoryModule
from midlayer_encoders.encoder.multimodal import MultimodalEncoder
from midlayer_encoders.encoder.prompting import asked
from midlayer_encoders.encoder.spec import CardData, base_name, model_card, weights_digest
from midlayer_encoders.errors import OptionError
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy

__all__ = ["IdentifiedEncoder"]


class IdentifiedEncoder(MultimodalEncoder):
    """What a ``LayerEncoder`` says of itself.

    Attributes:
        layer: after which its model ends.
        num_layers: blocks of the whole model.
        norm: of the states.
    """

    layer: int
    num_layers: int
    norm: Norm
    _anatomy: Anatomy | None
    _gguf_file: str | None

    @property
    def spec(self) -> EncoderSpec:
        """What changes this encoder's vectors and scores, as it is now: training it in place makes another spec."""
        modules = [[type(module).__name__, module.get_config_dict()] for module in self]  # type: ignore[operator]
        given = self.options
        return EncoderSpec(
            model=self.name,
            revision=given.revision,
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
            bidirectional=given.bidirectional,
            adapters=tuple(base_name(adapter) for adapter in given.adapters),
            chat_template=given.chat_template,
            gguf_file=self._gguf_file,
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights_digest=weights_digest(self),
            tower=given.tower,
            tower_layers=tuple(self.tower_layers.items()),
            similarity=self.similarity_fn_name,
            prompting=asked(given),
            mixture=self.mixture,
        )

    @property
    def anatomy(self) -> Anatomy:
        """Where the model, as it is cut, keeps its parts. A joint model has two; see ``tower``."""
        if self.tower_layers:
            raise OptionError(
                f"`encoder` must have one stack of layers, but {self.name} has a tower of text and one of images. "
                "Load one: LayerEncoder(model, -1, tower='image')."
            )
        first: Any = self[0]
        return first.anatomy if isinstance(first, MemoryModule) else self._anatomy or find_anatomy(first.model)

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository."""
        parameters = sum(parameter.numel() for parameter in self.parameters())
        trained = "generated_from_trainer" in self.model_card_data.tags
        return model_card(
            self.spec, parameters=parameters, trained=trained, media=self.media, repository=repository, branch=branch,
            own_code=self.options.trust_remote_code, data=cast(CardData, self.model_card_data),
        )  # fmt: skip
