"""A module in memory as the first module of an encoder: a copy of it is verified, and read with hooks."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch
from sentence_transformers.sentence_transformer.modules import InputModule
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from midlayer_encoders._types import Layer, Medium, Norm
from midlayer_encoders.encoder import verification
from midlayer_encoders.encoder.first_module import probed_width
from midlayer_encoders.encoder.probes import RUN_ERRORS, Features, probe_features, token_states
from midlayer_encoders.errors import CutError, OptionError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import find_anatomy, mark_padding, resolve_layer, suffers_from_padding
from midlayer_encoders.models.cut import Cut
from midlayer_encoders.reading.capture import accepted_arguments, capture_states, final_norm
from midlayer_encoders.validation import check_choice

# The arguments of a processor in memory.
_CALLS: dict[str, dict[str, Any]] = {
    "text": {"padding": True, "truncation": True, "return_attention_mask": True},
    "audio": {"padding": True, "return_attention_mask": True},
}


def read_module(
    module: Any,
    layer: Layer,
    norm: Norm,
    processor: Any,
    medium: Medium,
    blocks: str | None,
    final: Sequence[str] | None,
) -> tuple[Any, Cut]:
    """Return the first module of an encoder and its layer; the arguments are as in ``LayerEncoder.from_module``."""
    media = ("text",) if isinstance(processor, PreTrainedTokenizerBase) else ("text", "image", "audio")
    check_choice("medium", medium, media)
    module = getattr(module, "_orig_mod", module)  # the module inside `torch.compile`
    if not isinstance(module, nn.Module):
        raise OptionError(f"`module` must be a torch.nn.Module, but got {short_repr(module)}.")
    if not callable(processor):
        raise OptionError(
            f"`processor` must be a transformers processor or a function, but got {short_repr(processor)}."
        )
    anatomy = find_anatomy(module, blocks=blocks, final=None if final is None else tuple(final))
    number = resolve_layer(layer, anatomy.num_layers, name=type(module).__name__)
    cut = Cut(anatomy, number, norm, anatomy.num_layers, None)
    try:
        copied = copy.deepcopy(module).eval()
    except Exception as reason:  # whatever its attributes raise
        raise OptionError(
            f"`module` must be copyable with `copy.deepcopy`, but {type(module).__name__} is not: {reason}."
        ) from reason
    first = MemoryModule(copied, processor, cut, medium)
    _check_module(first, cut, find_final=final is None)
    return first, cut


class MemoryModule(InputModule):
    """Prepares inputs with a processor, and reads the layer's states with a hook on its block.

    Args:
        model: the model; blocks after the layer do not run.
        processor: a transformers processor, or a function from a list of inputs to a tensor (the model's first
            argument) or to a mapping of tensors (keyword arguments).
        cut: the layer to read.
        medium: the medium of the inputs.
    """

    config_keys: list[str] = ["blocks", "final", "layer", "norm", "medium"]  # noqa: RUF012  (as in the base class)
    get_embedding_dimension = probed_width

    def __init__(self, model: nn.Module, processor: Callable[..., Any], cut: Cut, medium: Medium) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if getattr(processor, "padding_side", "right") == "left":
            processor = copy.deepcopy(processor)
            if medium == "text":
                processor.padding_side = "right"  # type: ignore[attr-defined]  # which leaves positions unchanged
        self.processor = processor
        self.medium = medium
        self.blocks = cut.anatomy.blocks
        self.final = list(cut.anatomy.final)
        self.layer = cut.layer
        self.norm = cut.norm
        self.model = model
        self.anatomy = cut.anatomy
        self.tokenizer = processor if medium == "text" and hasattr(processor, "pad_token") else None
        self._arguments = list(inspect.signature(model.forward).parameters)

    @property
    def modalities(self) -> list[Any]:
        """The medium of the inputs."""
        return [self.medium]

    def preprocess(self, inputs: Sequence[Any], prompt: str | None = None, **_: Any) -> dict[str, Any]:
        """Return the processed batch."""
        batch = [(prompt or "") + text for text in inputs] if self.medium == "text" else list(inputs)
        options: dict[str, Any] = {}
        if hasattr(self.processor, "save_pretrained"):  # else a plain function
            options = {"return_tensors": "pt", **_CALLS.get(self.medium, {})}
            if self.medium == "audio":
                options["sampling_rate"] = batch[0]["sampling_rate"]
                batch = [waveform["array"] for waveform in batch]
        processed = self.processor(batch, **options)
        features = dict(processed) if isinstance(processed, Mapping) else {self._arguments[0]: processed}
        if not any(isinstance(value, Tensor) for value in features.values()):
            raise OptionError(
                "`processor` must return a tensor, or a mapping of tensors by the names of the module's arguments, but "
                f"returned {short_repr(processed)}."
            )
        return {**features, "modality": self.medium}

    def arguments(self, features: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features that are arguments of the model."""
        tensors = {key: value for key, value in features.items() if key in self._arguments or isinstance(value, Tensor)}
        return internals.without_cache(self.model, accepted_arguments(self.model, tensors))

    def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
        """Return the features with the layer's states as ``token_embeddings``."""
        inputs = self.arguments(features)
        states = capture_states(self.model, inputs, anatomy=self.anatomy, layers=[self.layer], norm=self.norm)
        if not states:
            raise CutError(
                f"{type(self.model).__name__} runs fewer than {self.layer} of its blocks ({self.blocks!r}) on this "
                "input. Wrap the module so that all blocks run on every input."
            )
        return {**features, "token_embeddings": states[0]}

    def save(self, output_path: str, *_: Any, **__: Any) -> NoReturn:
        """Raise: plain folders hold only modules of sentence-transformers."""
        raise CutError(
            f"{type(self.model).__name__} is a module in memory, which is not saved to {output_path}. If it is a "
            "transformers model, save it with its `save_pretrained`, and pass that folder to `LayerEncoder`."
        )


