"""Load a model with only the blocks up to a layer; the weights after it are never read.

The cut is planned on the meta device from the config alone. The blocks of the cut model must have the same modules,
shapes and settings as in the complete model; other families are refused.
"""

import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from midlayer_encoders import errors
from midlayer_encoders._types import LayerArgument, Norm
from midlayer_encoders.errors import CutError, LayerIndexError, MidlayerError, ModelNotFoundError
from midlayer_encoders.files import expand_home
from midlayer_encoders.models import anatomy as anatomies
from midlayer_encoders.models import transformers_internals as internals
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, prefix_counts
from midlayer_encoders.models.cut import Cut, cut_config, cut_model, plan_cut
from midlayer_encoders.models.hub import Location, access_options, load_config, local_only, read_index, weight_files

# Weights that do not affect the states of a layer, so files may lack them: a masked language model has no pooler.
_UNREAD = re.compile(r"(^|\.)(pooler|head|contact_head|mask_token|masked_spec_embed|post_layernorm)(\.|$)")
_MAX_BLOCKS = 4096
_MAX_PER_BYTE = 8  # parameters in a byte of quantized weights
_UNSAVED = 10**7  # parameters that files may lack, such as a pooler's
_MAX_NAMED = 10  # missing weights that an error names


def open_model(
    location: Location,
    *,
    adapters: Sequence[str] = (),
    trust_remote_code: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    config_kwargs: Mapping[str, Any] | None = None,
) -> "ModelFiles":
    """Return the files of a model, of which no weights are read yet.

    Args:
        location: of the model.
        adapters: PEFT adapters to merge, in order, before the cut; this loads the complete model.
        trust_remote_code: whether to run the model's code from the hub.
        model_kwargs: of ``from_pretrained``: ``dtype``, by default the files', ``attn_implementation``,
            ``device_map`` (``"auto"`` spreads a model over GPUs with accelerate), …; or ``quantization``, which
            becomes a ``quantization_config``.
        config_kwargs: of ``AutoConfig.from_pretrained``, which replace settings of the config.
    """
    model, revision = location.folder, location.revision
    local = local_only(model, revision)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    config = _check_config(load_config(model, revision, local=local, **options, **(config_kwargs or {})), model)
    options |= {"revision": revision, **access_options(local=local), "dtype": "auto", **(model_kwargs or {})}
    if (quantization := options.pop("quantization", None)) is not None:
        from midlayer_encoders.extras.quantization import quantized_options

        options |= quantized_options(quantization, options, config)
    try:
        with internals.LOADING:
            complete = _empty(config, trust_remote_code)
    except (MidlayerError, ImportError):
        raise
    except Exception as reason:  # invalid configs fail in their own ways
        cure = "Correct its code or config.json" if trust_remote_code else "Correct its config.json"
        raise ModelNotFoundError(
            f"{model!r} cannot be built: {errors.error_summary(reason)}. {cure}, or download it again."
        ) from reason
    _check_files(complete, model)
    return ModelFiles(location, config, complete, options, adapters)


def _check_config(config: Any, model: str) -> Any:
    """Return a config without key-value caches; raise if a setting counts more blocks than a model has.

    Building millions of blocks would take hours. A hybrid that is cut before its first attention block cannot get the
    text's length from its cache.
    """
    for part in (config, *vars(config).values()):
        if getattr(part, "use_cache", None) is True:
            part.use_cache = False
        for name in internals.COUNTS:
            if isinstance(count := getattr(part, name, None), int) and not 0 <= count <= _MAX_BLOCKS:
                raise ModelNotFoundError(
                    f"`{name}` in the config of {model!r} must be in [0, {_MAX_BLOCKS:,}], but is {count:,}. "
                    "Correct its config.json, or download it again."
                )
    return config


