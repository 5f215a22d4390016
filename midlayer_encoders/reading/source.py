"""What a model must offer for its layers to be read: a ``LayerEncoder`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec, Norm, Pooling
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.recipes.counting import Counting


class LayerSource(Protocol):
    """A model, and what turns texts, images or audio into its inputs.

    The rooms that read layers know this protocol, not the encoder class, which lies on a floor above them.
    """

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
        """The model itself, whole or cut after the last layer of interest."""

    @property
    def anatomy(self) -> Anatomy:
        """Where the model keeps its parts."""

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes a vector."""

    @property
    def media(self) -> list[str]:
        """What it takes: ``"text"``, ``"image"``, ``"audio"``."""

    @property
    def sampling_rate(self) -> int | None:
        """Samples a second of its audio."""

    @property
    def max_seq_length(self) -> int | None:
        """Tokens after which a text is truncated."""

    @property
    def default_prompt(self) -> str:
        """What is put before a text when no prompt is named."""

    @property
    def counting(self) -> Counting:
        """Which tokens count in the pooling."""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules that follow the pooling; they are made for one layer."""

    @property
    def device(self) -> torch.device:
        """Where the model's inputs must be."""

    def host_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of a batch as the model takes them, not yet on its device."""

    def model_inputs(self, inputs: Sequence[Any], *, prompt: str | None = None) -> dict[str, Tensor]:
        """Return the inputs of a batch as the model takes them, on its device."""

    def eval(self) -> Any:
        """Switch dropout off."""
