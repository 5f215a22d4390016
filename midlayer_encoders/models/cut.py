"""Plan and apply a cut: remove the blocks after a layer from a model and its config."""

import copy
import itertools
import re
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from torch import nn

from midlayer_encoders._types import Norm
from midlayer_encoders.errors import CutError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy

# Config fields that list something for each block.
_PER_LAYER = re.compile(r"layer|block|window|pattern")
# Families whose hidden states are the blocks' outputs, not their inputs: the embeddings have no entry.
_OUTPUTS_RECORDED = {"mamba", "mamba2", "falcon_mamba"}
# Families that cannot be built, or run, without blocks.
_NEVER_EMPTY = {"deberta", "deberta-v2", "longformer", "modernbert", "modernbert-decoder", "xmod"}
# Families that cannot be built with only one block that shares its weights while weights are tied.
_TIED_BLOCKS = {"zamba"}
# The last operation of attention, MLP or mixer, in the families whose layer 0 needs a block.
_OUTPUT_PROJECTION = re.compile(r"(^|\.)(Wo|out_proj|output\.dense)$")


@dataclass(frozen=True)
class Cut:
    """A plan to read one layer of a model.

    Attributes:
        anatomy: of the complete model.
        layer: number of blocks that the states pass through.
        norm: whether the final norm is applied to them.
        keep: number of blocks of the cut model.
        output: field of the model's output that holds the states, or the field and an index into it; ``None`` if the
            model is not cut, and hooks read the states.
        silent: whether the remaining block is zeroed, so that it returns its input.
        language: whether the model is the language model inside one that also reads images or audio.
        heads: whether the model's own heads pool and project the states, as in CLIP.
        unnormed: timm settings that move the norm after the blocks to the pooled vector.
    """

    anatomy: Anatomy
    layer: int
    norm: Norm
    keep: int
    output: str | tuple[str, int] | None
    silent: bool = False
    language: bool = False
    heads: bool = False
    unnormed: tuple[tuple[str, bool], ...] = ()


def plan_cut(anatomy: Anatomy, layer: int, norm: Norm, *, config: Any = None) -> Cut:
    """Return the plan to read ``layer`` from a model of this anatomy; verification of the loaded model proves it.

    With the final norm, the model ends after ``layer`` blocks. Without it, the states are the input of the next block,
    where transformers records hidden states, so the cut model has one block more (a blank one at the last layer). Some
    families record each block's output instead, and some cannot be built, or run, without blocks.
    """
    model_type = getattr(config, "model_type", "")
    ends = Cut(anatomy, layer, norm, layer, "last_hidden_state")
    received = Cut(anatomy, layer, norm, layer + 1, ("hidden_states", layer))
    if model_type == internals.TIMM:  # its hidden states are grids of patches without the class token
        settings = internals.timm_norm_settings(config) if norm == "none" and anatomy.final else {}
        return replace(ends, unnormed=tuple(settings.items()))
    if norm == "none" and model_type in _OUTPUTS_RECORDED:
        return Cut(anatomy, layer, norm, max(layer, 1), ("hidden_states", max(layer, 1) - 1), silent=layer == 0)
    cannot_be_empty = layer == 0 and model_type in _NEVER_EMPTY
    if norm == "none" and (anatomy.final or cannot_be_empty or getattr(config, "add_adapter", False)):
        return received
    if cannot_be_empty:
        return Cut(anatomy, 0, norm, 1, "last_hidden_state", silent=True) if anatomy.final else received
    return ends


def cut_config(config: Any, num_layers: int, keep: int) -> Any:
    """Return a copy of ``config`` for ``keep`` blocks instead of ``num_layers``, with its per-layer lists cut to match.

    Raises:
        CutError: if no setting of the config counts its blocks.
    """
    fields = config.to_dict()
    name = type(config).__name__
    if getattr(config, "model_type", "") != internals.TIMM:
        _shorten(fields, num_layers, keep, name=name)
    elif internals.timm_takes_depth(config):
        fields["model_args"] = {**(config.model_args or {}), "depth": keep}
    else:
        raise CutError(
            f"timm builds {config.architecture} with {num_layers} blocks only: like other models of several stages, it "
            "takes no `depth`. A plain SentenceTransformer gives its last states."
        )
    try:
        small = type(config).from_dict(fields)
    except Exception as reason:  # each config validates its settings differently
        raise CutError(f"{name} cannot be made with {keep} of {num_layers} blocks: {reason}") from reason
    if small.model_type in _TIED_BLOCKS and small.layers_block_type.count("hybrid") == 1:
        small.tie_word_embeddings = False
    small.name_or_path = config.name_or_path
    small.dtype = getattr(config, "dtype", None)  # the dictionary holds only its name
    return small


def _shorten(fields: dict[str, Any], num_layers: int, keep: int, *, name: str) -> None:
    """Change the depth in the settings of a config in place."""
    counts = [key for key in internals.COUNTS if fields.get(key) == num_layers]
    lists = [
        key
        for key, value in fields.items()
        if isinstance(value, list | str) and len(value) == num_layers and _PER_LAYER.search(key)
    ]
    if not counts and not lists:
        raise CutError(
            f"{name} does not say that the model has {num_layers} blocks ({', '.join(internals.COUNTS)}), so a cut "
            "model could not be reloaded: a model of several stages has no single stack of layers. If its blocks are "
            "of one width, pass the module and the path of its blocks to `LayerEncoder.from_module`."
        )
    fields.update(dict.fromkeys(counts, keep))
    for key in lists:
        entries = [fields[key][min(position, num_layers - 1)] for position in range(keep)]
        fields[key] = "".join(entries) if isinstance(fields[key], str) else entries
    for key, value in fields.items():
        if isinstance(value, dict) and key.startswith("per_layer"):  # settings by block number
            fields[key] = {block: settings for block, settings in value.items() if int(block) < keep}
    for stages in internals.BACKBONE_STAGES:
        fields.pop(stages, None)


