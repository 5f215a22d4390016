"""A model, and its config, without the blocks after a layer: how a layer is had, and the cut itself."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.sites import block_sites

__all__ = [
    "MOST_PLANS",
    "Cut",
    "JointCut",
    "at_depth",
    "change_depth",
    "cut_config",
    "cut_model",
    "plan_cut",
    "plan_cuts",
    "whole_around",
]

# Names by which configs count blocks, and by which they list something for each block.
_COUNTS = internals.COUNTS
_PER_LAYER = re.compile(r"layer|block|window|pattern")
# Families that record each block's output, not its input: the embeddings have no entry.
_OUTPUTS_RECORDED = {"mamba", "mamba2", "falcon_mamba"}
# Families that cannot be made, or run, without any block.
_NEVER_EMPTY = {"deberta", "deberta-v2", "modernbert"}
MOST_PLANS = 3  # ways to have a layer
# Families that cannot be made with one block of a kind whose weights all blocks of that kind share, while anything is
# tied: transformers looks for the others.
_TIED_BLOCKS = {"zamba"}


@dataclass(frozen=True)
class Cut:
    """How one layer of a model is had.

    Attributes:
        anatomy: of the whole model.
        layer: number of blocks that the states pass through.
        norm: whether the final norm is applied to them.
        keep: number of blocks that the cut model has.
        output: field of the model's output that holds the states, or the field and an index into it.
        silent: whether the one kept block is made to hand on what it receives.
        language: whether the model is the language model of one that also reads images or audio.
        unnormed: settings of timm under which the norm after the blocks is applied to the pooled vector instead.
    """

    anatomy: Anatomy
    layer: int
    norm: Norm
    keep: int
    output: str | tuple[str, int]
    silent: bool = False
    language: bool = False
    unnormed: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class JointCut:
    """How a layer of each tower of a joint model is had: by their blocks alone, the heads after them stay.

    Attributes:
        towers: the cut of each, by its name.
    """

    towers: Mapping[str, Cut]


def plan_cut(anatomy: Anatomy, layer: int, norm: Norm, *, config: Any = None) -> Cut:
    """Return how ``layer`` is had from a model of this anatomy, as far as its family is known: the first plan."""
    return plan_cuts(anatomy, layer, norm, config=config)[0]


def plan_cuts(anatomy: Anatomy, layer: int, norm: Norm, *, config: Any = None) -> list[Cut]:
    """Return the ways in which ``layer`` may be had from a model of this anatomy, the likeliest first.

    With the final norm the model simply ends after ``layer`` blocks. Without it the states are read where the next
    block receives them, so one block more is kept (at the last layer, one that is never read), as every release of
    transformers records them there. Some families record each block's output instead, some cannot be made, or run,
    without any block: whether a plan gives the layer's states is seen when it is tried.
    """
    model_type = getattr(config, "model_type", "")
    ends = Cut(anatomy, layer, norm, layer, "last_hidden_state")
    if model_type == internals.TIMM:  # whose hidden states are grids of patches, without their class token
        settings = internals.timm_norm_settings(config) if norm == "none" and anatomy.final else {}
        return [replace(ends, unnormed=tuple(settings.items()))]
    received = Cut(anatomy, layer, norm, layer + 1, ("hidden_states", layer))
    returned = Cut(anatomy, layer, norm, max(layer, 1), ("hidden_states", max(layer, 1) - 1), silent=layer == 0)
    silent = Cut(anatomy, 0, norm, 1, "last_hidden_state", silent=True)
    if norm == "none":
        if model_type in _OUTPUTS_RECORDED:
            return [returned, received]
        if layer == 0 and model_type in _NEVER_EMPTY and not anatomy.final:
            return [received, returned]
        return [received, returned, ends] if anatomy.final else [ends, received, returned]
    if layer > 0:
        return [ends]
    empty = [] if model_type in _NEVER_EMPTY else [ends]
    return [*empty, silent, received] if anatomy.final else [*empty, received, silent]


def cut_config(config: Any, num_layers: int, keep: int) -> Any:
    """Return a copy of ``config`` for ``keep`` blocks instead of ``num_layers``, its per-layer lists cut to match.

    Raises:
        CutError: when no setting of the config counts its blocks.
    """
    fields = config.to_dict()
    if getattr(config, "model_type", "") == internals.TIMM:
        fields["model_args"] = _timm_arguments(config, num_layers, keep)
    else:
        _shorten(fields, num_layers, keep, name=type(config).__name__)
    try:
        made = type(config).from_dict(fields)
    except Exception as reason:  # each config checks its settings in its own way
        raise CutError(
            f"{type(config).__name__} cannot be made with {keep} of {num_layers} blocks: {reason}"
        ) from reason
    if made.model_type in _TIED_BLOCKS and made.layers_block_type.count("hybrid") == 1:
        made.tie_word_embeddings = False
    made.name_or_path = config.name_or_path
    made.dtype = getattr(config, "dtype", None)  # the dictionary holds its name only
    return made


def _timm_arguments(config: Any, num_layers: int, keep: int) -> dict[str, Any]:
    """Return what timm makes the model of, for ``keep`` blocks."""
    if not internals.timm_takes_depth(config):
        raise CutError(
            f"timm makes {config.architecture} of {num_layers} blocks and of no other number: it takes no `depth`, as "
            "models of several stages do not. Its last states are those of a plain SentenceTransformer."
        )
    return {**(config.model_args or {}), "depth": keep}


def _shorten(fields: dict[str, Any], num_layers: int, keep: int, *, name: str) -> None:
    """Give the settings of a config another depth in place."""
    counts = [key for key in _COUNTS if fields.get(key) == num_layers]
    lists = [key for key, value in fields.items() if isinstance(value, list | str) and len(value) == num_layers]
    if not counts and not any(map(_PER_LAYER.search, lists)):
        raise CutError(
            f"{name} does not say that the model has {num_layers} blocks ({', '.join(_COUNTS)}), so a "
            "cut one could not be loaded again: a model of several stages has no one stack of layers. If the blocks of "
            "this one are of one width, pass the module and the path of its blocks to `LayerEncoder.from_module`."
        )
    for key in counts:
        fields[key] = keep
    for key, value in fields.items():
        if isinstance(value, list | str) and len(value) == num_layers and _PER_LAYER.search(key):
            kept = [value[min(position, num_layers - 1)] for position in range(keep)]
            fields[key] = "".join(kept) if isinstance(value, str) else kept
        elif isinstance(value, dict) and key.startswith("per_layer"):  # the settings of some blocks, by their place
            fields[key] = {place: one for place, one in value.items() if int(place) < keep}
    for stages in internals.BACKBONE_STAGES:
        fields.pop(stages, None)


def cut_model(model: nn.Module, cut: Cut) -> nn.Module:
    """Cut ``model`` in place and return it: blocks after the layer are dropped, one is added where it is needed."""
    blocks: Any = model.get_submodule(cut.anatomy.blocks)
    config = getattr(model, "config", None)
    if config is not None and cut.keep != cut.anatomy.num_layers:
        change_depth(config, cut.anatomy.num_layers, cut.keep)
    small = _empty_like(model) if cut.keep != cut.anatomy.num_layers and not cut.anatomy.shared else None
    if not cut.anatomy.shared:
        while len(blocks) < cut.keep:  # only what enters it is read
            fresh = None if small is None else small.get_submodule(cut.anatomy.blocks)[len(blocks)]  # type: ignore[index]
            blocks.append(_copied(blocks[-1], len(blocks)) if fresh is None else _blank(fresh, blocks[-1]))
        del blocks[cut.keep :]
    if small is not None:
        _fit_parts(model, small, cut.anatomy.blocks)
        # Some count their blocks again when they are made: LongCat-Flash has two key-value caches for each.
        made = vars(small.config)
        vars(config).update({name: made[name] for name in _COUNTS if name in made and name in vars(config)})
    if cut.silent:
        _silence(blocks[0], config)
    if cut.unnormed:
        _move_norm(model, dict(cut.unnormed))
    return model


def _move_norm(model: Any, settings: dict[str, bool]) -> None:
    """Apply the norm of a timm model to its pooled vector instead of its states, as its settings then say."""
    inner = model.timm_model
    model.config.model_args = {**(model.config.model_args or {}), **settings}
    if isinstance(inner.fc_norm, nn.Identity):
        inner.norm, inner.fc_norm = inner.fc_norm, inner.norm


def _empty_like(model: Any) -> nn.Module | None:
    """Return a model of the same class and config without weights; ``None`` where its class cannot make one."""
    if not type(model).__module__.startswith("transformers."):
        return None
    try:
        with internals.without_weights():
            return type(model)(copy.deepcopy(model.config))  # type: ignore[no-any-return]
    except Exception:  # a depth that its class refuses: such a cut is refused when its states are looked at
        return None


def _blank(block: nn.Module, like: nn.Module) -> nn.Module:
    """Return a block of the kind that a deeper model has next, with zeros for weights."""
    first = next(like.parameters())
    made = block.to_empty(device=first.device).to(first.dtype).eval()
    for value in itertools.chain(made.parameters(), made.buffers()):
        nn.init.zeros_(value)
    return made


def change_depth(config: Any, num_layers: int, keep: int) -> None:
    """Give a config another depth in place: every module of the model may hold it."""
    made = cut_config(config, num_layers, keep)
    per_layer = [key for key in made.to_dict() if _PER_LAYER.search(key)]
    for name in (*_COUNTS, *per_layer, *internals.BACKBONE_STAGES, "tie_word_embeddings", "model_args"):
        if name in config.__dict__ and name in made.__dict__:
            config.__dict__[name] = made.__dict__[name]


def _fit_parts(model: nn.Module, small: nn.Module, blocks: str) -> None:
    """Give what stands outside the blocks the size that the new depth asks for.

    These are weights that make no state, as those of ESM's contact head (a model whose states are made of them was
    refused before its weights were read), and lists with an entry for each block, as Molmo 2 keeps of its rotations.
    """
    held = dict(model.named_parameters())
    for name, wanted in small.named_parameters():
        if name in held and held[name].shape != wanted.shape and not name.startswith(f"{blocks}."):
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(held[name].new_zeros(wanted.shape)))
    parts = dict(model.named_modules())
    for path, part in small.named_modules():
        if path in parts and not path.startswith(f"{blocks}."):
            for name, value in vars(part).items():
                mine = vars(parts[path]).get(name)
                if isinstance(value, list) and isinstance(mine, list) and len(value) != len(mine):
                    setattr(parts[path], name, value)


@contextmanager
def at_depth(model: nn.Module, cut: Cut) -> Iterator[None]:
    """Have the config of a cut model count the blocks of the whole one, for a pass that must not notice."""
    config: Any = getattr(model, "config", None)
    fields = dict(vars(config)) if config is not None else {}
    counts = [name for name in _COUNTS if name in fields and isinstance(fields[name], int)]
    for name in counts if not cut.anatomy.shared else ():
        if fields[name] == len(model.get_submodule(cut.anatomy.blocks)):  # type: ignore[arg-type]
            config.__dict__[name] = cut.anatomy.num_layers
    try:
        yield
    finally:
        for name in counts:
            config.__dict__[name] = fields[name]


@torch.no_grad()
def whole_around(encoder: Any) -> nn.Module | None:
    """Return the model of which this is the encoder, with a decoder of no blocks, or ``None`` if it asks for two texts.

    transformers has no class that loads such an encoder by itself. What its decoder makes of the text is not read.
    """
    from transformers import MODEL_MAPPING
    from transformers.modeling_outputs import BaseModelOutput

    config = copy.deepcopy(encoder.config)
    if not hasattr(config, "decoder_layers") or not hasattr(encoder, "embed_tokens"):
        return None
    config.decoder_layers, config.tie_word_embeddings = 0, True
    if hasattr(config, "max_decoder_position_embeddings"):  # it is given the text too, as long as it is
        config.max_decoder_position_embeddings = config.max_encoder_position_embeddings
    if getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    with internals.without_weights():
        whole: Any = MODEL_MAPPING[type(config)](config)
    if not all(hasattr(whole, name) for name in ("encoder", "decoder", "shared")):
        return None
    _blank(whole, encoder)
    whole.encoder, whole.shared, whole.decoder.embed_tokens = encoder, encoder.embed_tokens, encoder.embed_tokens
    ids = torch.tensor([[5, 6, 7]], device=encoder.device)
    states = BaseModelOutput(encoder.embed_tokens(ids))  # the encoder may be in training: its dropout draws numbers
    try:
        made = whole(input_ids=ids, attention_mask=torch.ones_like(ids), encoder_outputs=states)
    except (ValueError, TypeError, AttributeError):
        return None
    return whole if getattr(made, "encoder_last_hidden_state", None) is not None else None


def _copied(block: nn.Module, position: int) -> nn.Module:
    copied = copy.deepcopy(block)
    for module in copied.modules():
        if hasattr(module, "layer_idx"):  # its place in a key-value cache
            module.layer_idx = position  # type: ignore[assignment]
    return copied


def _silence(block: nn.Module, config: Any) -> None:
    """Make a block that norms before its sub-layers hand on what it receives: what they add is zero."""
    sites = block_sites(block, config)
    for site in (sites[name] for name in ("attention", "mlp") if name in sites):
        for parameter in block.get_submodule(site.module).parameters():
            nn.init.zeros_(parameter)
