"""The protocol of models whose layers can be read; ``LayerEncoder`` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec, Norm, Pooling
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.recipes.counting import Counting


class LayerSource(Protocol):
    """A model and the preprocessing of its texts, images or audio."""

    name: str
    norm: Norm
    pooling: Pooling
    layer: int
    num_layers: int
    max_pixels: int
    truncate_dim: int | None
    tokenizer: Any

    @property
    def transformer(self) -> nn.Module:
        """The model, whole or cut after the last layer to read."""

    @property
    def anatomy(self) -> Anatomy:
        """The structure of the model."""

    @property
    def spec(self) -> EncoderSpec:
        """All settings that affect the vectors."""

    @property
    def media(self) -> list[str]:
        """Supported inputs: ``"text"``, ``"image"``, ``"audio"``."""

    @property
    def sampling_rate(self) -> int | None:
        """Audio samples per second."""

    @property
    def max_seq_length(self) -> int | None:
        """Maximum number of tokens; longer texts are truncated."""

    @property
    def default_prompt(self) -> str:
        """The prompt used by default."""

    @property
    def counting(self) -> Counting:
        """Which tokens to pool."""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules after the pooling, which are specific to one layer."""

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""

    def host_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs of a batch on the CPU."""

    def model_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the model's inputs of a batch on its device."""

    def eval(self) -> Any:
        """Disable dropout."""
