"""Where a model keeps its embeddings, its blocks and its final norm.

Layers are counted once, here: ``0`` is what the first block receives, ``k`` what block ``k`` hands on, ``L`` the last.
Everything is found by rule from the module tree; the few families that break a rule stand in one table each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import AnatomyError, LayerIndexError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.towers import find_towers
from midlayer_encoders.validation import check_list

__all__ = ["Anatomy", "deepest_layer", "find_anatomy", "resolve_layer", "resolve_layers", "text_stack"]


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of a model, as :meth:`torch.nn.Module.get_submodule` takes them.

    Attributes:
        blocks: path of the list of blocks.
        num_layers: number of times that a text passes through a block.
        final: modules that turn the last block's output into the model's output, in order; empty where there are none.
        embeddings: path of the input embeddings, ``None`` where the model names none.
        num_blocks: number of distinct blocks. Fewer than ``num_layers`` where blocks are shared (ALBERT): layer ``k``
            is then the state after the ``k``-th pass through a block.
        axes: order in which the axes of a block's states are those of batch, tokens and width.
        past_hooks: whether the model calls its blocks' ``forward`` itself, which no hook sees.
    """

    blocks: str
    num_layers: int
    final: tuple[str, ...]
    embeddings: str | None
    num_blocks: int
    axes: tuple[int, ...] = (0, 1, 2)
    past_hooks: bool = False

    @property
    def shared(self) -> bool:
        """Whether one block serves several layers."""
        return self.num_blocks < self.num_layers

    def below(self, path: str) -> Anatomy:
        """Return the same anatomy as seen from a module that holds the model at ``path``."""
        final = tuple(f"{path}.{name}" for name in self.final)
        embeddings = None if self.embeddings is None else f"{path}.{self.embeddings}"
        return replace(self, blocks=f"{path}.{self.blocks}", final=final, embeddings=embeddings)

    def tokens(self, states: Tensor) -> Tensor:
        """Return the states of a block as ``(B, T, D)``; those that have other axes, such as a grid, as they are."""
        return states if self.axes == (0, 1, 2) or states.ndim != len(self.axes) else states.permute(self.axes)

    def block(self, model: nn.Module, layer: int) -> nn.Module:
        """Return the block whose output is ``layer``, from ``1`` to ``num_layers``."""
        position = (layer - 1) * self.num_blocks // self.num_layers
        return model.get_submodule(self.blocks)[position]  # type: ignore[index, no-any-return]


def resolve_layer(layer: Layer, num_layers: int, *, name: str = "this model") -> int:
    """Return ``layer`` as a number from ``0`` (embeddings) to ``num_layers``.

    Args:
        layer: an int in ``[0, num_layers]``, a negative int from the end (``-1`` is the last layer), or a float in
            ``(0, 1]``, the fraction of the depth, rounded half up.
        num_layers: number of blocks.
        name: the model's, for the error.

    Example:
        >>> [resolve_layer(layer, 24) for layer in (0, 17, -1, 0.7)]
        [0, 17, 24, 17]
    """
    if hasattr(layer, "item") and getattr(layer, "ndim", 1) == 0:  # a number of NumPy or torch
        layer = layer.item()
    if isinstance(layer, bool) or not isinstance(layer, int | float):
        raise LayerIndexError(
            f"`layer` must be an int in [0, {num_layers}] or a fraction of the depth in (0, 1], "
            f"but got {short_repr(layer)}."
        )
    if isinstance(layer, float):
        if not 0 < layer <= 1:
            raise LayerIndexError(
                f"`layer` as a float must be a fraction of the depth in (0, 1], but got {layer}. "
                "Use an int to count blocks."
            )
        return math.floor(layer * num_layers + 0.5)
    if not -num_layers <= layer <= num_layers:
        raise LayerIndexError(
            f"`layer` must be in [0, {num_layers}] for {name} ({num_layers} blocks; 0 = embeddings), "
            f"or negative down to {-num_layers} to count from the end, but got {short_repr(layer)}."
        )
    return layer if layer >= 0 else num_layers + 1 + layer


def deepest_layer(layer: Layer | Sequence[Layer], num_layers: int, *, name: str = "this model") -> int:
    """Return a layer as a number, the deepest of several, or raise where one is named twice.

    Example:
        >>> deepest_layer(0.5, 24), deepest_layer([2, -1, 8], 24)
        (12, 24)
    """
    several: Sequence[Layer] = layer if isinstance(layer, list | tuple) else [layer]  # type: ignore[list-item]
    found = [resolve_layer(one, num_layers, name=name) for one in several]
    if twice := [one for place, one in enumerate(found) if one in found[:place]]:
        raise LayerIndexError(
            f"`layer` must name each layer once, but {short_repr(list(several))} names layer {twice[0]} of {name} "
            "twice. Pass `weights` to have one count more."
        )
    return max(found)


