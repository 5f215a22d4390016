"""Locate the embeddings, blocks and final norm of a model, and resolve layer numbers.

Layer ``0`` is the input of the first block, ``k`` the output of block ``k``, and ``L`` the last. Rules on the module
tree find every part; tables list the few families that break a rule.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor, nn

from midlayer_encoders._types import Layer
from midlayer_encoders.errors import AnatomyError, LayerIndexError, short_repr
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.validation import check_list, layer_number

_SENSITIVE = "_suffers_from_padding"  # an attribute of the model, so that copies of the model have it


@dataclass(frozen=True)
class Anatomy:
    """Paths of the parts of a model, for :meth:`torch.nn.Module.get_submodule`.

    Attributes:
        blocks: path of the list of blocks.
        num_layers: number of passes through a block.
        final: modules that turn the last block's output into the model's output, in order; may be empty.
        embeddings: path of the input embeddings, or ``None``.
        num_blocks: number of distinct blocks. Fewer than ``num_layers`` where blocks are shared (ALBERT): layer ``k``
            is then the state after the ``k``-th pass through a block.
        axes: positions of batch, tokens and width among the axes of a block's states.
    """

    blocks: str
    num_layers: int
    final: tuple[str, ...]
    embeddings: str | None
    num_blocks: int
    axes: tuple[int, ...] = (0, 1, 2)

    @property
    def shared(self) -> bool:
        """Whether one block serves several layers."""
        return self.num_blocks < self.num_layers

    def below(self, path: str) -> Self:
        """Return the anatomy relative to a module that holds the model at ``path``."""
        final = tuple(f"{path}.{name}" for name in self.final)
        embeddings = None if self.embeddings is None else f"{path}.{self.embeddings}"
        return replace(self, blocks=f"{path}.{self.blocks}", final=final, embeddings=embeddings)

    def tokens(self, states: Tensor) -> Tensor:
        """Return the states of a block as ``(B, T, D)``; states with other axes, such as a grid, are unchanged."""
        return states if self.axes == (0, 1, 2) or states.ndim != len(self.axes) else states.permute(self.axes)

    def block(self, model: nn.Module, layer: int) -> nn.Module:
        """Return the block whose output is ``layer``, from ``1`` to ``num_layers``."""
        position = (layer - 1) * self.num_blocks // self.num_layers
        return model.get_submodule(self.blocks)[position]  # type: ignore[index, no-any-return]

    def distinct_blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the blocks in order, each once."""
        return list(dict.fromkeys(self.block(model, layer) for layer in range(1, self.num_layers + 1)))


def resolve_layer(layer: Layer | str, num_layers: int, *, name: str = "this model") -> int:
    """Return ``layer`` as a number from ``0`` (embeddings) to ``num_layers``.

    Args:
        layer: an int in ``[0, num_layers]``, a negative int from the end (``-1`` is the last layer), or a float in
            ``(0, 1]``, the fraction of the depth, rounded half up; or one of these as a string.
        num_layers: number of blocks.
        name: name of the model in errors.

    Example:
        >>> [resolve_layer(layer, 24) for layer in (0, 17, -1, 0.7)]
        [0, 17, 24, 17]
    """
    if hasattr(layer, "item") and getattr(layer, "ndim", 1) == 0:  # a NumPy or torch scalar
        layer = layer.item()
    if isinstance(layer, str):
        layer = number if (number := layer_number(layer)) is not None else layer
    if isinstance(layer, float) and 0 < layer <= 1:
        return math.floor(layer * num_layers + 0.5)
    if isinstance(layer, int) and not isinstance(layer, bool) and -num_layers <= layer <= num_layers:
        return layer if layer >= 0 else num_layers + 1 + layer
    raise LayerIndexError(
        f"`layer` must be in [0, {num_layers}] for {name} ({num_layers} blocks; 0 = embeddings), negative to count "
        f"from the end, or a float, the fraction of the depth in (0, 1], but got {short_repr(layer)}."
    )


