"""Looks at an encoder that was just made: are the states that it pools those of the layer."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from midlayer_encoders.errors import CutError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy
from midlayer_encoders.models.cut import Cut, at_depth, change_depth, cut_model
from midlayer_encoders.models.padding import mark_padding, suffers_from_padding
from midlayer_encoders.reading.capture import first_tensor, seen_by_hooks
from midlayer_encoders.reading.norm import final_norm

__all__ = ["check_padding", "check_states", "close"]


@torch.no_grad()
def check_states(module: nn.Module, cut: Cut, alone: Mapping[str, Any], padded: Mapping[str, Any] | None) -> Anatomy:
    """Return where the model keeps its parts, seen in a pass; raise unless the states to be pooled are the layer's.

    Args:
        module: reads the states; its model may hold a block more than it keeps, for layer 0.
        cut: how the layer is had.
        alone: the features of one short input.
        padded: those of the same input and a longer one in one batch; ``None`` where inputs are never padded.
    """
    model: Any = module.model
    with _few_blocks(module, cut) as few:
        final = _look(module, few, alone, padded, layer=cut.layer)
    internals.drop_recording_hooks(model)  # installed by the first pass, on the blocks that there were then
    anatomy = find_anatomy(model, blocks=cut.anatomy.blocks, final=final)
    cut_model(model, replace(cut, anatomy=anatomy))
    if cut.unnormed:
        anatomy = replace(anatomy, final=tuple(path.replace(".norm", ".fc_norm") for path in final))
    return anatomy if anatomy.shared else replace(anatomy, num_layers=cut.keep, num_blocks=cut.keep)


_FEW = 2  # like blocks that are looked at: one, and the next


@contextlib.contextmanager
def _few_blocks(module: Any, cut: Cut) -> Iterator[Cut]:
    """Have a stack of like blocks end after its first few while it is looked at, and yield the cut of that.

    A pass through all of them would take longer than loading a model does. Stacks of several kinds are looked at whole.
    """
    model: Any = module.model
    blocks = model.get_submodule(cut.anatomy.blocks)
    dropped = len(blocks) - _FEW
    if cut.anatomy.shared or dropped <= 0 or len({_kind(block) for block in blocks}) > 1:
        yield cut
        return
    kept, config, entries = dict(blocks._modules), dict(vars(model.config)), module.modality_config
    output = cut.output if isinstance(cut.output, str) else (cut.output[0], cut.output[1] - dropped)
    try:
        change_depth(model.config, len(blocks), _FEW)
        del blocks[_FEW:]
        if not isinstance(output, str):
            module.modality_config = {key: {**one, "method_output_name": list(output)} for key, one in entries.items()}
        yield replace(cut, layer=cut.layer - dropped, keep=cut.keep - dropped, output=output)
    finally:
        blocks._modules.clear()
        blocks._modules.update(kept)
        vars(model.config).clear()
        vars(model.config).update(config)
        module.modality_config = entries


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what two blocks of one kind have in common: their modules, shapes and settings, but for their places."""
    found: list[Any] = []
    for path, module in block.named_modules():
        found.append((path, type(module)))
        for name, value in vars(module).items():
            if isinstance(value, bool | int | float | str) and not name.startswith("_") and name not in _PLACES:
                found.append((name, value))
        found += [(name, value.shape) for name, value in module._parameters.items() if value is not None]
    return tuple(found)


_PLACES = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx", "block_idx")  # where a block stands


