"""A model read from disk or the hub with the blocks up to a layer; the weights after it are never read.

The cut is planned on the meta device, from the config alone. The kept blocks must be the same modules, of the same
shapes and settings, as in the whole model; a family in which they are not is refused.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from midlayer_encoders._types import Layer, Norm
from midlayer_encoders.errors import CutError, LayerIndexError, MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.adapters import merge_adapters
from midlayer_encoders.models.anatomy import Anatomy, deepest_layer, find_anatomy, resolve_layer, text_stack
from midlayer_encoders.models.cut import Cut, JointCut, cut_config, cut_model, plan_cut, plan_cuts
from midlayer_encoders.models.hub import load_config, local_only, weight_names
from midlayer_encoders.models.towers import TOWERS, check_tower, find_towers, tower_layers

__all__ = ["NoPlanError", "has_automatic_class", "load_cut"]

# What makes no state of a layer, so files may lack it: those of a masked language model have no pooler. A joint model's
# vectors pass through its poolers and heads.
_UNREAD = re.compile(r"(^|\.)(pooler|head|contact_head|mask_token|masked_spec_embed|post_layernorm)(\.|$)")
_UNREAD_JOINT = re.compile(r"(^|\.)logit_(scale|bias)$")
_NAMED = 10  # missing weights that an error names


def load_cut(
    model: str,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer],
    *,
    norm: Norm = "final",
    tower: str | None = None,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    adapters: Sequence[str] = (),
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
    plan: int = 0,
    spare: bool = False,
) -> tuple[nn.Module, Cut | JointCut]:
    """Return the model cut at ``layer``, in eval mode, and how its states are read.

    Args:
        model: folder or name on the hub.
        layer: see :func:`~midlayer_encoders.models.anatomy.resolve_layer`; the deepest of several; of a joint model one
            for both towers, or one for each by name: ``{"text": 6, "image": 9}``.
        norm: ``"final"`` or ``"none"``.
        tower: ``"text"`` or ``"image"`` reads that tower of a joint model alone.
        revision: branch, tag or commit on the hub.
        dtype: of the weights; ``None`` keeps that of the files.
        adapters: PEFT adapters merged in order before the cut. The whole model is read for them.
        gguf_file: name of a GGUF file in ``model`` to read the weights from.
        trust_remote_code: whether the model's own code on the hub may run.
        device_map: ``"auto"`` spreads a model that is too large for one device, by accelerate.
        plan: which of the ways to have the layer, see :func:`~midlayer_encoders.models.cut.plan_cuts`.
        spare: whether to leave the model as it is read, with at least one block and none added or silenced, so that its
            blocks can be watched; :func:`~midlayer_encoders.models.cut.cut_model` then finishes the cut.

    Raises:
        NoPlanError: when there is no such way.

    Returns:
        The model, and a :class:`~midlayer_encoders.models.cut.Cut`, or a
        :class:`~midlayer_encoders.models.cut.JointCut` where a joint model keeps both towers.
    """
    _check_gguf(model, gguf_file)
    local = local_only(model, revision, filename=gguf_file or "config.json")
    extra: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        extra["gguf_file"] = gguf_file
    config = _caching_nothing(load_config(model, revision, local=local, **extra))
    source = {"revision": revision, "local_files_only": local, "device_map": device_map, **extra}
    source["dtype"] = dtype if dtype is not None else "auto"
    with internals.LOADING:
        whole = _empty(config, trust_remote_code)
        towers = find_towers(whole)
        if tower is None and towers:
            if plan:
                raise NoPlanError
            return _load_joint(model, whole, layer, norm, towers, adapters, source)
        if tower is not None:
            check_tower(tower, towers, model)
        encoder = internals.encoder_part(config) if tower is None else None
        part = towers[tower] if tower is not None else None if encoder is not None else text_stack(whole)
        if part is not None:
            whole = _tower(whole, part)
        path = encoder.path if encoder is not None else part
        try:
            loaded, cut = _load_single(model, whole, layer, norm, path, adapters, source, plan=plan, spare=spare)
        except ModelNotFoundError:
            if part is None or adapters:
                raise
            # transformers converts some names and weights for the whole model only: it is read whole.
            loaded, cut = _load_part(model, type(whole), layer, norm, part, source, plan=plan, spare=spare)
        return loaded, replace(cut, language=tower is None and part is not None)


class NoPlanError(Exception):
    """No way is left in which a layer could be had."""


def _caching_nothing(config: Any) -> Any:
    """Have a config, and those inside it, keep no keys and values of a pass, and return it.

    No vector is made of them; and a hybrid that is cut before its first attention block cannot ask its cache how long
    the text is.
    """
    for one in (config, *vars(config).values()):
        if getattr(one, "use_cache", None) is True:
            one.use_cache = False
    return config


def _load_single(
    model: str,
    whole: Any,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer],
    norm: Norm,
    part: str | None,
    adapters: Sequence[str],
    source: dict[str, Any],
    *,
    plan: int = 0,
    spare: bool = False,
) -> tuple[nn.Module, Cut]:
    """Read a model of one tower, or a part of the model whose files these are, cut at a layer."""
    if isinstance(layer, Mapping):
        raise LayerIndexError(f"`layer` must be one number for {model}, which has one tower, but got {dict(layer)}.")
    cut = _planned(whole, model, layer, norm, plan)
    anatomy = cut.anatomy
    names = weight_names(model, source["revision"], local=source["local_files_only"]) if part else []
    prefix = _prefix_in_files(names, whole, part or "")
    if renamed := _shared_embeddings(names, whole, prefix):
        source = {**source, "key_mapping": renamed}
    # The files hold the other tower, or the decoder, too.
    dropped = [rf"^(?!{re.escape(prefix)}\.)"] if prefix else []
    config = whole.config
    if getattr(config, "model_type", "") == internals.TIMM:
        dropped.append(r"^timm_model\.head\.")  # the classifier of a model that is read without one
    keep = min(max(cut.keep, int(spare)), anatomy.num_layers)
    if cut.keep != keep:  # the depth of the folder that an export writes
        config_of_export = cut_config(config, anatomy.num_layers, cut.keep)
        _check(whole, config_of_export, [(anatomy, cut.keep)], source["trust_remote_code"])
    kept = anatomy.num_layers if adapters else keep
    if kept < anatomy.num_layers:
        config = cut_config(config, anatomy.num_layers, kept)
    dropped += _dropped(anatomy, kept)
    try:
        read = _read(type(whole), model, config, source, final=anatomy.final, dropped=dropped, prefix=prefix)
    except MidlayerError:  # is it the depth that the model cannot have?
        _check(whole, config, [(anatomy, kept)], source["trust_remote_code"])
        raise
    if kept < anatomy.num_layers:
        _compare(whole, read, [(anatomy, kept)])
    loaded = merge_adapters(read, adapters) if adapters else read
    # What is left of the cut after the load: blocks that adapters needed, one to add, one to silence.
    if adapters:
        cut_model(loaded, replace(cut, anatomy=_after(anatomy, loaded), keep=keep, silent=False))
    if not spare:
        cut_model(loaded, replace(cut, anatomy=_after(anatomy, loaded)))
    return loaded.eval(), cut


def _planned(whole: Any, model: str, layer: Layer | Sequence[Layer], norm: Norm, plan: int) -> Cut:
    """Return the ``plan``-th way to have a layer, or raise where there is none."""
    anatomy = find_anatomy(whole)
    resolved = deepest_layer(layer, anatomy.num_layers, name=model)
    cuts = plan_cuts(anatomy, resolved, norm, config=whole.config)
    if plan >= len(cuts):
        raise NoPlanError
    return cuts[plan]


def _load_part(
    model: str, kind: Any, layer: Layer | Sequence[Layer] | Mapping[str, Layer], norm: Norm, part: str,
    source: dict[str, Any], *, plan: int, spare: bool,
) -> tuple[nn.Module, Cut]:  # fmt: skip
    """Read a whole model and keep its language model, or a tower, cut at a layer."""
    config = _caching_nothing(load_config(model, source["revision"], local=source["local_files_only"]))
    composite = _empty(config)
    read = _read(type(composite), model, config, source).get_submodule(part)
    loaded = read if isinstance(read, kind) else read.base_model
    if not isinstance(loaded, kind) or isinstance(layer, Mapping):
        raise CutError(
            f"The part {part!r} of {type(composite).__name__} is not a {kind.__name__}, which would read it."
        )
    cut = _planned(loaded, model, layer, norm, plan)
    anatomy = cut.anatomy
    keep = min(max(cut.keep, 1), anatomy.num_layers)
    _check(loaded, cut_config(loaded.config, anatomy.num_layers, keep), [(anatomy, keep)], False)
    cut_model(loaded, replace(cut, keep=keep, silent=False))
    if not spare:
        cut_model(loaded, replace(cut, anatomy=_after(anatomy, loaded)))
    return loaded.eval(), cut


def _prefix_in_files(names: Sequence[str], part: Any, path: str) -> str | None:
    """Return what precedes the names of a part's weights in the files of the whole model: most of them fit it.

    Another part may have weights of the same names, as a decoder has those of an encoder: a prefix that ends as the
    part's path does, or holds its own name, comes first.
    """
    if not names:
        return None
    wanted = set(part.state_dict())
    found: Counter[str] = Counter()
    for name in names:
        steps = name.split(".")
        found.update(".".join(steps[:n]) for n in range(len(steps)) if ".".join(steps[n:]) in wanted)
    own = path.rpartition(".")[2]
    return max(
        found,
        key=lambda prefix: (f".{prefix}".endswith(f".{path}"), own in prefix.split("."), found[prefix]),
        default=None,
    )


def _shared_embeddings(names: Sequence[str], part: Any, prefix: str | None) -> dict[str, str]:
    """Return what renames the embeddings that encoder and decoder share, and the files hold once, for the encoder."""
    own = f"{prefix}.embed_tokens.weight"
    shared = [name for name in names if re.search(r"(^|\.)shared\.weight$", name)]
    if not prefix or own in names or not shared or "embed_tokens.weight" not in part.state_dict():
        return {}
    return {f"^{re.escape(shared[0])}$": own}


def _load_joint(
    model: str,
    whole: Any,
    layer: Layer | Sequence[Layer] | Mapping[str, Layer],
    norm: Norm,
    towers: Mapping[str, str],
    adapters: Sequence[str],
    source: dict[str, Any],
) -> tuple[nn.Module, JointCut]:
    """Read a joint model with both towers cut; what pools and projects their states stays as it is."""
    if norm != "final" or adapters:
        raise OptionError(
            f"`norm` must be 'final' and `adapters` empty for {model}, whose two towers meet after their heads, "
            f"but got {norm!r} and {list(adapters)}. Pass `tower` to read one of {', '.join(towers)} by itself."
        )
    cuts: dict[str, Cut] = {}
    small = copy.deepcopy(whole.config)
    for name, wanted in tower_layers(layer, towers, model).items():
        path = towers[name]
        inner = find_anatomy(whole.get_submodule(path)).below(path)
        resolved = resolve_layer(wanted, inner.num_layers, name=f"the {name} tower of {model}")
        cuts[name] = plan_cut(inner, resolved, norm)
        attribute = TOWERS[name].config
        setattr(small, attribute, cut_config(getattr(small, attribute), inner.num_layers, cuts[name].keep))
    kept = [(cut.anatomy, cut.keep) for cut in cuts.values()]
    _check(whole, small, kept, source["trust_remote_code"])
    dropped = [pattern for anatomy, keep in kept for pattern in _dropped(anatomy, keep)]
    return _read(type(whole), model, small, source, dropped=dropped, unread=_UNREAD_JOINT).eval(), JointCut(cuts)


def _tower(whole: Any, path: str) -> Any:
    """Return one tower of a joint model without weights, in the class that loads it by itself."""
    part = whole.get_submodule(path)
    if has_automatic_class(part.config):
        return _empty(part.config)
    with internals.without_weights():
        return type(part)(part.config)


def has_automatic_class(config: Any) -> bool:
    """Return whether transformers finds the model of a config by itself; SigLIP's tower of text has no entry."""
    from transformers import MODEL_MAPPING

    return type(config) in MODEL_MAPPING or not type(config).__module__.startswith("transformers.")