def resolve_layers(layers: Sequence[Layer] | str, num_layers: int, *, name: str = "this model") -> list[int]:
    """Return layers as ascending numbers without repeats; ``"all"`` means ``0`` to ``num_layers``.

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
        raise LayerIndexError("`layers` must name at least one layer, but got an empty list. Pass 'all' for all.")
    # In reverse: of a range that is too long, the error names the end, which the user wrote.
    return sorted({resolve_layer(layer, num_layers, name=name) for layer in reversed(layers)})


def find_anatomy(model: nn.Module, *, blocks: str | None = None, final: tuple[str, ...] | None = None) -> Anatomy:
    """Return the paths of the parts of ``model``.

    Args:
        model: a Hugging Face model, a module that holds one, or any module if ``blocks`` is given.
        blocks: path of the list of blocks, if the rules do not find it.
        final: paths of the modules after the last block, if the rules do not find them.

    Example:
        >>> class Stack(nn.Module):
        ...     def __init__(self) -> None:
        ...         super().__init__()
        ...         self.steps = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        ...         self.norm = nn.LayerNorm(4)
        >>> find_anatomy(Stack(), blocks="steps").num_layers
        3
    """
    if reason := _UNSUPPORTED.get(getattr(getattr(model, "config", None), "model_type", "")):
        raise AnatomyError(f"The layers of {type(model).__name__} cannot be read: {reason}.")
    path = _block_list(model) if blocks is None else _check_list_path(model, blocks)
    num_blocks = len(model.get_submodule(path))  # type: ignore[arg-type]
    owner, config = _owner(model, path)
    passes = getattr(config, "num_hidden_layers", num_blocks) if path.endswith(_SHARED) else num_blocks
    model_type = getattr(config, "model_type", "")
    if final is None and model_type in _FINAL:
        final = tuple(f"{owner}.{name}".lstrip(".") for name in _FINAL[model_type](config))
    elif final is None:
        final = _final_norm(model, path)
    modules = dict(model.named_modules())
    if unknown := [name for name in final if name not in modules]:
        raise AnatomyError(f"`final` must name modules in {type(model).__name__}, but it has no {unknown[0]!r}.")
    return Anatomy(path, passes, final, _embeddings(model), num_blocks, _AXES.get(model_type, (0, 1, 2)))


def most_tokens(model: nn.Module) -> int | None:
    """Return the number of positions of a model, or ``None`` if it is unlimited.

    RoBERTa-style models (XLM-R, MPNet, Longformer, …) count positions from ``padding_idx + 1``, so the table has more
    rows than positions.
    """
    config: Any = getattr(model, "config", None)
    rows = getattr(getattr(config, "text_config", config), "max_position_embeddings", None)
    if not isinstance(rows, int) or rows <= 0:
        return None
    for name, table in model.named_modules():
        padding: Any = getattr(table, "padding_idx", None)
        if name.rpartition(".")[2] == "position_embeddings" and padding is not None and len(table.weight) == rows:
            return rows - int(padding) - 1
    return rows


# --- joint models such as CLIP, whose parts for texts and images project into one space -----------------------------

# The parts by medium: the model's attribute, and the method that projects the part's states.
_MEDIA_PARTS = {"text": ("text_model", "get_text_features"), "image": ("vision_model", "get_image_features")}


def media_parts(model: nn.Module) -> dict[str, str]:
    """Return the path of the part for each medium of a joint model; empty for other models.

    A joint model has both parts and a method that projects the states of each. A language model that also reads images
    has one stack of blocks and is not joint.
    """
    is_joint = all(
        isinstance(getattr(model, part, None), nn.Module) and hasattr(model, method)
        for part, method in _MEDIA_PARTS.values()
    )
    return {medium: part for medium, (part, _) in _MEDIA_PARTS.items()} if is_joint else {}


# --- the list of blocks ---------------------------------------------------------------------------------------------

_SHARED = "albert_layer_groups"  # ALBERT runs its groups several times
_UNSUPPORTED = {"reformer": "each block returns two streams of states, which are joined after the last one only"}
# The axes of batch, tokens and width in a block's states, where they are in another order.
_AXES = {"xlnet": (1, 0, 2)}


def _block_list(model: nn.Module) -> str:
    """Return the path of the block list: the largest list with a class that transformers never splits.

    That class is the block in nearly every family. Lists may mix several kinds of block (Jamba, Zamba, NemotronH).
    Where transformers names no such class, it is the list of identical modules with the most parameters.
    """
    block_classes = internals.unsplit_classes(model)

    def has_block(modules: Any) -> bool:
        # FSDP2 puts a class of its own in front of a module's.
        return any(cls.__name__ in block_classes for module in modules for cls in type(module).__mro__)

    lists: list[tuple[str, Any]] = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList | nn.Sequential)
        and (len({type(child) for child in module}) == 1 or has_block(module))
    ]
    outer = [(p, m) for p, m in lists if not any(p.startswith(f"{parent}.") for parent, _ in lists)]
    if shared := [path for path, _ in outer if path.endswith(_SHARED)]:
        return shared[0]
    if not outer:
        return _empty_list(model)
    stacks = [(path, module) for path, module in outer if has_block(module)]
    if len(stacks) > 1 and (text := text_stack(model)):  # a language model that also reads images or audio
        stacks = [(path, module) for path, module in stacks if path.startswith(f"{text}.")] or stacks
    if len(stacks) > 1:
        names = ", ".join(f"{path!r} ({len(module)} x {type(module[0]).__name__})" for path, module in stacks)
        raise AnatomyError(
            f"{type(model).__name__} has more than one list of blocks: {names}. Pass the path of one as `blocks`."
        )
    config = getattr(model, "config", None)
    if not stacks and config is None:
        names = ", ".join(repr(path) for path, _ in outer)
        raise AnatomyError(f"{type(model).__name__} is a plain module with the lists {names}. Pass one as `blocks`.")
    counts = [getattr(config, name, None) for name in internals.COUNTS]
    counted = [(path, module) for path, module in outer if len(module) in counts]  # not convolutions before the blocks
    return max(stacks or counted or outer, key=lambda stack: sum(p.numel() for p in stack[1].parameters()))[0]


def text_stack(model: nn.Module) -> str | None:
    """Return the path of the language model inside one that also reads images or audio, or ``None``."""
    inner = internals.text_config(getattr(model, "config", None))
    if inner is None or media_parts(model):
        return None
    for path, module in model.named_modules():
        if path and internals.is_pretrained(module) and module.config is inner:
            return str(path)
    return None


def _empty_list(model: nn.Module) -> str:
    """Return the path of the block list of a model that was cut before its first block."""
    empty = [path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and not len(module)]
    if len(empty) == 1 and getattr(getattr(model, "config", None), "num_hidden_layers", None) == 0:
        return str(empty[0])
    raise AnatomyError(
        f"{type(model).__name__} has no list of like blocks, so it has no layers to choose from. "
        "Pass the path of its blocks (an `nn.ModuleList` or `nn.Sequential`) as `blocks`."
    )


def _check_list_path(model: nn.Module, path: str) -> str:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    if path not in lists:
        raise AnatomyError(
            f"`blocks` must be the path of an `nn.ModuleList` or `nn.Sequential` in {type(model).__name__}, but got "
            f"{path!r}. Its lists are: {', '.join(map(repr, lists)) or 'none'}."
        )
    return path


def _ancestors(path: str) -> Iterator[str]:
    """Yield the paths above ``path``, nearest first, down to ``""``."""
    while path:
        path = path.rpartition(".")[0]
        yield path


def _owner(model: nn.Module, path: str) -> tuple[str, Any]:
    """Return the path and config of the outermost Hugging Face model above the blocks."""
    owner: tuple[str, Any] = ("", None)
    for parent in _ancestors(path):
        module = model.get_submodule(parent)
        if internals.is_pretrained(module):
            owner = (parent, module.config)
    return owner


def _embeddings(model: nn.Module) -> str | None:
    """Return the path of the input embeddings."""
    embeddings = internals.input_embeddings(model)
    if embeddings is None:
        names = ("embeddings", "feature_projection")  # the latter in audio models
        embeddings = next((module for name, module in model.named_modules() if name.endswith(names)), None)
    return next((name for name, module in model.named_modules() if module is embeddings), None)


# --- the modules after the last block -------------------------------------------------------------------------------


def _opt_final(config: Any) -> tuple[str, ...]:
    normed = bool(config.do_layer_norm_before) and not internals.opt_lacks_final_norm(config)
    projected = bool(config.word_embed_proj_dim != config.hidden_size)
    return ("decoder.final_layer_norm",) * normed + ("decoder.project_out",) * projected


def _speech_final(config: Any) -> tuple[str, ...]:
    # Without `do_stable_layer_norm`, the same norm precedes the blocks.
    return ("encoder.layer_norm",) if config.do_stable_layer_norm else ()


_FINAL: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "opt": _opt_final,
    "clip_vision_model": lambda _: (),  # `post_layernorm` is applied to the pooled token only
    "deberta-v2": lambda _: (),  # `encoder.LayerNorm` is for the relative positions
    "wav2vec2": _speech_final,
    "hubert": _speech_final,
    "wavlm": _speech_final,
}


def _final_norm(model: nn.Module, blocks: str) -> tuple[str, ...]:
    """Return the norm beside the block list, or beside the nearest module above it that has one: the last of several.

    This is a guess from names; verification of a loaded model finds the modules by what they do.
    """
    for parent in _ancestors(blocks):
        norms = [
            name
            for name, child in model.get_submodule(parent).named_children()
            if re.search(r"Norm(\dP)?$", type(child).__name__)
            and not name.startswith("pre_")
            and not list(child.children())
        ]
        if norms:
            return (f"{parent}.{norms[-1]}".lstrip("."),)
    return ()


# --- padding ---------------------------------------------------------------------------------------------------------


def suffers_from_padding(model: nn.Module) -> bool:
    """Return whether padding changes the states of the real tokens despite the mask.

    Such inputs run in unpadded batches of one length. Examples: the base models of Wav2Vec2, HuBERT and WavLM normalize
    each channel over time, padding included, and were trained without a mask; dynamic rotary embeddings depend on the
    longest text of a batch; sparse attention (DeepSeek V3.2) breaks ties by the number of keys; FNet and Nystromformer
    mix all tokens. For most models, construction of the encoder detects it (:func:`mark_padding`).
    """
    if getattr(model, _SENSITIVE, False):
        return True
    config: Any = getattr(model, "config", None)
    if getattr(config, "feat_extract_norm", None) == "group" or getattr(config, "index_topk", None):
        return True
    rope = getattr(config, "rope_parameters", None)
    settings = [rope, *rope.values()] if isinstance(rope, dict) else []
    return any(
        rope.get("rope_type") == "dynamic" or rope.get("short_factor") != rope.get("long_factor")
        for rope in settings
        if isinstance(rope, dict)
    )


def mark_padding(model: nn.Module) -> None:
    """Record that padding changes the states of a model."""
    setattr(model, _SENSITIVE, True)


def prefix_counts(names: Iterable[str], fits: Callable[[str], bool]) -> Counter[str]:
    """Count the prefixes of dotted names after which the rest of the name fits."""
    counts: Counter[str] = Counter()
    for name in names:
        steps = name.split(".")
        counts.update(".".join(steps[:n]) for n in range(len(steps)) if fits(".".join(steps[n:])))
    return counts