def _check_files(complete: nn.Module, model: str) -> None:
    """Raise if the index of a folder's weights is invalid, or its files are much too small for its config.

    transformers would read weights outside of the folder, and allocate the memory of weights that no file has.
    """
    folder = expand_home(model)
    for index in folder.glob("*.index*.json"):
        read_index(index)
    held = sum(path.stat().st_size for kind in ("safetensors", "bin") for path in folder.glob(f"*.{kind}"))
    count = sum(parameter.numel() for parameter in complete.parameters())
    if held and count > _MAX_PER_BYTE * held + _UNSAVED:
        raise ModelNotFoundError(
            f"The config of {model!r} describes {count:,} parameters, but its weights have {held:,} bytes. Correct its "
            "config.json, or download its files again."
        )


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Attributes:
        location: of the files.
        config: the config of the complete model.
        complete: the complete model without weights.
        options: of ``from_pretrained``.
        adapters: PEFT adapters to merge.
    """

    location: Location
    config: Any
    complete: Any
    options: Mapping[str, Any]
    adapters: Sequence[str]

    @property
    def model(self) -> str:
        """Folder or name on the hub."""
        return self.location.folder

    @property
    def tokenizer(self) -> str:
        """Folder or name of the tokenizer or processor."""
        return self.location.tokenizer or self.model

    def load_cut(
        self, layer: LayerArgument, norm: Norm = "final", *, part: str | None = None, whole: bool = False
    ) -> tuple[nn.Module, Cut]:
        """Return the model cut at ``layer``, in eval mode, and the cut.

        The model has at least one block (all blocks, if its code is not from transformers), and none was added or
        silenced, so that its blocks can be observed; :func:`~midlayer_encoders.models.cut.cut_model` completes the cut.

        Args:
            layer: see :func:`~midlayer_encoders.models.anatomy.resolve_layer`.
            norm: ``"final"`` or ``"none"``.
            part: path of the only part to load, in the complete model; by default the encoder of an encoder-decoder
                model, or the language model inside one that also reads images or audio.
            whole: whether to leave the model uncut; the cut is then only the plan of its hooks.
        """
        if isinstance(layer, Mapping):
            raise LayerIndexError(
                f"`layer` must be a number for {self.model}, which has one stack of blocks, but got {dict(layer)}."
            )
        encoder = internals.encoder_part(self.config) if part is None else None
        inner = part or (None if encoder is not None else anatomies.text_stack(self.complete))
        with internals.LOADING:
            complete = self.complete if inner is None else _empty_part(self.complete, inner)
            anatomy = find_anatomy(complete)
            resolved = anatomies.resolve_layer(layer, anatomy.num_layers, name=self.model)
            hooks = Cut(anatomy, resolved, norm, anatomy.num_layers, None)
            cut = hooks if whole else plan_cut(anatomy, resolved, norm, config=complete.config)
            loaded = self._load_stack(complete, cut, inner if encoder is None else encoder.path)
        return loaded, replace(cut, language=part is None and inner is not None)

    def _load_stack(self, complete: Any, cut: Cut, path: str | None) -> Any:
        """Load a model with one stack of blocks, or the part at ``path`` of a larger model."""
        anatomy = cut.anatomy
        options = dict(self.options)
        config = complete.config
        keep = min(max(cut.keep, 1), anatomy.num_layers)
        remote = internals.is_remote(complete)  # its cut is compared with the whole model
        loaded_blocks = anatomy.num_layers if self.adapters or remote else keep
        depths = {cut.keep, loaded_blocks} - {anatomy.num_layers}  # an export writes a folder of the first depth
        configs = {depth: cut_config(config, anatomy.num_layers, depth) for depth in depths}
        for depth, depth_config in configs.items():
            check_cut(complete, depth_config, [(anatomy, depth)], options["trust_remote_code"])
        config = configs.get(loaded_blocks, config)
        if self.location.read_weights is not None:
            options["state_dict"] = self.location.read_weights(complete, loaded_blocks)
        names = list(weight_files(self.model, options["revision"], local="local_files_only" in options) if path else ())
        prefix = _prefix_in_files(names, complete, path or "")
        if renamed := _shared_embeddings(names, complete, prefix):
            options["key_mapping"] = renamed
        try:
            loaded = read_weights(type(complete), self.model, config, options, final=anatomy.final, prefix=prefix)
        except ModelNotFoundError:
            if complete is self.complete or self.adapters:
                raise
            # transformers converts some names and weights for the complete model only.
            loaded, loaded_blocks = self._load_part_of_complete(type(complete), path or ""), anatomy.num_layers
        if self.adapters:
            from midlayer_encoders.extras.adapters import merge_adapters

            loaded = merge_adapters(loaded, self.adapters)
        if loaded_blocks > keep and not remote:
            cut_model(loaded, replace(cut, keep=keep, silent=False))
        return loaded.eval()

    def _load_part_of_complete(self, part_class: Any, path: str) -> Any:
        """Load the complete model and return the part at ``path``."""
        part = read_weights(type(self.complete), self.model, self.config, self.options).get_submodule(path)
        loaded = part if isinstance(part, part_class) else part.base_model
        if not isinstance(loaded, part_class):
            raise CutError(f"The part {path!r} of {type(self.complete).__name__} is not a {part_class.__name__}.")
        return loaded


def _prefix_in_files(names: Sequence[str], part: Any, path: str) -> str | None:
    """Return the prefix of a part's weights in the files of the complete model: the one that most of them fit.

    A decoder may have weights of the same names as an encoder, so prefixes that end like the part's path, or contain
    its name, take precedence.
    """
    if not names:
        return None
    counts = prefix_counts(names, set(part.state_dict()).__contains__)
    part_name = path.rpartition(".")[2]

    def rank(prefix: str) -> tuple[bool, bool, int]:
        return f".{prefix}".endswith(f".{path}"), part_name in prefix.split("."), counts[prefix]

    return max(counts, key=rank, default=None)


def _shared_embeddings(names: Sequence[str], part: Any, prefix: str | None) -> dict[str, str]:
    """Return a key mapping that gives an encoder the embeddings that it shares with its decoder."""
    key = f"{prefix}.embed_tokens.weight"
    shared = [name for name in names if re.search(r"(^|\.)shared\.weight$", name)]
    if not prefix or key in names or not shared or "embed_tokens.weight" not in part.state_dict():
        return {}
    return {f"^{re.escape(shared[0])}$": key}


def has_automatic_class(config: Any) -> bool:
    """Return whether ``AutoModel`` supports a config; SigLIP's text model, for one, has no entry."""
    from transformers import MODEL_MAPPING

    return type(config) in MODEL_MAPPING or not type(config).__module__.startswith("transformers.")


