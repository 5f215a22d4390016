"""Read what a sentence-transformers folder holds besides its model: prompts, settings and the modules after it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from sentence_transformers.sentence_transformer.modules import Dropout, Normalize
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from torch import nn

from midlayer_encoders.encoder.options import EncoderOptions
from midlayer_encoders.encoder.sentence_transformers_internals import without_transformer
from midlayer_encoders.errors import ModelNotFoundError, OptionError, error_summary
from midlayer_encoders.files import read_json
from midlayer_encoders.models.hub import Location, local_only, model_file
from midlayer_encoders.reading.pooled_spans import PooledSpans

_SETTINGS_FILE = "config_sentence_transformers.json"
_TRANSFORMER_SETTINGS = ("max_seq_length", "do_lower_case", "processing_kwargs", "query_length", "document_length")
_OLD_NAMES = {"model_kwargs": "model_args", "processor_kwargs": "tokenizer_args", "config_kwargs": "config_args"}
_STATES = ("last_hidden_state", "encoder_last_hidden_state")  # of a model, and of its encoder
_UNTRAINED = (PoolingModule, Normalize, Dropout, PooledSpans)


@dataclass(frozen=True)
class SavedFolder:
    """The settings and modules of a sentence-transformers folder, except its model; empty for any other folder.

    Attributes:
        prompts: prompts by name.
        default_prompt_name: name of the default prompt.
        similarity_fn_name: similarity function.
        truncate_dim: number of leading dimensions to keep.
        first: keywords of its first module.
        first_type: type of its first module.
        first_path: subfolder of its first module; empty for the folder itself.
        modules: the modules after the first.
        module_kwargs: keywords of ``encode`` for each module, by position.
        pooling: pooling if none of the modules pools.
        saved_class: another class that saved the folder, such as ``"CrossEncoder"``; its modules do not apply.
    """

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    similarity_fn_name: str | None = None
    truncate_dim: int | None = None
    first: Mapping[str, Any] = field(default_factory=dict)
    first_type: str = "sentence_transformers.models.Transformer"
    first_path: str = ""
    modules: Sequence[nn.Module] = ()
    module_kwargs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    pooling: str = "mean"
    saved_class: str = ""

    @property
    def trained(self) -> list[str]:
        """Names of the modules that were trained for the last layer, or may have been."""
        return [type(module).__name__ for module in self.modules if not isinstance(module, _UNTRAINED)]

    @property
    def transformer_settings(self) -> dict[str, Any]:
        """Keywords of its first module that apply to any layer."""
        return {name: self.first[name] for name in _TRANSFORMER_SETTINGS if name in self.first}

    def keywords(self, name: str) -> dict[str, Any]:
        """Return the ``model_kwargs``, ``processor_kwargs`` or ``config_kwargs`` of its first module."""
        return dict(self.first.get(name) or self.first.get(_OLD_NAMES[name]) or {})

    @property
    def first_module_problem(self) -> str | None:
        """Why its first module does not return the states after the last block, if so."""
        if not self.first_type.startswith("sentence_transformers."):
            return f"its first module is {self.first_type}"
        for medium, entry in self.first.get("modality_config", {}).items():
            if entry["method_output_name"] not in _STATES:
                return f"it reads {entry['method_output_name']!r} for {medium}"
        return None


def load_saved_folder(location: Location, options: EncoderOptions) -> SavedFolder:
    """Return what ``SentenceTransformer`` loads from a folder or a name on the hub, except the model.

    Args:
        location: of the model.
        options: options of the encoder.

    Raises:
        ModelNotFoundError: if there is no such model, or its settings or modules cannot be read.
    """
    model = location.folder
    local = local_only(model, location.revision)
    find = partial(model_file, model, revision=location.revision, local=local)
    try:
        modules = find("modules.json")
        settings = None if modules is None else find(_SETTINGS_FILE)
    except OSError as reason:  # also raised for invalid names
        raise ModelNotFoundError(f"`model` must be a folder or hub name, but got {model!r}: {reason}") from reason
    if modules is None:
        return SavedFolder()
    try:
        config = {} if settings is None else read_json(Path(settings))
        # The modules and prompts of other classes, such as rerankers, do not apply.
        if (saved_class := config.get("model_type", "SentenceTransformer")) != "SentenceTransformer":
            return SavedFolder(saved_class=str(saved_class))
        if not all(isinstance(text, str | None) for text in (config.get("prompts") or {}).values()):
            raise TypeError("a prompt is not a string")
        if not isinstance(config.get("truncate_dim"), int | None):
            raise TypeError("truncate_dim is not a whole number")
        rest = without_transformer(
            model,
            revision=location.revision,
            token=options.token,
            cache_folder=options.cache_folder,
            local_files_only=local,
            trust_remote_code=options.trust_remote_code,
        )
    except Exception as reason:  # damaged files fail in their own ways
        remedy = (
            f" Correct its {_SETTINGS_FILE}, its modules.json and the files that this lists, or delete these to read a "
            "plain transformers model."
        )
        if "pip install" in str(reason) or "trust_remote_code=True" in str(reason):
            remedy = ""  # the reason names it
        raise ModelNotFoundError(
            f"`model` must hold settings and modules that sentence-transformers can read, but {model!r} does not "
            f"({error_summary(reason)}).{remedy}"
        ) from reason
    first, *later = rest
    package, *_, first_class = rest.first_type.split(".")
    if package == "sentence_transformers" and not first_class.endswith(("Transformer", "CLIPModel")):
        raise ModelNotFoundError(
            f"`model` must start with a Transformer to have layers, but the first module of {model!r} is a "
            f"{first_class}. Pass the subfolder of a transformer in it, if it has one."
        )
    return SavedFolder(
        prompts=rest.prompts,
        default_prompt_name=rest.default_prompt_name,
        similarity_fn_name=rest.similarity_fn_name,
        truncate_dim=rest.truncate_dim,
        first=first.settings,
        first_type=rest.first_type,
        first_path=first.path,
        modules=tuple(map(_own_spans, later)),
        module_kwargs={str(number): names for number, names in enumerate(rest.module_kwargs.values())},
    )


def _own_spans(module: nn.Module) -> nn.Module:
    """Return the pooling of spans that a folder's copy of its code defines; other modules unchanged."""
    if type(module).__name__ != PooledSpans.__name__:
        return module
    spans = PooledSpans(**{name: getattr(module, name) for name in PooledSpans.config_keys})
    spans.load_state_dict(module.state_dict())
    return spans


