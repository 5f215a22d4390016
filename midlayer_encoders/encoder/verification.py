"""Verify that a new encoder pools the states of the requested layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from midlayer_encoders.encoder.probes import RUN_ERRORS, Features, close, token_states
from midlayer_encoders.errors import CutError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, mark_padding, suffers_from_padding
from midlayer_encoders.models.cut import Cut, at_depth, cut_model
from midlayer_encoders.reading.capture import final_norm, first_tensor, input_states

_CONVOLVED = {"deberta-v2"}  # its first layer ends after a convolution outside the blocks
_FULL = 'Set "attention_type": "original_full" in its config.json.'
_CURES = {"big_bird": _FULL, "bigbird_pegasus": _FULL, "rwkv": 'Set "rescale_every": 0 in its config.json.'}
_LAST_STATES = "A plain SentenceTransformer gives its last states."


@torch.no_grad()
def check_states(module: Any, cut: Cut, alone: Features, padded: Features | None) -> Anatomy:
    """Complete the cut, and return the anatomy of the cut model; raise unless the pooled states are the layer's.

    Args:
        module: module that returns the states; its model may have one block more than the cut keeps, for layer 0.
        cut: the cut of the model.
        alone: the features of one short input.
        padded: states of the same input and a longer one in one batch, or ``None`` if inputs are never padded.
    """
    model = module.model
    name = type(model).__name__
    record = _record_reference(module, alone, cut)
    anatomy = _observed_anatomy(model, cut, record)
    # Hidden states are not the model's output, so that one must be what the final modules make of them.
    output = record.model_output if cut.norm == "final" and isinstance(cut.output, tuple) else None
    if output is not None and not _is_output(final_norm(model, anatomy, "final")(record.outputs[-1]), output):
        raise CutError(f"{name} changes its states after its last block in an unknown way. {_LAST_STATES}")
    tokens = alone["input_ids"].shape[1] if "input_ids" in alone else None
    expected = _expected_states(record, cut, model, anatomy)
    expected = None if expected is None else expected[:, :tokens]  # some models pad to whole windows internally
    cut_model(model, replace(cut, anatomy=anatomy))
    internals.drop_recording_hooks(model)
    states = token_states(module, alone)
    equal = torch.equal if internals.is_remote(model) else close
    if tokens not in (None, states.shape[1]) or (expected is not None and not equal(expected, states)):
        raise CutError(
            f"{name} gives other states for layer {cut.layer} with norm={cut.norm!r} than its block does, so an "
            f"unknown module changes them. Try norm={'none' if cut.norm == 'final' else 'final'!r}. {_LAST_STATES}"
        )
    if not suffers_from_padding(model):
        check_padding(module, states, padded)
    internals.drop_recording_hooks(model)
    final = anatomy.final
    if cut.unnormed:
        final = tuple(path.replace(".norm", ".fc_norm") for path in final)
    cut_anatomy = replace(find_anatomy(model, blocks=anatomy.blocks, final=anatomy.final), final=final)
    return cut_anatomy if cut_anatomy.shared else replace(cut_anatomy, num_layers=cut.keep, num_blocks=cut.keep)


@torch.no_grad()
def check_uncut(module: nn.Module, cut: Cut, features: Features) -> tuple[Anatomy, bool]:
    """Return the anatomy of an uncut model, and whether hooks on its blocks read its layers.

    If its blocks pass on several streams of states, as in Gemma 3n, only the model itself can join them: it makes the
    states of a layer if later blocks are bypassed.

    Args:
        module: module that returns the states of the model.
        cut: the plan, which keeps all blocks.
        features: the features of one short input.

    Raises:
        CutError: if the model has no well-defined layers.
    """
    model: Any = module.model
    name = type(model).__name__
    record = _record_reference(module, features, cut)
    check_calls(name, cut.anatomy, record)
    anatomy = _observed_anatomy(model, cut, record)
    states = record.outputs[-1]
    output = record.model_output
    if output is None or ("input_ids" in features and output.shape[1] != features["input_ids"].shape[1]):
        raise CutError(f"{name} does not return a state for each token, so its layers cannot be read.")
    if states.ndim > 3 and output.ndim == 3 and cut.norm == "final":  # several streams, which it joins at the end
        return anatomy, False
    normed = final_norm(model, anatomy, cut.norm)(states)
    for_each_token = states.ndim == 3 and len(states) == 1 and states.shape[1] >= output.shape[1]
    if not for_each_token or not (cut.norm == "none" or _is_output(normed, output)):
        raise CutError(f"{name} changes its states after its last block in an unknown way. {_LAST_STATES}")
    return anatomy, True


def check_padding(module: Any, states: Tensor, padded: Features | None) -> None:
    """Record whether an input has other states in a padded batch than alone."""
    if padded is not None and not close(states, token_states(module, padded)[:1, : states.shape[1]]):
        mark_padding(module.model)


# --- one recorded pass -----------------------------------------------------------------------------------------------


@dataclass
class Record:
    """The states of one pass: inputs and outputs of each block, and of the modules after the last block."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    later: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    model_output: Tensor | None = None