# --- models without weights, to compare with ------------------------------------------------------------------------


def _empty(config: Any, trust_remote_code: bool = False) -> Any:
    """Return the model of ``config`` on the meta device, without weights."""
    import transformers

    if (encoder := internals.encoder_part(config)) is not None:
        return internals.empty_model(encoder.kind, encoder.config)
    if getattr(config, "is_encoder_decoder", False):
        raise CutError(
            f"{type(config).__name__} has an encoder and a decoder, and its encoder is not a model on its own, so "
            "its layers cannot be read. Pass an encoder-only model."
        )
    internals.forget_remote_model(config)
    return internals.empty_model(transformers.AutoModel.from_config, config, trust_remote_code=trust_remote_code)


def _empty_part(complete: Any, path: str) -> Any:
    """Return a part of a model without weights, in the class that loads it on its own."""
    part = complete.get_submodule(path)
    if has_automatic_class(part.config):
        return _empty(part.config)
    return internals.empty_model(type(part), part.config)


def check_cut(complete: Any, config: Any, depths: Sequence[tuple[Anatomy, int]], trust_remote_code: bool) -> None:
    """Raise unless the model of the cut ``config`` is the complete model without the dropped blocks."""
    name = type(complete).__name__
    remote = internals.is_remote(complete)
    depth_text = " and ".join(f"{keep} of its {anatomy.num_layers}" for anatomy, keep in depths) + " blocks"
    try:
        cut = _empty(config, trust_remote_code) if remote else internals.empty_model(type(complete), config)
    except MidlayerError:
        raise
    except Exception as reason:  # invalid configs fail in their own ways
        raise CutError(f"{name} cannot be made with {depth_text}: {reason}") from reason
    dropped = [(anatomy, range(keep, anatomy.num_blocks)) for anatomy, keep in depths if not anatomy.shared]
    expected = _shapes(complete, dropped)
    # Without added blocks, which are never read.
    actual = _shapes(cut, [(anatomy, range(anatomy.num_blocks, keep)) for anatomy, keep in depths])
    if any(expected.get(key) != actual.get(key) and not _UNREAD.search(key) for key in {*expected, *actual}):
        raise CutError(
            f"{name} with {depth_text} is not {name} without the others: other parameters come or go with its depth. "
            "Its layers cannot be read by cutting."
        )
    for anatomy, keep in depths:
        if anatomy.shared and anatomy.num_blocks > 1 and keep != anatomy.num_layers:
            raise CutError(f"{name} shares {anatomy.num_blocks} groups over its layers: a cut would reshuffle them.")
        for block in () if anatomy.shared else range(min(keep, anatomy.num_blocks)):
            path = f"{anatomy.blocks}.{block}"
            before, after = (_settings(model.get_submodule(path)) for model in (complete, cut))
            if changed := [key for key in before | after if not _agree(after.get(key), before.get(key))]:
                difference = f"`{changed[0]}` is {after.get(changed[0])!r} instead of {before.get(changed[0])!r}"
                raise CutError(f"Block {block + 1} of {name} is set otherwise in a cut model: {difference}.")