def later_modules(
    saved: SavedFolder, width: int, options: EncoderOptions, name: str, *, last_layer: bool, pools: bool = True
) -> list[nn.Module]:
    """Return the modules after the first one: the pooling, and the folder's modules that apply to the layer.

    Args:
        saved: what the folder holds.
        width: width of the states.
        options: options of the encoder.
        name: name of the model, for errors.
        last_layer: whether the states are those that the folder's modules were trained on.
        pools: whether a pooling follows the first module; the heads of a joint model pool themselves.

    Raises:
        OptionError: if a module was trained for other states, or the folder does not pool.
    """
    if saved.trained and not last_layer and options.dense is None:
        raise OptionError(
            f"`dense` must be 'keep' or 'drop' to read an earlier layer of {name}, whose {', '.join(saved.trained)} "
            "was trained for the last layer. 'drop' leaves it out; 'keep' applies it to this layer."
        )
    if pools and last_layer and options.pooling is None and options.dense != "drop" and saved.first_module_problem:
        raise OptionError(
            f"`pooling` must be named for {name}, because {saved.first_module_problem}, so that its vectors are not "
            "those of its last layer. For these, use SentenceTransformer, or the layer and norm that it reads."
        )
    modules = [
        module
        for module in saved.modules
        if (options.dense != "drop" or isinstance(module, _UNTRAINED))
        and (options.normalize is not False or not isinstance(module, Normalize))
    ]
    if not pools:
        return modules
    if spans := [module for module in modules if isinstance(module, PooledSpans)]:
        if refused := options.non_defaults().keys() & {"pooling", "skip_first", "skip_special"}:
            raise OptionError(f"`{min(refused)}` does not apply to {name}, whose folder pools spans of its own.")
        if spans[0].centered and not last_layer:
            raise OptionError(f"`layer` must be the last one of {name}, whose spans are centered for it.")
    poolings = [number for number, module in enumerate(modules) if isinstance(module, PoolingModule)]
    if not saved.modules or (options.pooling is not None and not poolings):
        return [_pooling_module(width, options.pooling or saved.pooling), *modules]
    if all(isinstance(module, Normalize | Dropout) for module in modules):
        raise OptionError(f"`pooling` must be named for {name}: none of the modules that apply to this layer pools.")
    if options.pooling is not None and len(poolings) > 1:
        raise OptionError(f"`pooling` must be None for {name}, whose folder pools {len(poolings)} times.")
    if options.pooling is not None or (not last_layer and len(poolings) == 1):
        folder_pooling: Any = modules[poolings[0]]
        mode = options.pooling or folder_pooling.pooling_mode
        modules[poolings[0]] = _pooling_module(width, mode, folder_pooling.include_prompt)
    return modules


def _pooling_module(width: int, mode: Any, include_prompt: bool = True) -> nn.Module:
    mode = "lasttoken" if mode == "last" else mode  # its name in sentence-transformers
    module: nn.Module = PoolingModule(width, pooling_mode=mode, include_prompt=include_prompt)
    return module


def pooling_name(modules: Sequence[nn.Module]) -> str:
    """Return the pooling of an encoder's modules: several joined by a plus sign; of a custom module, its name."""
    if any(isinstance(module, PooledSpans) for module in modules):
        return "mean+last+mean"
    poolings: list[Any] = [module for module in modules if isinstance(module, PoolingModule)]
    if len(poolings) != 1:
        return "+".join(type(module).__name__ for module in modules)
    modes = poolings[0].pooling_mode
    names = (modes,) if isinstance(modes, str) else modes
    return "+".join("last" if name == "lasttoken" else name for name in names)
