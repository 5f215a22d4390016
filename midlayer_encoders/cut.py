"""A model, and its config, without the blocks after a layer. The weights after it are never read.

The cut is planned and checked on the meta device, from the config alone: the kept blocks must be the same modules, of
the same shapes and settings, as in the whole model. A family in which they are not is refused.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from midlayer_encoders._types import Layer, Norm
from midlayer_encoders.anatomy import Anatomy, block_sites, find_anatomy, resolve_layer
from midlayer_encoders.errors import CutError, MidlayerError, ModelNotFoundError, OptionError
from midlayer_encoders.source import load_config, local_only

__all__ = ["Cut", "cut_config", "cut_model", "load_cut", "plan_cut"]

# Names by which configs count blocks, and by which they list something for each block.
_COUNTS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers")
_PER_LAYER = re.compile(r"layer|block")
# Settings of a backbone's outputs, one for each block: transformers makes them anew when they are absent.
_STAGES = ("out_features", "out_indices", "stage_names", "_out_features", "_out_indices")
# Families that record each block's output, not its input: the embeddings have no entry.
_OUTPUTS_RECORDED = {"mamba", "mamba2", "falcon_mamba"}
# Families that cannot be made, or run, without any block.
_NEVER_EMPTY = {"deberta", "deberta-v2", "modernbert"}
# The modules that hold an encoder of their own where the whole model also has a decoder.
_ENCODERS = {
    "t5": "T5EncoderModel",
    "mt5": "MT5EncoderModel",
    "umt5": "UMT5EncoderModel",
    "whisper": "models.whisper.modeling_whisper.WhisperEncoder",
}


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
    for name in _STAGES:
        fields.pop(name, None)
    made = type(config).from_dict(fields)
    made._name_or_path = getattr(config, "_name_or_path", "")
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
        for name in (*_COUNTS, *(key for key in made.to_dict() if _PER_LAYER.search(key)), *_STAGES):
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


def load_cut(
    model: str,
    layer: Layer,
    *,
    norm: Norm = "final",
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    adapters: Sequence[str] = (),
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    device_map: str | None = None,
) -> tuple[nn.Module, Cut]:
    """Return the model cut at ``layer``, in eval mode, and how its states are read.

    Args:
        model: folder or name on the hub.
        layer: see :func:`~midlayer_encoders.anatomy.resolve_layer`.
        norm: ``"final"`` or ``"none"``.
        revision: branch, tag or commit on the hub.
        dtype: of the weights; ``None`` keeps that of the files.
        adapters: PEFT adapters merged in order before the cut. The whole model is read for them.
        gguf_file: name of a GGUF file in ``model`` to read the weights from.
        trust_remote_code: whether the model's own code on the hub may run.
        device_map: ``"auto"`` spreads a model that is too large for one device, by accelerate.
    """
    _check_gguf(model, gguf_file)
    local = local_only(model, revision, filename=gguf_file or "config.json")
    source: dict[str, Any] = {"revision": revision, "local_files_only": local, "trust_remote_code": trust_remote_code}
    if gguf_file is not None:
        source["gguf_file"] = gguf_file
    extra = {key: value for key, value in source.items() if key not in ("revision", "local_files_only")}
    config = load_config(model, revision, local=local, **extra)
    whole = _empty(config, trust_remote_code)
    anatomy = find_anatomy(whole)
    resolved = resolve_layer(layer, anatomy.num_layers, name=model)
    cut = plan_cut(anatomy, resolved, norm, model_type=getattr(config, "model_type", ""))
    keep = min(cut.keep, anatomy.num_layers)
    small = _checked(whole, config, anatomy, keep, trust_remote_code)
    source["dtype"] = dtype if dtype is not None else "auto"
    source["device_map"] = device_map
    if adapters:
        loaded = merge_adapters(_read(type(whole), model, config, (), source), adapters)
    else:
        dropped = _dropped(anatomy, keep)
        loaded = _read(type(whole), model, small.config, dropped, source)
    # What is left of the cut after the load: blocks that adapters needed, one to add, one to silence.
    rest = Cut(_after(anatomy, loaded), cut.layer, cut.norm, cut.keep, cut.output, cut.silent)
    return cut_model(loaded, rest).eval(), cut


def merge_adapters(model: nn.Module, adapters: Sequence[str]) -> nn.Module:
    """Return ``model`` with PEFT adapters merged into its weights, in order."""
    try:
        from peft import PeftModel
    except ImportError as reason:
        raise MidlayerError("`adapters` need the peft package: pip install 'midlayer-encoders[adapters]'.") from reason
    for adapter in adapters:
        local_only(adapter, filename="adapter_config.json")
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model


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

    made_for = _ENCODERS.get(getattr(config, "model_type", ""))
    with torch.device("meta"):
        if made_for is not None:
            return _attribute(transformers, made_for)(config)
        if getattr(config, "is_encoder_decoder", False):
            raise CutError(
                f"{type(config).__name__} is an encoder and a decoder, and which layer comes after which is not "
                f"defined. Pass the encoder alone; known by themselves: {', '.join(_ENCODERS)}."
            )
        return transformers.AutoModel.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)


def _attribute(package: Any, path: str) -> Any:
    for name in path.split("."):
        package = getattr(package, name)
    return package


def _checked(whole: Any, config: Any, anatomy: Anatomy, keep: int, trust_remote_code: bool) -> Any:
    """Return the cut model without weights, or raise unless its blocks are those of the whole model."""
    name = type(whole).__name__
    try:
        small = _empty(cut_config(config, anatomy.num_layers, keep), trust_remote_code)
    except MidlayerError:
        raise
    except Exception as reason:  # a config that fewer blocks make invalid fails in its own way
        raise CutError(f"{name} cannot be made with {keep} of its {anatomy.num_layers} blocks: {reason}") from reason
    dropped = [re.compile(pattern) for pattern in _dropped(anatomy, keep)]
    wanted = {key: value.shape for key, value in whole.state_dict().items() if not any(p.match(key) for p in dropped)}
    if {key: value.shape for key, value in small.state_dict().items()} != wanted:
        raise CutError(
            f"{name} with {keep} blocks is not {name} without the last {anatomy.num_layers - keep}: other parameters "
            "come or go with its depth. A layer of it cannot be had by cutting."
        )
    if anatomy.shared and anatomy.num_blocks > 1 and keep != anatomy.num_layers:
        raise CutError(
            f"{name} shares {anatomy.num_blocks} groups over its layers by depth: a cut would reshuffle them."
        )
    for layer in range(1, keep + 1 if not anatomy.shared else 1):
        path = f"{anatomy.blocks}.{layer - 1}"
        if (changed := _difference(whole.get_submodule(path), small.get_submodule(path))) is not None:
            raise CutError(
                f"Block {layer} of {name} is set otherwise in a cut model: {changed}. "
                "A layer of it cannot be had by cutting."
            )
    return small


def _difference(left: nn.Module, right: nn.Module) -> str | None:
    """Return the first setting in which two blocks differ, in words; dropout aside, which acts in training only."""
    for (path, a), (_, b) in zip(left.named_modules(), right.named_modules(), strict=True):
        for name, value in vars(a).items():
            if name.startswith("_") or "drop" in name or not isinstance(value, int | float | str | bool | None):
                continue
            if "drop" not in path and vars(b).get(name) != value:
                return f"`{path}.{name}` is {vars(b).get(name)!r} instead of {value!r}".replace("`.", "`")
    return None


def _dropped(anatomy: Anatomy, keep: int) -> list[str]:
    """Return patterns of the parameter names that the cut leaves out, and of no others."""
    if anatomy.shared:
        return []
    return [rf"^{re.escape(anatomy.blocks)}\.{index}\." for index in range(keep, anatomy.num_blocks)]


def _after(anatomy: Anatomy, model: nn.Module) -> Anatomy:
    """Return the anatomy of a model that was loaded with fewer blocks."""
    if anatomy.shared:
        return Anatomy(anatomy.blocks, model.config.num_hidden_layers, anatomy.final, anatomy.embeddings, 1)  # type: ignore[union-attr, arg-type]
    size = len(model.get_submodule(anatomy.blocks))  # type: ignore[arg-type]
    return Anatomy(anatomy.blocks, size, anatomy.final, anatomy.embeddings, size)


def _read(kind: Any, model: str, config: Any, dropped: Sequence[str], source: dict[str, Any]) -> Any:
    """Read the weights of ``config``'s blocks; those of the dropped ones are expected in the files and passed over."""
    if source["dtype"] not in ("auto", None) and not source["dtype"].is_floating_point:
        raise OptionError(f"`dtype` must be a floating point type, but got {source['dtype']}.")
    with _expected(kind, dropped):
        return kind.from_pretrained(model, config=config, **{k: v for k, v in source.items() if v is not None})


@contextmanager
def _expected(kind: Any, patterns: Sequence[str]) -> Iterator[None]:
    """Keep the load report from listing the dropped blocks, and nothing else."""
    before = kind._keys_to_ignore_on_load_unexpected
    # Checkpoints of a language model hold the same blocks below a prefix.
    loose = [pattern.replace("^", r"(^|\.)", 1) for pattern in patterns]
    kind._keys_to_ignore_on_load_unexpected = [*(before or ()), *loose]
    try:
        yield
    finally:
        kind._keys_to_ignore_on_load_unexpected = before