def _look(
    module: Any, cut: Cut, alone: Mapping[str, Any], padded: Mapping[str, Any] | None, *, layer: int
) -> tuple[str, ...]:
    """Return what follows the last block; raise unless the states that are read are those of the layer."""
    model: Any = module.model
    with _unchanged(model):
        seen = _reference(module, alone, cut)
    if len({states.shape for states in (*seen.before, *seen.after)}) > 1:
        raise CutError(
            f"The blocks of {type(model).__name__} ({cut.anatomy.blocks!r}) hand on states of other shapes than they "
            "receive: a model of several stages has no one stack of layers. Its last states are those of a plain "
            "SentenceTransformer."
        )
    _check_between(seen, model)
    anatomy = _anatomy_of(model, cut, seen)
    expected = _expected(seen, cut, model, anatomy)
    if expected is not None and "input_ids" in alone and len(expected) == len(alone["input_ids"]):
        expected = expected[:, : alone["input_ids"].shape[1]]  # some pad to whole windows inside
    cut_model(model, replace(cut, anatomy=anatomy))
    internals.drop_recording_hooks(model)
    batch = alone if padded is None or suffers_from_padding(model) else padded
    try:
        states = module(dict(batch))["token_embeddings"][:1]
    except _REFUSALS as reason:
        raise CutError(f"{type(model).__name__} does not run with {cut.keep} blocks: {reason}") from reason
    complete = "input_ids" not in batch or states.shape[1] == batch["input_ids"].shape[1]
    if complete and expected is not None and close(expected, states[:, : expected.shape[1]]):
        return anatomy.final
    by_itself = module(dict(alone))["token_embeddings"]
    if complete and expected is None and close(by_itself, states[:, : by_itself.shape[1]]):
        return anatomy.final
    if expected is not None and expected.shape != by_itself.shape and sorted(expected.shape) == sorted(by_itself.shape):
        raise CutError(
            f"The blocks of {type(model).__name__} keep their states as {tuple(expected.shape)} where its output is "
            f"{tuple(by_itself.shape)} (batch, tokens, width): layers with their axes in another order are not read."
        )
    if not complete or (expected is not None and not close(expected, by_itself)):
        raise CutError(
            f"{type(model).__name__} gives other states for layer {layer} with norm={cut.norm!r} than its "
            "block does, so something stands between them that is not known here. "
            f"norm={'none' if cut.norm == 'final' else 'final'!r} may have the layer; the last states are those of a "
            "plain SentenceTransformer."
        )
    mark_padding(model)
    return anatomy.final


def _check_between(seen: _Pass, model: Any) -> None:
    """Raise where a block receives other states than the one before it returned: is that a layer's state or not?"""
    if model.config.model_type in _CONVOLVED or len(seen.after) != len(seen.before):
        return
    for layer, (made, given) in enumerate(zip(seen.after, seen.before[1:], strict=False), 1):
        if not close(made, given):
            raise CutError(
                f"{type(model).__name__} changes its states between blocks {layer} and {layer + 1}, so what its layers "
                "are is not clear, and a cut one would not have them. Its last states are those of a plain "
                "SentenceTransformer."
            )


@torch.no_grad()
def check_padding(module: nn.Module, alone: Mapping[str, Any], padded: Mapping[str, Any] | None) -> None:
    """Note it where an input alone has other states than in a padded batch."""
    states = module(dict(alone))["token_embeddings"]
    if padded is not None and not close(states, module(dict(padded))["token_embeddings"][:1, : states.shape[1]]):
        mark_padding(module.model)  # type: ignore[arg-type]


# What a model raises that is run with fewer blocks than it was written for.
_REFUSALS = (ArithmeticError, LookupError, AttributeError, ValueError, TypeError, UnboundLocalError, RuntimeError)


def _reference(module: nn.Module, features: Mapping[str, Any], cut: Cut) -> _Pass:
    """Watch a pass through the blocks as they were read, before any is added, silenced or dropped.

    For all that its config says the model is as deep as the whole one: a block that reads its depth there would show.
    """
    model: Any = module.model
    try:
        with at_depth(model, cut):
            return _watched_pass(model, features, cut.anatomy, module)
    except CutError:
        raise
    except _REFUSALS:
        try:
            return _watched_pass(model, features, cut.anatomy, module)
        except _REFUSALS as reason:
            raise CutError(
                f"{type(model).__name__} does not run on what its processor makes of a short input: {reason}"
            ) from reason


_CONVOLVED = {"deberta-v2"}  # its first layer ends after a convolution that stands outside the blocks
_STEADY = {
    "big_bird": 'Set "attention_type": "original_full" in its config.json.',
    "bigbird_pegasus": 'Set "attention_type": "original_full" in its config.json.',
    "rwkv": 'Set "rescale_every": 0 in its config.json.',
}


@dataclass
class _Pass:
    """What was seen in one pass: each call of a block, and of a module outside them after the last block."""

    before: list[Tensor] = field(default_factory=list)
    after: list[Tensor] = field(default_factory=list)
    later: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)
    output: Tensor | None = None


def _watched_pass(model: Any, features: Mapping[str, Any], anatomy: Anatomy, module: nn.Module) -> _Pass:
    seen = _Pass()
    with contextlib.ExitStack() as stack:
        for block in model.get_submodule(anatomy.blocks):
            if anatomy.past_hooks:
                stack.enter_context(seen_by_hooks(block))
            stack.enter_context(watched_block(block, seen.before, seen.after))
        for path, part in model.named_modules():
            if path and not path.startswith(f"{anatomy.blocks}.") and path != anatomy.blocks:
                stack.enter_context(_watched_part(path, part, seen))
        stack.enter_context(_watched_output(model, seen))
        try:
            module(dict(features))
        except IndexError:
            if seen.output is None:  # else fewer hidden states than the finished cut will have
                raise
    if not seen.after:
        raise CutError(
            f"{type(model).__name__} does not call its blocks ({anatomy.blocks!r}), or calls their `forward` past any "
            "hook, so its layers cannot be seen."
        )
    seen.before, seen.after = (list(map(anatomy.tokens, states)) for states in (seen.before, seen.after))
    return seen


