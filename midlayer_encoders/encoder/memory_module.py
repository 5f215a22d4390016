"""A model in memory, of transformers or any module that is told its blocks, as the first module of an encoder."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from sentence_transformers.sentence_transformer.modules import InputModule
from torch import Tensor, nn

from midlayer_encoders._types import Layer, Medium, Norm
from midlayer_encoders.encoder.inputs import moved, probe_input, sampling_rate
from midlayer_encoders.encoder.spec import processor_name
from midlayer_encoders.errors import CutError, OptionError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import deepest_layer, find_anatomy
from midlayer_encoders.models.cut import Cut, cut_model
from midlayer_encoders.reading.capture import capture, side_by_side

__all__ = ["MemoryModule", "memory_module"]

_CALLS: dict[str, dict[str, Any]] = {
    "text": {"padding": True, "truncation": True},
    "image": {},
    "audio": {"padding": True, "return_attention_mask": True},
}


class MemoryModule(InputModule):
    """Prepares inputs with the processor it was given, and reads the layer's states by a hook on its block.

    Args:
        model: cut after the layer, or after the first block for layer 0.
        processor: one of transformers', or any function from a list of inputs to a tensor (handed to the model as its
            first argument) or to a mapping of them (handed to it by name).
        cut: how the layer is had.
        medium: what the inputs are.
    """

    config_keys: list[str] = ["blocks", "final", "layer", "norm", "medium", "prepared_by"]  # noqa: RUF012  (the base's way)

    def __init__(self, model: nn.Module, processor: Callable[..., Any], cut: Cut, medium: Medium) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.processor, self.medium = model, processor, medium
        self.blocks, self.layer, self.norm = cut.anatomy.blocks, cut.layer, cut.norm
        self.final, self.prepared_by = list(cut.anatomy.final), processor_name(processor)
        self.anatomy = find_anatomy(model, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
        self.tokenizer = processor if medium == "text" and hasattr(processor, "pad_token") else None
        self._taken = list(inspect.signature(model.forward).parameters)
        self.layers: tuple[int, ...] = (cut.layer,)  # more where several are combined

    @property
    def modalities(self) -> list[Any]:
        """The one medium that it takes."""
        return [self.medium]

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Return what the processor makes of a batch."""
        given = [(prompt or "") + text for text in inputs] if self.medium == "text" else list(inputs)
        made = self._prepared(given)
        if not any(isinstance(one, Tensor) for one in (made.values() if isinstance(made, Mapping) else [made])):
            raise OptionError(
                f"`processor` must return a tensor, or a mapping of tensors by the names that "
                f"{type(self.model).__name__} takes, but returned {short_repr(made)}."
            )
        values = dict(made) if isinstance(made, Mapping) else {self._taken[0]: made}
        return {**values, "modality": self.medium}

    def _prepared(self, given: list[Any]) -> Any:
        if not hasattr(self.processor, "save_pretrained"):  # a function of the caller's
            return self.processor(given)
        options = {"return_tensors": "pt", **_CALLS[self.medium]}
        if hasattr(self.processor, "padding_side"):
            options["padding_side"] = "right"  # where positions are those of the text alone
        if self.medium == "audio":
            options["sampling_rate"] = given[0]["sampling_rate"]
            given = [waveform["array"] for waveform in given]
        return self.processor(given, **options)

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the features with the layer's states as ``token_embeddings``."""
        found: dict[int, Tensor] = {}
        taken = {key: value for key, value in features.items() if key in self._taken}
        inputs = internals.without_cache(self.model, taken)
        capture(
            self.model, inputs, lambda layer, _, states: found.update({layer: states}), anatomy=self.anatomy,
            layers=self.layers, norm=self.norm,
        )  # fmt: skip
        return {**features, "token_embeddings": side_by_side([found[layer] for layer in self.layers])}

    @torch.no_grad()
    def get_embedding_dimension(self) -> int:
        """Return the width of the states, as one small input shows it."""
        features = self.preprocess([probe_input([self.medium], sampling_rate(self.processor), self.tokenizer)])
        on_device = moved(features, next(self.model.parameters()).device)
        return int(self.forward(on_device)["token_embeddings"].shape[-1])

    def save(self, output_path: str, *_: Any, **__: Any) -> NoReturn:
        """Refuse: a folder that loads anywhere holds modules of sentence-transformers only."""
        raise CutError(
            f"{type(self.model).__name__} was given as a module in memory, and a plain folder can hold only what "
            f"sentence-transformers loads by itself, so it is not saved to {output_path}. Save the model with its own "
            "`save_pretrained` and pass that folder to `LayerEncoder`, if transformers knows it."
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
    """Return the module of a copy of ``model`` that ends after ``layer``, the deepest of several, and how it is had."""
    if processor is None:
        raise OptionError(
            "`processor` must be given with a model in memory: one of transformers', or a function from a list of "
            f"inputs to what {type(model).__name__} takes, but got None."
        )
    anatomy = find_anatomy(model, blocks=blocks, final=final)
    resolved = deepest_layer(layer, anatomy.num_layers, name=type(model).__name__)
    # A block must be there to be watched; of layer 0 only what enters it is read.
    cut = Cut(anatomy, resolved, norm, max(resolved, 1), "last_hidden_state")
    copied = copy.deepcopy(model).eval()
    return MemoryModule(cut_model(copied, cut), processor, cut, medium), cut