def resolve_layers(layers: Sequence[Layer] | str, num_layers: int, *, name: str = "this model") -> list[int]:
    """Return layers as ascending numbers without repeats; ``"all"`` is every one from ``0`` to ``num_layers``.

    Example:
        >>> resolve_layers("all", 3), resolve_layers([-1, 0.5, 0], 24)
        ([0, 1, 2, 3], [0, 12, 24])
    """
    if isinstance(layers, str):
        if layers != "all":
            raise LayerIndexError(f"`layers` must be 'all' or a list of layers, but got {short_repr(layers)}.")
        return list(range(num_layers + 1))
    layers = check_list("layers", layers, "layers", minimum=0)
    if not layers:
        raise LayerIndexError("`layers` must name at least one layer, but got an empty list. Pass 'all' for every one.")
    return sorted({resolve_layer(layer, num_layers, name=name) for layer in layers})


def find_anatomy(model: nn.Module, *, blocks: str | None = None, final: tuple[str, ...] | None = None) -> Anatomy:
    """Return where ``model`` keeps its parts.

    Args:
        model: a Hugging Face model, a module that holds one, or any module when told ``blocks``.
        blocks: path of the list of blocks, where the rule cannot find it.
        final: paths of what follows the last block, where the rule cannot find it.

    Example:
        >>> class Stack(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...         self.norm = nn.LayerNorm(4)
        >>> find_anatomy(Stack(), blocks="steps").num_layers
        3
    """
    if reason := _NO_LAYERS.get(getattr(getattr(model, "config", None), "model_type", "")):
        raise AnatomyError(f"The layers of {type(model).__name__} cannot be read: {reason}.")
    path = _block_list(model) if blocks is None else _named_list(model, blocks)
    num_blocks = len(model.get_submodule(path))  # type: ignore[arg-type]
    owner, config = _owner(model, path)
    passes = getattr(config, "num_hidden_layers", num_blocks) if path.endswith(_SHARED) else num_blocks
    kind = getattr(config, "model_type", "")
    if final is None:
        prefix = f"{owner}." if owner else ""
        rule = _FINAL.get(kind)
        found = _final_norm(model, path) if rule is None else rule(config)
        final = found if found is None or rule is None else tuple(prefix + name for name in found)
    axes = _AXES.get(kind, (0, 1, 2))
    return Anatomy(path, passes, final or (), _embeddings(model), num_blocks, axes, kind in _PAST_HOOKS)


# --- the list of blocks ---------------------------------------------------------------------------------------------

_SHARED = "albert_layer_groups"  # ALBERT passes through its groups several times
_NO_LAYERS = {"reformer": "each of its blocks hands on two streams of states, which only meet after the last one"}
# Where a block's states are not (batch, tokens, width), the places of these among their axes.
_AXES = {"squeezebert": (0, 2, 1), "xlnet": (1, 0, 2)}
_PAST_HOOKS = {"squeezebert"}  # calls `block.forward(…)`


def _block_list(model: nn.Module) -> str:
    """Return the path of the block list: the largest list of modules whose class is kept whole on a device.

    That class is the block in nearly every family, and a list that holds one of them is a stack, whatever other kinds
    of block stand between (Jamba, Zamba, NemotronH). Where transformers names none, the list of like modules with the
    most parameters is the one.
    """
    whole = internals.unsplit_classes(model)
    lists: list[tuple[str, Any]] = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and (len({type(child) for child in module}) == 1 or _named_in(module, whole))
    ]
    outer = [(p, m) for p, m in lists if not any(p.startswith(f"{other}.") for other, _ in lists)]
    if shared := [path for path, _ in outer if path.endswith(_SHARED)]:
        return shared[0]
    if not outer:
        return _empty_list(model)
    named = [(path, module) for path, module in outer if _named_in(module, whole)]
    if len(named) > 1 and (text := text_stack(model)):  # a language model that also reads images or audio
        named = [(path, module) for path, module in named if path.startswith(f"{text}.")] or named
    if len(named) > 1:
        raise AnatomyError(
            f"{type(model).__name__} has more than one list of blocks: "
            + ", ".join(f"{path!r} ({len(module)} x {type(module[0]).__name__})" for path, module in named)
            + ". Pass the tower you mean, or its path as `blocks`."
        )
    if not named and not hasattr(model, "config"):
        raise AnatomyError(
            f"{type(model).__name__} is a plain module, and which of {', '.join(repr(path) for path, _ in outer)} are "
            "its blocks cannot be told. Pass the path as `blocks`."
        )
    counts = [getattr(getattr(model, "config", None), name, None) for name in internals.COUNTS]
    counted = [found for found in outer if len(found[1]) in counts]  # not the convolutions before the blocks
    return max(named or counted or outer, key=lambda found: sum(p.numel() for p in found[1].parameters()))[0]


