"""A model, and its config, without the blocks after a layer: how a layer is had, and the cut itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError
from midlayer_encoders.models import compat
from midlayer_encoders.models.anatomy import Anatomy
from midlayer_encoders.models.sites import block_sites

__all__ = ["Cut", "JointCut", "cut_config", "cut_model", "plan_cut"]

# Names by which configs count blocks, and by which they list something for each block.
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
_PER_LAYER = re.compile(r"layer|block")
# Families that record each block's output, not its input: the embeddings have no entry.
_OUTPUTS_RECORDED = {"mamba", "mamba2", "falcon_mamba"}
# Families that cannot be made, or run, without any block.
_NEVER_EMPTY = {"deberta", "deberta-v2", "modernbert"}


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
    """

    anatomy: Anatomy
    layer: int
    norm: Norm
    keep: int
    output: str | tuple[str, int]
    silent: bool = False


@dataclass(frozen=True)
class JointCut:
    """How a layer of each tower of a joint model is had: by their blocks alone, the heads after them stay.

    Attributes:
        towers: the cut of each, by its name.
    """

    towers: Mapping[str, Cut]


def plan_cut(anatomy: Anatomy, layer: int, norm: Norm, *, model_type: str = "") -> Cut:
    """Return how ``layer`` is had from a model of this anatomy.

    With the final norm the model simply ends after ``layer`` blocks. Without it the states are read where the next
    block receives them, so one block more is kept (at the last layer, one that is never read), as every release of
    transformers records them there.
    """
    if model_type in _OUTPUTS_RECORDED and norm == "none":
        return Cut(anatomy, layer, norm, max(layer, 1), ("hidden_states", max(layer, 1) - 1), silent=layer == 0)
    if norm == "none" and anatomy.final:
        return Cut(anatomy, layer, norm, layer + 1, ("hidden_states", layer))
    if layer == 0 and model_type in _NEVER_EMPTY:
        if anatomy.final:
            return Cut(anatomy, layer, norm, 1, "last_hidden_state", silent=True)
        return Cut(anatomy, layer, norm, 1, ("hidden_states", 0))
    return Cut(anatomy, layer, norm, layer, "last_hidden_state")


def cut_config(config: Any, num_layers: int, keep: int) -> Any:
    """Return a copy of ``config`` for ``keep`` blocks instead of ``num_layers``, its per-layer lists cut to match.

    Raises:
        CutError: when no setting of the config counts its blocks.
    """
    fields = config.to_dict()
    counts = [name for name in _COUNTS if fields.get(name) == num_layers]
    if not counts:
        raise CutError(
            f"{type(config).__name__} does not say how many blocks the model has ({', '.join(_COUNTS)}), so a cut one "
            "could not be loaded again. Cut the module itself with `cut_model`."
        )
    for name in counts:
        fields[name] = keep
    for name, value in fields.items():
        if isinstance(value, list) and len(value) == num_layers and _PER_LAYER.search(name):
            fields[name] = [value[min(position, num_layers - 1)] for position in range(keep)]
    for name in compat.BACKBONE_STAGES:
        fields.pop(name, None)
    made = type(config).from_dict(fields)
    made.name_or_path = config.name_or_path
    made.dtype = getattr(config, "dtype", None)  # the dictionary holds its name only
    return made


def cut_model(model: nn.Module, cut: Cut) -> nn.Module:
    """Cut ``model`` in place and return it: blocks after the layer are dropped, one is added where it is needed."""
    blocks: Any = model.get_submodule(cut.anatomy.blocks)
    if not cut.anatomy.shared:
        while len(blocks) < cut.keep:
            blocks.append(_copied(blocks[-1], len(blocks)))  # only what enters it is read
        del blocks[cut.keep :]
    config = getattr(model, "config", None)
    if config is not None and cut.keep != cut.anatomy.num_layers:
        made = cut_config(config, cut.anatomy.num_layers, cut.keep)
        for name in (*_COUNTS, *(key for key in made.to_dict() if _PER_LAYER.search(key)), *compat.BACKBONE_STAGES):
            # Every module of the model may hold this config, so it is changed, not replaced.
            if name in config.__dict__ and name in made.__dict__:
                config.__dict__[name] = made.__dict__[name]
    if cut.silent:
        _silence(blocks[0], config)
    return model


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