def _check_module(first: MemoryModule, cut: Cut, *, find_final: bool) -> None:
    """Raise unless hooks read the layer of a module in memory, alone and in a batch.

    Args:
        first: the first module of the encoder, around a copy of the module.
        cut: the plan of its hooks.
        find_final: replace the modules after the last block by those that a pass goes through.

    Raises:
        CutError: if the module has no well-defined layers.
        OptionError: if its processor pads without a mask.
    """
    name = type(first.model).__name__
    alone, padded = probe_features(first)
    batch = alone if padded is None else padded
    record = _record_module(first, cut, batch)
    if find_final and cut.norm == "final":
        first.anatomy = replace(first.anatomy, final=_final_modules(record, cut, name))
        first.final = list(first.anatomy.final)
    states, batch_states = token_states(first, alone), token_states(first, batch)
    if states.ndim != 3 or len(states) != 1 or states.shape[-1] != batch_states.shape[-1]:
        raise CutError(
            f"The blocks of {name} ({first.blocks!r}) return states of shape {tuple(states.shape)} for one input, but "
            "their axes must be batch, tokens and width. Wrap the module, or permute inside its blocks."
        )
    if padded is not None:
        verification.check_padding(first, states, padded)
        _check_mask(first, alone, padded, states.shape[1], batch_states.shape[1])
    recorded = record.outputs[cut.layer - 1] if cut.layer else record.inputs[0]
    with torch.no_grad():
        expected = final_norm(first.model, first.anatomy, cut.norm)(recorded)
    if not torch.equal(expected, batch_states):
        raise CutError(
            f"{name} gives other states for the same input in a second pass: it is random, or a pass changes it."
        )


@torch.no_grad()
def _record_module(first: MemoryModule, cut: Cut, batch: Features) -> verification.Record:
    """Return the states of a pass through all blocks, or raise if the blocks are no stack."""
    name = type(first.model).__name__
    inputs = first.arguments(batch)
    try:
        record = verification.record_pass(first, batch, cut.anatomy, run=lambda: first.model(**inputs))
    except RUN_ERRORS as reason:
        raise CutError(
            f"{name} does not run on {', '.join(inputs) or 'no argument'} of a short input ({type(reason).__name__}: "
            f"{reason}). `processor` must return the arguments of `forward` by name, or one tensor."
        ) from reason
    verification.check_calls(name, cut.anatomy, record, " Pass the path of a list whose blocks all run in order.")
    if cut.anatomy.num_layers > 1 and torch.equal(*record.inputs[:2]):
        raise CutError(
            f"The blocks of {name} ({first.blocks!r}) all receive the same first tensor, which is not their states. "
            "Pass the states first, or as `hidden_states`."
        )
    for layer in range(1, min(cut.layer + 1, cut.anatomy.num_layers)):
        if not torch.equal(record.outputs[layer - 1], record.inputs[layer]):
            cure = "Make the change inside a block, such as a residual sum."
            raise CutError(verification.ambiguous(name, layer, cure))
    return record


def _final_modules(record: verification.Record, cut: Cut, name: str) -> tuple[str, ...]:
    """Return the modules that turn the last block's output into the module's; a head after them is left out."""
    states = record.outputs[-1]
    if record.model_output is None or record.model_output.shape != states.shape:
        inputs = {path for path, part, _ in record.later if part.shape == states.shape and torch.equal(part, states)}
        return cut.anatomy.final if inputs.issuperset(cut.anatomy.final[:1]) else ()
    if (final := verification.observed_final(record)) is None:
        raise CutError(
            f"{name} changes its states after its last block in an unknown way. Pass norm='none', or the paths of the "
            "modules after its last block as `final`."
        )
    return final


def _check_mask(first: MemoryModule, alone: Features, padded: Features, length: int, padded_length: int) -> None:
    """Raise if a processor pads without a mask, or on the left."""
    mask = padded.get("attention_mask")
    if mask is None:
        rows = [value[0] for value in alone.values() if isinstance(value, Tensor) and value.ndim == 2]
        ids = [row for row in rows if not row.is_floating_point() and len(row) > 1]
        fills = any(bool(row[-1] == row[-2]) or bool(row[0] == row[1]) for row in ids)  # to a fixed length
        if fills or padded_length != length or suffers_from_padding(first.model):
            raise OptionError("`processor` must return an `attention_mask`, or must not pad: padding would be pooled.")
    elif first.medium == "text" and mask.ndim == 2 and bool((mask.diff(dim=1) > 0).any()):
        raise OptionError("`processor` must pad on the right, which leaves positions unchanged, but pads on the left.")
    elif mask.shape[1] != padded_length and not internals.is_pretrained(first.model):
        mark_padding(first.model)  # it is unknown which of its states are padding