def _last(output: Any) -> Tensor | None:
    return output.last_hidden_state if hasattr(output, "last_hidden_state") else first_tensor(output)


@contextlib.contextmanager
def watched_block(block: nn.Module, before: list[Tensor], after: list[Tensor]) -> Iterator[None]:
    """Collect the states before and after each pass through a block."""

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found = first_tensor(args)
        before.append(found if found is not None else kwargs["hidden_states"])

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        found = first_tensor(output)
        if found is not None:
            after.append(found)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _watched_part(path: str, part: nn.Module, seen: _Pass) -> Iterator[None]:
    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        given, made = first_tensor(args), first_tensor(output)
        if seen.after and given is not None and made is not None:
            seen.later.append((path, given, made))

    handle = part.register_forward_hook(leave)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _watched_output(model: Any, seen: _Pass) -> Iterator[None]:
    """Keep what the model returns; sentence-transformers calls its ``forward``, past any hook on the model."""
    made = model.forward

    @functools.wraps(made)
    def forward(*args: Any, **kwargs: Any) -> Any:
        output = made(*args, **kwargs)
        seen.output = _last(output)
        return output

    model.forward = forward
    try:
        yield
    finally:
        del model.forward


def _anatomy_of(model: Any, cut: Cut, seen: _Pass) -> Anatomy:
    """Return the anatomy of the model as it is, with what follows the last block found by what it does."""
    named = find_anatomy(model, blocks=cut.anatomy.blocks, final=cut.anatomy.final)
    if not seen.after or seen.output is None:
        return named
    states, final = seen.after[-1], []
    for path, given, made in seen.later:
        if _same(states, seen.output):
            break
        if given.shape == states.shape and torch.equal(given, states) and made.shape[:-1] == states.shape[:-1]:
            states = made
            final.append(path)
    return replace(named, final=tuple(final)) if _same(states, seen.output) else named


def _same(states: Tensor, output: Tensor) -> bool:
    """Return whether states are the model's output; some pad to whole windows inside."""
    states = states[:, : output.shape[1]]
    return states.shape == output.shape and torch.equal(states, output)


def _expected(seen: _Pass, cut: Cut, model: Any, anatomy: Anatomy) -> Tensor | None:
    """Return the layer's states as its block has them: what the next one receives, where there is one."""
    if cut.layer < len(seen.before):
        states = seen.before[cut.layer]
    elif len(seen.after) >= cut.layer > 0:
        states = seen.after[cut.layer - 1]
        config: Any = model.config
        if cut.layer == 1 and config.model_type in _CONVOLVED and getattr(config, "conv_kernel_size", None):
            return None
    else:
        raise CutError(
            f"The blocks of {type(model).__name__} ({cut.anatomy.blocks!r}) are not called in a pass, or not each in "
            "its turn, so its layers cannot be seen."
        )
    return final_norm(model, anatomy, cut.norm)(states)


def close(expected: Tensor, states: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Return whether two tensors are the same but for rounding in a precision, their own by default."""
    if expected.shape != states.shape:
        return False
    tolerance = max(1e-3, 10 * torch.finfo(dtype or states.dtype).eps)
    # States that are not finite are named when something is embedded.
    largest = float(expected.nan_to_num(posinf=0, neginf=0).abs().max())
    return torch.allclose(expected, states, rtol=tolerance, atol=tolerance * largest, equal_nan=True)


def _fingerprint(model: nn.Module) -> dict[str, Any]:
    """Return what a pass must leave as it is: plain settings of every module, and how often each weight was written."""
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            # A flag may say that a first pass was made: what it did, if anything, shows in the others.
            if isinstance(value, int | float | str) and not isinstance(value, bool) and not name.startswith("_"):
                found[f"{path}.{name}".lstrip(".")] = value
    return found | {name: value._version for name, value in model.named_parameters()}


@contextlib.contextmanager
def _unchanged(model: Any) -> Iterator[None]:
    """Raise where a pass changes the model itself."""
    before = _fingerprint(model)
    yield
    after = _fingerprint(model)
    if changed := [name for name, value in after.items() if before.get(name, value) != value]:
        raise CutError(
            f"A forward pass changes {type(model).__name__} itself (`{changed[0]}`), so its vectors would depend on "
            "what was embedded before. " + _STEADY.get(model.config.model_type, "It cannot be an encoder.")
        )