def cut_model(model: nn.Module, cut: Cut) -> nn.Module:
    """Cut ``model`` in place and return it: drop the blocks after the layer, or add one where the cut needs it."""
    anatomy = cut.anatomy
    blocks: Any = model.get_submodule(anatomy.blocks)
    config: Any = model.config if internals.is_pretrained(model) else None  # a module in memory may have any other
    depth_changes = cut.keep != anatomy.num_layers
    if config is not None and depth_changes:
        _change_depth(config, anatomy.num_layers, cut.keep)
    if not anatomy.shared:
        empty = _empty_like(model) if depth_changes else None
        while len(blocks) < cut.keep:  # only its input is read
            new = None if empty is None else empty.get_submodule(anatomy.blocks)[len(blocks)]  # type: ignore[index]
            blocks.append(copy.deepcopy(blocks[-1]) if new is None else _zero_block(copy.deepcopy(new), blocks[-1]))
        del blocks[cut.keep :]
        if empty is not None:
            _fit_parts(model, empty, anatomy.blocks)
            # Some models recount their blocks: LongCat-Flash has two key-value caches for each.
            counts = vars(empty.config)
            names = [name for name in internals.COUNTS if name in counts and name in vars(config)]
            vars(config).update({name: counts[name] for name in names})
    if cut.silent:
        _silence(blocks[0])
    if cut.unnormed:
        _move_norm(model, dict(cut.unnormed))
    return model


def _move_norm(model: Any, settings: dict[str, bool]) -> None:
    """Move the norm of a timm model from its states to its pooled vector, in the model and its settings."""
    inner = model.timm_model
    model.config.model_args = {**(model.config.model_args or {}), **settings}
    if isinstance(inner.fc_norm, nn.Identity):
        inner.norm, inner.fc_norm = inner.fc_norm, inner.norm


def _empty_like(model: Any) -> nn.Module | None:
    """Return a model of the same class and config without weights, or ``None`` if its class cannot build one."""
    if internals.is_remote(model):
        return None
    with suppress(Exception):  # an unsupported depth: verification of the states refuses such a cut
        return internals.empty_model(type(model), model.config)  # type: ignore[no-any-return]
    return None


def _zero_block(block: nn.Module, like: nn.Module) -> nn.Module:
    """Return a block without weights on the device and in the dtype of another, filled with zeros."""
    first = next(parameter for parameter in like.parameters() if parameter.is_floating_point())
    block = block.to_empty(device=first.device).to(first.dtype).eval()
    for value in itertools.chain(block.parameters(), block.buffers()):
        nn.init.zeros_(value)
    return block


def _change_depth(config: Any, num_layers: int, keep: int) -> None:
    """Change the depth of a config in place, since all modules of the model may hold it."""
    small = cut_config(config, num_layers, keep)
    per_layer = [key for key in small.to_dict() if _PER_LAYER.search(key)]
    for name in (*internals.COUNTS, *per_layer, *internals.BACKBONE_STAGES, "tie_word_embeddings", "model_args"):
        if name in config.__dict__ and name in small.__dict__:
            config.__dict__[name] = small.__dict__[name]


def _fit_parts(model: nn.Module, empty: nn.Module, blocks: str) -> None:
    """Resize the parts outside the blocks to the new depth, which ``empty`` has.

    These are weights that do not affect states, such as ESM's contact head (loading refuses models whose states depend
    on them), and lists with an entry for each block, such as Molmo 2's rotations.
    """
    weights = dict(model.named_parameters())
    for name, weight in empty.named_parameters():
        if name in weights and weights[name].shape != weight.shape and not name.startswith(f"{blocks}."):
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(weights[name].new_zeros(weight.shape)))
    parts = dict(model.named_modules())
    for path, part in empty.named_modules():
        if path in parts and not path.startswith(f"{blocks}."):
            for name, value in vars(part).items():
                current = vars(parts[path]).get(name)
                if isinstance(value, list) and isinstance(current, list) and len(value) != len(current):
                    setattr(parts[path], name, copy.copy(value))


def at_depth(model: nn.Module, cut: Cut) -> AbstractContextManager[Any]:
    """Return a context in which the config of a cut model counts the blocks of the complete model."""
    settings = vars(model.config)
    depth = None if cut.anatomy.shared else len(model.get_submodule(cut.anatomy.blocks))  # type: ignore[arg-type]
    counts = [name for name in internals.COUNTS if depth is not None and settings.get(name) == depth]
    return mock.patch.dict(settings, dict.fromkeys(counts, cut.anatomy.num_layers))


def _silence(block: nn.Module) -> None:
    """Zero the outputs of a pre-norm block's sub-layers, so that it returns its input."""
    for name, module in block.named_modules():
        if _OUTPUT_PROJECTION.search(name):
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
