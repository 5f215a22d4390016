"""The first module of an encoder of a model in memory: a transformers model, or any module with a list of blocks."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from sentence_transformers.sentence_transformer.modules import InputModule
from torch import Tensor, nn

from midlayer_encoders._types import Layer, Medium, Norm
from midlayer_encoders.encoder.inputs import probe_inputs, sampling_rate, to_device
from midlayer_encoders.encoder.spec import processor_name
from midlayer_encoders.errors import CutError, OptionError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import deepest_layer, find_anatomy
from midlayer_encoders.models.cut import Cut, cut_model
from midlayer_encoders.reading.capture import capture, side_by_side

_CALLS: dict[str, dict[str, Any]] = {
    "text": {"padding": True, "truncation": True},
    "image": {},
    "audio": {"padding": True, "return_attention_mask": True},
}


class MemoryModule(InputModule):
    """Prepares inputs with a processor, and reads the layer's states with a hook on its block.

    Args:
        model: cut after the layer, or after the first block for layer 0.
        processor: a transformers processor, or a function from a list of inputs to a tensor (the model's first
            argument) or to a mapping of tensors (keyword arguments).
        cut: the cut of the model.
        medium: the medium of the inputs.
    """

    config_keys: list[str] = ["blocks", "final", "layer", "norm", "medium", "prepared_by"]  # noqa: RUF012  (as in the base class)

    def __init__(self, model: nn.Module, processor: Callable[..., Any], cut: Cut, medium: Medium) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model = model
        self.processor = processor
        self.medium = medium
        self.blocks = cut.anatomy.blocks
        self.final = list(cut.anatomy.final)
        self.layer = cut.layer
        self.norm = cut.norm
        self.prepared_by = processor_name(processor)
        self.anatomy = find_anatomy(model, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
        self.tokenizer = processor if medium == "text" and hasattr(processor, "pad_token") else None
        self._arguments = list(inspect.signature(model.forward).parameters)
        self.layers: tuple[int, ...] = (cut.layer,)

    @property
    def modalities(self) -> list[Any]:
        """The medium of the inputs."""
        return [self.medium]

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the processed batch."""
        batch = [(prompt or "") + text for text in inputs] if self.medium == "text" else list(inputs)
        processed = self._process(batch)
        features = dict(processed) if isinstance(processed, Mapping) else {self._arguments[0]: processed}
        if not any(isinstance(value, Tensor) for value in features.values()):
            raise OptionError(
                f"`processor` must return a tensor, or a mapping of tensors by the names that "
                f"{type(self.model).__name__} takes, but returned {short_repr(processed)}."
            )
        return {**features, "modality": self.medium}

    def _process(self, batch: list[Any]) -> Any:
        if not hasattr(self.processor, "save_pretrained"):  # a plain function
            return self.processor(batch)
        options = {"return_tensors": "pt", **_CALLS[self.medium]}
        if hasattr(self.processor, "padding_side"):
            options["padding_side"] = "right"  # which leaves positions unchanged
        if self.medium == "audio":
            options["sampling_rate"] = batch[0]["sampling_rate"]
            batch = [waveform["array"] for waveform in batch]
        return self.processor(batch, **options)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the features with the layer's states as ``token_embeddings``."""
        states_by_layer: dict[int, Tensor] = {}

        def receive(layer: int, _: str, states: Tensor) -> None:
            states_by_layer[layer] = states

        arguments = {key: value for key, value in features.items() if key in self._arguments}
        inputs = internals.without_cache(self.model, arguments)
        capture(self.model, inputs, receive, anatomy=self.anatomy, layers=self.layers, norm=self.norm)
        return {**features, "token_embeddings": side_by_side([states_by_layer[layer] for layer in self.layers])}

    @torch.no_grad()
    def get_embedding_dimension(self) -> int:
        """Return the width of the states of a probe."""
        probe, _ = probe_inputs([self.medium], sampling_rate(self.processor), self.tokenizer)
        features = to_device(self.preprocess([probe]), next(self.model.parameters()).device)
        return int(self.forward(features)["token_embeddings"].shape[-1])

    def save(self, output_path: str, *_: Any, **__: Any) -> NoReturn:
        """Raise: plain folders hold only modules of sentence-transformers."""
        raise CutError(
            f"{type(self.model).__name__} was given as a module in memory, which sentence-transformers cannot load, so "
            f"it is not saved to {output_path}. If it is a transformers model, save it with its `save_pretrained` and "
            "pass that folder to `LayerEncoder`."
        )


def memory_module(
    model: nn.Module,
    layer: Layer | Sequence[Layer],
    processor: Callable[..., Any] | None,
    *,
    norm: Norm,
    medium: Medium,
    blocks: str | None,
    final: tuple[str, ...] | None,
) -> tuple[MemoryModule, Cut]:
    """Return the module of a copy of ``model``, cut after the deepest of the layers, and the cut."""
    if processor is None:
        raise OptionError(
            "`processor` must be given with a model in memory: a transformers processor, or a function from a list of "
            f"inputs to the arguments of {type(model).__name__}, but got None."
        )
    anatomy = find_anatomy(model, blocks=blocks, final=final)
    resolved = deepest_layer(layer, anatomy.num_layers, name=type(model).__name__)
    # The hook needs a block; layer 0 is its input.
    cut = Cut(anatomy, resolved, norm, max(resolved, 1), "last_hidden_state")
    cut_copy = cut_model(copy.deepcopy(model).eval(), cut)
    return MemoryModule(cut_copy, processor, cut, medium), cut