def _named_in(blocks: Any, names: set[str]) -> bool:
    return any(type(block).__name__ in names for block in blocks)


def text_stack(model: nn.Module) -> str | None:
    """Return the path of the language model inside one that also reads images or audio, or ``None``."""
    config: Any = getattr(model, "config", None)
    inner = internals.text_config(config)
    if inner is None or find_towers(model):
        return None
    for path, module in model.named_modules():
        if path and internals.is_pretrained(module) and module.config is inner:
            return str(path)
    return None


def _empty_list(model: nn.Module) -> str:
    """Return the path of the block list of a model that was cut before its first block."""
    empty: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and not len(module)
    ]
    if len(empty) == 1 and getattr(getattr(model, "config", None), "num_hidden_layers", None) == 0:
        return empty[0]
    raise AnatomyError(
        f"{type(model).__name__} has no list of like blocks, so it has no layers to choose from. "
        "Pass the path of its blocks (an `nn.ModuleList` or `nn.Sequential`) as `blocks`."
    )


def _named_list(model: nn.Module, path: str) -> str:
    try:
        blocks = model.get_submodule(path)
    except AttributeError:
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
        raise AnatomyError(
            f"`blocks` must be the path of a list in {type(model).__name__}, but it has no {path!r}. "
            f"Its lists are: {', '.join(map(repr, lists)) or 'none'}."
        ) from None
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise AnatomyError(f"`blocks` must be an `nn.ModuleList` or `nn.Sequential`, but {path!r} is a {type(blocks)}.")
    return path


def _ancestors(path: str) -> Iterator[str]:
    """Yield the paths above ``path``, nearest first, down to ``""``."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _owner(model: nn.Module, path: str) -> tuple[str, Any]:
    """Return the path and config of the Hugging Face model nearest above the blocks that has a model type."""
    found: tuple[str, Any] = ("", None)
    for above in _ancestors(path):
        module = model.get_submodule(above)
        if internals.is_pretrained(module):
            found = (above, module.config)
    return found


def _embeddings(model: nn.Module) -> str | None:
    """Return the path of the input embeddings, as the model itself names them."""
    try:
        wanted = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        names = ("embeddings", "feature_projection")  # the latter in audio models
        wanted = next((module for name, module in model.named_modules() if name.endswith(names)), None)
    return next((name for name, module in model.named_modules() if module is wanted), None)


# --- what follows the last block ------------------------------------------------------------------------------------


def _opt_final(config: Any) -> tuple[str, ...]:
    normed = bool(config.do_layer_norm_before) and not internals.opt_lacks_final_norm(config)
    projected = bool(config.word_embed_proj_dim != config.hidden_size)
    return ("decoder.final_layer_norm",) * normed + ("decoder.project_out",) * projected


def _speech_final(config: Any) -> tuple[str, ...]:
    # The same norm stands before the blocks of the one kind and after those of the other.
    return ("encoder.layer_norm",) if config.do_stable_layer_norm else ()


_FINAL: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "opt": _opt_final,
    "clip_vision_model": lambda _: (),  # `post_layernorm` is applied to the pooled token only
    "deberta-v2": lambda _: (),  # `encoder.LayerNorm` is for the relative positions
    "wav2vec2": _speech_final,
    "hubert": _speech_final,
    "wavlm": _speech_final,
}


def _final_norm(model: nn.Module, blocks: str) -> tuple[str, ...] | None:
    """Return the norm beside the block list, or beside the nearest module above it that has one: the last of several.

    A name can mislead: when a model is loaded, what follows its last block is found by what it does.
    """
    for above in _ancestors(blocks):
        norms = [
            name
            for name, child in model.get_submodule(above).named_children()
            if re.search(r"Norm(\dP)?$", type(child).__name__)
            and not name.startswith("pre_")
            and not list(child.children())
        ]
        if norms:
            return (f"{above}.{norms[-1]}".lstrip("."),)
    return None