def _check_gguf(model: str, gguf_file: str | None) -> None:
    if gguf_file is None:
        return
    if Path(model).is_dir() and not (Path(model) / gguf_file).is_file():
        found = sorted(path.name for path in Path(model).glob("*.gguf"))
        raise ModelNotFoundError(
            f"`gguf_file` must be a file in {model!r}, but there is no {gguf_file!r}. It has: {found or 'none'}."
        )
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
    except ImportError as reason:
        raise MidlayerError("`gguf_file` needs gguf and accelerate: pip install 'midlayer-encoders[demo]'.") from reason


def _empty(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the model of ``config`` on the meta device: its modules without weights."""
    import transformers

    encoder = internals.encoder_part(config)
    with internals.without_weights():
        if encoder is not None:
            try:
                return encoder.kind(copy.deepcopy(encoder.config))
            except (TypeError, AttributeError, ValueError) as reason:
                raise CutError(f"The encoder of {type(config).__name__} cannot be made by itself: {reason}") from reason
        if getattr(config, "is_encoder_decoder", False):
            raise CutError(
                f"{type(config).__name__} is of an encoder and a decoder, and its encoder is not a model by itself, so "
                "its layers cannot be read. Pass a model of an encoder alone."
            )
        return transformers.AutoModel.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def _check(whole: Any, config: Any, kept: Sequence[tuple[Anatomy, int]], trust_remote_code: bool) -> None:
    """Raise unless the model of the cut ``config`` is the whole model without the blocks that are not kept."""
    try:
        small = _empty_like(whole, config, trust_remote_code)
    except MidlayerError:
        raise
    except Exception as reason:  # a config that fewer blocks make invalid fails in its own way
        raise CutError(f"{type(whole).__name__} cannot be made with {_told(kept)} blocks: {reason}") from reason
    _compare(whole, small, kept)


def _compare(whole: Any, small: Any, kept: Sequence[tuple[Anatomy, int]]) -> None:
    """Raise unless a cut model is the whole model without the blocks that are not kept."""
    name = type(whole).__name__
    told = _told(kept)
    dropped = [pattern for anatomy, keep in kept for pattern in _dropped(anatomy, keep)]
    added = [pattern for anatomy, keep in kept for pattern in _added(anatomy, keep)]
    wanted, made = _shapes(whole, dropped), _shapes(small, added)
    if {key for key in {*wanted, *made} if wanted.get(key) != made.get(key) and not _UNREAD.search(key)}:
        raise CutError(
            f"{name} with {told} blocks is not {name} without the others: other parameters come or go with its depth. "
            "A layer of it cannot be had by cutting."
        )
    for anatomy, keep in kept:
        _check_blocks(whole, small, anatomy, keep)


def _shapes(model: nn.Module, left_out: Sequence[str]) -> dict[str, torch.Size]:
    """Return the shape of every weight of a model, but those whose names fit a pattern."""
    pattern = re.compile("|".join(left_out) or r"(?!)")
    return {name: value.shape for name, value in model.state_dict().items() if not pattern.match(name)}


def _told(kept: Sequence[tuple[Anatomy, int]]) -> str:
    return " and ".join(f"{keep} of its {anatomy.num_layers}" for anatomy, keep in kept)


def _check_blocks(whole: Any, small: Any, anatomy: Anatomy, keep: int) -> None:
    name = type(whole).__name__
    if anatomy.shared and anatomy.num_blocks > 1 and keep != anatomy.num_layers:
        raise CutError(
            f"{name} shares {anatomy.num_blocks} groups over its layers by depth: a cut would reshuffle them."
        )
    for layer in range(1, min(keep, anatomy.num_blocks) + 1 if not anatomy.shared else 1):
        path = f"{anatomy.blocks}.{layer - 1}"
        if (changed := _difference(whole.get_submodule(path), small.get_submodule(path))) is not None:
            raise CutError(
                f"Block {layer} of {name} is set otherwise in a cut model: {changed}. "
                "A layer of it cannot be had by cutting."
            )


def _empty_like(whole: Any, config: Any, trust_remote_code: bool) -> Any:
    """Return a model of ``whole``'s class, and another config, on the meta device."""
    if type(whole).__module__.startswith("transformers."):
        with internals.without_weights():
            return type(whole)(copy.deepcopy(config))
    return _empty(config, trust_remote_code)


def _difference(left: nn.Module, right: nn.Module) -> str | None:
    """Return the first setting in which two blocks differ, in words; dropout aside, which acts in training only."""
    ours, theirs = dict(left.named_modules()), dict(right.named_modules())
    for path in [*ours, *(path for path in theirs if path not in ours)]:
        kinds = [type(parts[path]).__name__ if path in parts else "none" for parts in (ours, theirs)]
        if kinds[0] != kinds[1] and "drop" not in path:
            return f"`{path}` is {kinds[1]} instead of {kinds[0]}"
    for path, a in ours.items():
        for name, value in vars(a).items():
            if name.startswith("_") or name == "training" or "drop" in name or not _plain(value):
                continue
            if "drop" not in path and not _alike(vars(theirs[path]).get(name), value):
                return f"`{path}.{name}` is {vars(theirs[path]).get(name)!r} instead of {value!r}".replace("`.", "`")
    return None


def _alike(cut: Any, whole: Any) -> bool:
    """Return whether a setting is the same in a cut model, or a list for each block that was cut to match."""
    if isinstance(cut, list | tuple) and isinstance(whole, list | tuple) and len(whole) > 2:
        shared = min(len(cut), len(whole))
        return list(cut[:shared]) == list(whole[:shared])
    return bool(cut == whole)


def _plain(value: Any) -> bool:
    """Return whether a value is a number, a word, nothing, or some of these in a row."""
    if isinstance(value, list | tuple):
        return all(_plain(item) for item in value)
    return isinstance(value, int | float | str | bool | None)


def _dropped(anatomy: Anatomy, keep: int) -> list[str]:
    """Return patterns of the parameter names that the cut leaves out, and of no others."""
    if anatomy.shared:
        return []
    return [rf"^{re.escape(anatomy.blocks)}\.{index}\." for index in range(keep, anatomy.num_blocks)]


def _added(anatomy: Anatomy, keep: int) -> list[str]:
    """Return patterns of the parameter names that a cut has beyond the whole model's: a block that is never read."""
    return [rf"^{re.escape(anatomy.blocks)}\.{index}\." for index in range(anatomy.num_blocks, keep)]


def _after(anatomy: Anatomy, model: nn.Module) -> Anatomy:
    """Return the anatomy of a model that was loaded with fewer blocks."""
    if anatomy.shared:
        return replace(anatomy, num_layers=model.config.num_hidden_layers, num_blocks=1)  # type: ignore[union-attr, arg-type]
    size = len(model.get_submodule(anatomy.blocks))  # type: ignore[arg-type]
    return replace(anatomy, num_layers=size, num_blocks=size)


def _read(
    kind: Any,
    model: str,
    config: Any,
    source: dict[str, Any],
    *,
    final: Sequence[str] = (),
    dropped: Sequence[str] = (),
    prefix: str | None = None,
    unread: re.Pattern[str] = _UNREAD,
) -> Any:
    """Read the weights of ``config``'s model; those of the dropped blocks are expected in the files and passed over.

    Raises:
        ModelNotFoundError: when the files cannot be read, or lack a weight that the states pass through, which would
            be left to chance.
    """
    if source["dtype"] not in ("auto", None) and not source["dtype"].is_floating_point:
        raise OptionError(f"`dtype` must be a floating point type, but got {source['dtype']}.")
    options = {key: value for key, value in source.items() if value is not None}
    # Checkpoints of a language model hold the same blocks below a prefix.
    loose = [pattern.replace("^", r"(^|\.)", 1) for pattern in dropped if "(?!" not in pattern]
    try:
        loaded, told = internals.read_weights(
            kind, model, unexpected=[*loose, *dropped], prefix=prefix, config=config, ignore_mismatched_sizes=True,
            **options,
        )  # fmt: skip
    except (OSError, SafetensorError) as reason:
        raise ModelNotFoundError(f"The weights of {model!r} cannot be read: {reason}") from reason
    except (
        ArithmeticError,
        LookupError,
        AttributeError,
        ValueError,
        TypeError,
    ) as reason:  # a depth it is not made for
        raise CutError(f"{kind.__name__} cannot be read with this number of blocks: {reason!r}") from reason
    after = tuple(f"{path}." for path in final)  # a norm that another family applies to its pooled token only
    lacking = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    missing = sorted(key for key in lacking if key.startswith(after) or not unread.search(key))
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ModelNotFoundError(
            f"The files of {model!r} must hold every weight of {kind.__name__}, but lack {len(missing)}: "
            f"{', '.join(missing[:_NAMED])}{more}. They may be of another model, or damaged."
        )
    return loaded