def _shapes(model: nn.Module, ignored: Sequence[tuple[Anatomy, range]]) -> dict[str, torch.Size]:
    """Return the shape of every weight of a model outside the ignored blocks."""
    prefixes = tuple(f"{anatomy.blocks}.{block}." for anatomy, blocks in ignored for block in blocks)
    return {name: value.shape for name, value in model.state_dict().items() if not name.startswith(prefixes)}


def _settings(block: nn.Module) -> dict[str, Any]:
    """Return the class and the plain settings of each module of a block, except of dropout, which acts in training."""
    settings: dict[str, Any] = {}
    for path, module in block.named_modules():
        if "drop" not in path:
            settings[path] = type(module).__name__
            for name, value in vars(module).items():
                if not name.startswith("_") and name != "training" and "drop" not in name and _is_plain(value):
                    settings[f"{path}.{name}".lstrip(".")] = value
    return settings


def _agree(cut: Any, complete: Any) -> bool:
    """Return whether a setting is the same in a cut model, or a per-block list that was cut to match."""
    if isinstance(cut, list | tuple) and isinstance(complete, list | tuple) and len(complete) > 2:
        return list(cut[: len(complete)]) == list(complete[: len(cut)])
    return bool(cut == complete)


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a string, ``None``, or a sequence of them."""
    return (
        all(map(_is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | str | None)
    )


def keep_weights_unchanged(model: nn.Module) -> None:
    """Prevent a pass on a CPU from changing 4-bit weights.

    With AVX-512 BF16, bitsandbytes 0.50 reorders them and rounds their scales in place; a state dict restores them
    incorrectly.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def read_weights(
    model_class: Any,
    model: str,
    config: Any,
    options: Mapping[str, Any],
    *,
    final: Sequence[str] = (),
    prefix: str | None = None,
    unread: re.Pattern[str] = _UNREAD,
) -> Any:
    """Load the weights of ``config``'s model; the files may hold more, such as later blocks or another part.

    Raises:
        ModelNotFoundError: if the files cannot be read, or lack a weight that affects the states.
    """
    options = {key: value for key, value in options.items() if value is not None}
    options |= {"config": config, "ignore_mismatched_sizes": True}
    try:
        loaded, report = internals.read_weights(model_class, model, prefix=prefix, **options)
    except (OSError, SafetensorError, pickle.UnpicklingError) as reason:
        cause = reason if isinstance(reason, OSError) else errors.error_summary(reason)
        raise ModelNotFoundError(f"The weights of {model!r} cannot be read: {cause}") from reason
    except (ArithmeticError, LookupError, AttributeError, ValueError, TypeError) as reason:
        raise CutError(
            f"The weights of {model!r} cannot be loaded into {model_class.__name__}: {errors.error_summary(reason)}. "
            "They may be damaged, or not fit this number of blocks."
        ) from reason
    final_prefixes = tuple(f"{path}." for path in final)  # some families name a pooled token's norm alike
    lacking = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    if missing := sorted(key for key in lacking if key.startswith(final_prefixes) or not unread.search(key)):
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ModelNotFoundError(
            f"The files of {model!r} must hold every weight of {model_class.__name__}, but lack {len(missing)}: "
            f"{', '.join(missing[:_MAX_NAMED])}{more}. They may belong to another model, or be damaged."
        )
    keep_weights_unchanged(loaded)
    return loaded