def _record_reference(module: nn.Module, features: Features, cut: Cut) -> Record:
    """Record a pass through the blocks as loaded, before one is added, silenced or dropped, and check it.

    The config counts the blocks of the complete model, so that a block that reads its depth there shows.
    """
    model: Any = module.model
    name = type(model).__name__
    error: Exception | None = None
    for depth in (at_depth(model, cut), contextlib.nullcontext()):
        before = _fingerprint(model)
        try:
            with depth:
                record = record_pass(module, features, cut.anatomy)
        except RUN_ERRORS as reason:
            error = reason
            continue
        if changed := [key for key, value in _fingerprint(model).items() if before.get(key, value) != value]:
            raise CutError(
                f"A forward pass changes {name} itself (`{changed[0]}`), so its vectors would depend on earlier "
                f"inputs. {_CURES.get(model.config.model_type, 'It cannot be an encoder.')}"
            )
        _check_between_blocks(record, model, cut)
        return record
    raise CutError(f"{name} does not run on what its processor makes of a short input: {error}") from error


def record_pass(
    module: nn.Module, features: Features, anatomy: Anatomy, *, run: Callable[[], Any] | None = None
) -> Record:
    """Return the states of a pass through a module, or through its model with ``run``."""
    model: Any = module.model
    record = Record()

    # Clones, since a block, or the model after it, may change its states in place.
    def before_block(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record.inputs.append(input_states(args, kwargs).clone())

    def after_block(_: nn.Module, __: Any, output: Any) -> None:
        after = first_tensor(output)
        record.outputs += [] if after is None else [after.clone()]

    def after_part(path: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        before, after = first_tensor(args), first_tensor(output)
        if record.outputs and before is not None and after is not None:
            record.later.append((path, before, after))

    forward = model.forward

    @functools.wraps(forward)
    def recorded_forward(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        has_states = hasattr(output, "last_hidden_state")
        record.model_output = output.last_hidden_state if has_states else first_tensor(output)
        return output

    with contextlib.ExitStack() as stack:
        for block in dict.fromkeys(model.get_submodule(anatomy.blocks)):
            stack.callback(block.register_forward_pre_hook(before_block, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(after_block).remove)
        for path, part in model.named_modules():
            if path and not path.startswith(f"{anatomy.blocks}.") and path != anatomy.blocks:
                stack.callback(part.register_forward_hook(functools.partial(after_part, path)).remove)
        # sentence-transformers calls `forward`, which bypasses hooks.
        stack.enter_context(mock.patch.object(model, "forward", recorded_forward))
        try:
            module(dict(features)) if run is None else run()
        except RUN_ERRORS:
            # Else its output lacks the states before the cut, or a head after the blocks needs other inputs.
            if record.model_output is None and (run is None or len(record.outputs) < anatomy.num_layers):
                raise
    if not record.outputs:
        raise CutError(f"{type(model).__name__} does not call its blocks ({anatomy.blocks!r}), or bypasses hooks.")
    record.inputs = list(map(anatomy.tokens, record.inputs))
    record.outputs = list(map(anatomy.tokens, record.outputs))
    return record


def _check_between_blocks(record: Record, model: Any, cut: Cut) -> None:
    """Raise if blocks change the shape of the states, or receive other states than the previous block returned."""
    name = type(model).__name__
    if len({states.shape for states in (*record.inputs, *record.outputs)}) > 1:
        raise CutError(
            f"The blocks of {name} ({cut.anatomy.blocks!r}) change the shape of their states: a model of several "
            f"stages has no single stack of layers. {_LAST_STATES}"
        )
    remote = internals.is_remote(model)
    if remote:
        check_calls(name, cut.anatomy, record)
    if model.config.model_type in _CONVOLVED or len(record.outputs) != len(record.inputs):
        return
    last = cut.layer + 1 if remote else None  # of another model, later blocks tell how many there are
    for layer, (before, after) in enumerate(zip(record.outputs, record.inputs[1:last], strict=False), 1):
        if not (torch.equal if remote else close)(before, after):
            raise CutError(ambiguous(name, layer, _LAST_STATES))


def check_calls(name: str, anatomy: Anatomy, record: Record, cure: str = "") -> None:
    """Raise unless a model calls each of its blocks once."""
    blocks, calls = f"{anatomy.num_layers} blocks ({anatomy.blocks!r})", len(record.outputs)
    if calls != anatomy.num_layers:
        raise CutError(f"{name} must call each of its {blocks} once, but made {calls} calls.{cure}")


def ambiguous(name: str, layer: int, cure: str) -> str:
    """Return the message that a model changes its states between two blocks."""
    return f"{name} changes its states between blocks {layer} and {layer + 1}, so its layers are ambiguous. {cure}"


def _observed_anatomy(model: Any, cut: Cut, record: Record) -> Anatomy:
    """Return the anatomy of the model with the modules after the last block that its output passed through."""
    anatomy = find_anatomy(model, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
    final = observed_final(record)
    return anatomy if final is None else replace(anatomy, final=final)


def observed_final(record: Record) -> tuple[str, ...] | None:
    """Return the modules from the last block's output to the model's, or ``None`` if something else changes it."""
    if record.model_output is None:
        return None
    states = record.outputs[-1]
    final: list[str] = []
    for path, before, after in record.later:
        if _is_output(states, record.model_output):
            break
        if before.shape == states.shape and torch.equal(before, states) and after.shape[:-1] == states.shape[:-1]:
            states = after
            final.append(path)
    return tuple(final) if _is_output(states, record.model_output) else None


def _is_output(states: Tensor, output: Tensor) -> bool:
    """Return whether states are the model's output; some models pad to whole windows internally."""
    states = states[:, : output.shape[1]]
    return states.shape == output.shape and torch.equal(states, output)


def _expected_states(record: Record, cut: Cut, model: Any, anatomy: Anatomy) -> Tensor | None:
    """Return the layer's states from the recorded pass: the input of the next block, if there is one."""
    if cut.layer < len(record.inputs):
        states = record.inputs[cut.layer]
    elif len(record.outputs) >= cut.layer > 0:
        states = record.outputs[cut.layer - 1]
        config: Any = model.config
        if cut.layer == 1 and config.model_type in _CONVOLVED and getattr(config, "conv_kernel_size", None):
            return None
    else:
        raise CutError(f"{type(model).__name__} does not call all of its blocks ({cut.anatomy.blocks!r}) in order.")
    normed: Tensor = final_norm(model, anatomy, cut.norm)(states)
    return normed


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return the numbers and strings among the settings of each module, and the version of each weight."""
    settings = {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        # Flags may record that a first pass ran.
        if isinstance(value, int | float | str) and not isinstance(value, bool) and not name.startswith("_")
    }
    return settings | {name: value._version for name, value in model.named_parameters()}
