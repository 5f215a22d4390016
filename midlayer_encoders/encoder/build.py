"""Load and cut a model, assemble the modules of an encoder, and describe it: its spec, its media and its model card."""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, Unpack, cast

import torch
from huggingface_hub import ModelCard, ModelCardData
from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
from sentence_transformers.util import get_device_name
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from midlayer_encoders._types import EncoderSpec, Layer, LayerArgument, Medium, Norm, Pooling
from midlayer_encoders.encoder import prompting, verification
from midlayer_encoders.encoder import spec as names
from midlayer_encoders.encoder.bidirectional import turn_mask_off
from midlayer_encoders.encoder.description import Description
from midlayer_encoders.encoder.files_digest import files_digest
from midlayer_encoders.encoder.first_module import MemoryModule, UncutTransformer, states_width, transformer_module
from midlayer_encoders.encoder.inputs import probe_features, sampling_rate, supported_media
from midlayer_encoders.encoder.options import EncoderKeywords, EncoderOptions, make_options
from midlayer_encoders.encoder.saved_folder import SavedFolder, later_modules, load_saved_folder, pooling_name
from midlayer_encoders.encoder.sentence_transformers_internals import PlainOnDisk
from midlayer_encoders.encoder.weights_digest import weights_digest
from midlayer_encoders.errors import CutError, MidlayerError, OptionError, error_summary, short_repr
from midlayer_encoders.models.anatomy import Anatomy, find_anatomy, media_parts, resolve_layer, suffers_from_padding
from midlayer_encoders.models.cut import MOST_PLANS, Cut, plan_cuts
from midlayer_encoders.models.hub import (
    BUILT_IN,
    BUILT_IN_MINILM,
    Location,
    local_folder,
    module_folder,
    named_as_typed,
    output_embeddings,
)
from midlayer_encoders.models.load import ModelFiles, NoPlanError, open_model
from midlayer_encoders.reading.pooled_spans import PooledSpans
from midlayer_encoders.validation import check_choice

#: A saved folder has its path in place of this, and sentence-transformers puts the repository there when it pushes one.
FOLDER = "sentence_transformers_model_id"
# Attributes that are set once: a new value would change the spec of an encoder, but not its vectors.
_FIXED = ("layer", "num_layers", "norm", "pooling")


def encoder_name(model: str, options: EncoderOptions) -> str:
    """Return the name of a folder or of a model on the hub in results."""
    if model == BUILT_IN_MINILM:
        return "local/all-MiniLM-L6-v2"
    return names.base_name(*options.locate(model))


class BuiltEncoder(PlainOnDisk):
    """The construction and the description of a ``LayerEncoder``.

    Attributes:
        source: the requested model: a folder, a name on the hub, ``"built-in"``, or the name of a module.
        name: the model as it was given, or the name of its folder, for people.
        results_name: name of the model in results.
        options: the options.
        layer: layer after which the model ends; it cannot be changed, nor can ``num_layers``, ``norm`` and ``pooling``.
        num_layers: blocks of the complete model.
        tower_layers: layer of each tower of a joint model; empty for other models.
        tower_depths: number of blocks of each of its towers before the cut.
        has_heads: whether the model's own heads pool the states, as in CLIP.
        norm: norm of the states.
        pooling: pooling of the states.
        max_pixels: the largest image size.
        location: where its files are.
        file_pooling: llama.cpp's number of the pooling that its GGUF file names, 0 for none; ``None`` without a file.
        files: digest of the files that it was loaded from; empty for a module in memory.
        loaded: digests of its modules and processors as they follow from these files.
    """

    layer: int
    num_layers: int
    norm: Norm
    pooling: Pooling
    location = Location("")
    file_pooling: int | None = None
    files: str = ""
    loaded: Mapping[str, str] = MappingProxyType({})
    tower_layers: Mapping[str, int] = MappingProxyType({})
    tower_depths: Mapping[str, int] = MappingProxyType({})
    _truncation_warned = _unknown_warned = _empty_warned = False

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _FIXED and name in vars(self):
            raise OptionError(
                f"`{name}` must be chosen when an encoder is created: LayerEncoder(…, {name}={value!r}). "
                "`encode_layers` reads the layers of one encoder."
            )
        super().__setattr__(name, value)

    def _build_from_files(self, model: str, layer: LayerArgument, options: EncoderOptions) -> None:
        """Initialize an encoder of a folder or a name on the hub, inside ``options.hub_access()``."""
        location = self.location = options.locate(model)
        saved = load_saved_folder(location, options)
        prompting.resolve_prompts(options, saved)  # raises before anything large is loaded
        place, revision = location, options.revision
        if saved.first_path and location.file is None:
            place, revision = Location(module_folder(location.folder, saved.first_path, revision)), None
        error: MidlayerError | None = None
        for plan in range(MOST_PLANS):
            try:
                with open_model(
                    place,
                    shown=model,
                    revision=revision,
                    adapters=options.adapters,
                    trust_remote_code=options.trust_remote_code,
                    model_kwargs=_model_kwargs(options, saved),
                    config_kwargs={**saved.keywords("config_kwargs"), **(options.config_kwargs or {})},
                ) as files:
                    if files.converted is not None and options.pooling is None:
                        saved = replace(saved, pooling=files.converted.default_pooling())
                    parts = self._load_plan(files, layer, options, saved, plan)
            except NoPlanError:
                break
            except CutError as reason:
                error = error or reason
            except MidlayerError as reason:
                raise error or reason from reason.__cause__
            except (OSError, MemoryError, torch.OutOfMemoryError):
                raise
            except ImportError as reason:
                cause = " ".join(str(reason).split())
                raise MidlayerError(f"{model!r} needs a library that is not installed: {cause}") from reason
            except Exception as reason:  # shallower models fail in their own ways
                if error is None:
                    error = CutError(
                        f"{options.shown_name(model)} cannot be built, or run, with the blocks up to layer "
                        f"{layer} alone: {error_summary(reason)}. Its files may be damaged; if not, try another layer."
                    )
                    error.__cause__ = reason
            else:
                self._assemble(model, *parts, options, saved)
                if files.converted is not None:
                    self.files, self.file_pooling = files.converted.digest, files.converted.pooling_type
                if files.converted is None or saved.modules:  # else other files beside it are not read
                    folder = local_folder(location, options.revision)
                    self.files += files_digest(folder, code=options.trust_remote_code)
                self.loaded = Description(self).parts()
                return
        assert error is not None
        raise error from error.__cause__

    def _load_plan(
        self, files: ModelFiles, layer: LayerArgument, options: EncoderOptions, saved: SavedFolder, plan: int
    ) -> tuple[Any, Cut, Anatomy | None]:
        """Load a model by one of the plans to read a layer, and verify the states."""
        if options.tower is None and media_parts(files.complete):
            self._become_joint()
        loaded, cut = self._load_cut(files, layer, options, plan)
        first: Any = transformer_module(files, loaded, cut, options, saved)
        if options.device_map is None:
            first.to(options.device or get_device_name())
        if cut.heads:
            return first, cut, None
        alone, padded = probe_features(first)
        if cut.output is not None:
            return first, cut, verification.check_states(first, cut, alone, padded)
        anatomy, hooked = verification.check_uncut(first, cut, alone)
        first.__class__ = UncutTransformer
        first.anatomy = anatomy
        first.layer = cut.layer
        first.norm = options.norm
        first.bypass = not hooked
        verification.check_padding(first, alone, padded)
        return first, cut, anatomy

    def _become_joint(self) -> None:
        """Take the methods of an encoder of a joint model."""
        raise NotImplementedError

    def _load_cut(self, files: ModelFiles, layer: LayerArgument, options: EncoderOptions, plan: int) -> tuple[Any, Cut]:
        """Load a model, or one tower of a joint model, cut at a layer."""
        towers = media_parts(files.complete)
        if options.tower is not None and options.tower not in towers:
            raise OptionError(
                f"`tower` must be None for {files.model}, which is not a joint model, but got {options.tower!r}."
            )
        return files.load_cut(layer, options.norm, part=towers.get(options.tower or ""), plan=plan)

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        layer: Layer,
        *,
        processor: Callable[..., Any],
        medium: Medium = "image",
        blocks: str | None = None,
        final: Sequence[str] | None = None,
        **keywords: Unpack[EncoderKeywords],
    ) -> Self:
        """Return the encoder of a copy of a module in memory, which may be any ``torch.nn.Module``.

        Args:
            module: a model.
            layer: a layer, as in :class:`~midlayer_encoders.LayerEncoder`.
            processor: a transformers processor, or a function from a list of inputs to the module's arguments.
            medium: medium of its inputs.
            blocks: path of its list of blocks, if the rules do not find it.
            final: paths of the modules after its last block, likewise.
            keywords: options of :class:`~midlayer_encoders.EncoderOptions` that apply without files: ``norm``,
                ``pooling``, ``device``, ``prompts``, ``truncate_dim``, ….
        """
        options = make_options(keywords)
        options.check_for_module()
        check_choice("medium", medium, ("text", "image", "audio"))
        module = getattr(module, "_orig_mod", module)  # the module inside `torch.compile`
        if not isinstance(module, nn.Module):
            raise OptionError(f"`module` must be a torch.nn.Module, but got {short_repr(module)}.")
        if not callable(processor):
            raise OptionError(
                f"`processor` must be a transformers processor or a function, but got {short_repr(processor)}."
            )
        if medium != "text" and isinstance(processor, PreTrainedTokenizerBase):
            raise OptionError(f"`medium` must be 'text' for a tokenizer, but got {medium!r}.")
        anatomy = find_anatomy(module, blocks=blocks, final=None if final is None else tuple(final))
        number = resolve_layer(layer, anatomy.num_layers, name=type(module).__name__)
        # The hook needs a block; layer 0 is its input.
        cut = Cut(anatomy, number, options.norm, max(number, 1), "last_hidden_state")
        try:
            copied = copy.deepcopy(module).eval()
        except Exception as reason:  # whatever its attributes raise
            raise OptionError(
                f"`module` must be copyable with `copy.deepcopy`, but {type(module).__name__} is not ({reason}). "
                "Remove the attribute, or detach the tensor, that cannot be copied."
            ) from reason
        first = MemoryModule(copied, processor, cut, medium)
        verification.check_module(first, cut, *probe_features(first), module, find_final=final is None)
        encoder = cls.__new__(cls)
        encoder._assemble(f"module/{type(module).__name__}", first, cut, None, options, SavedFolder())
        return encoder

    def _assemble(
        self, source: str, first: Any, cut: Cut, anatomy: Anatomy | None, options: EncoderOptions, saved: SavedFolder
    ) -> None:
        """Initialize the encoder from its first module, and check it."""
        name = options.shown_name(source)
        counting = prompting.apply_template(first, options, name)
        if "text" not in supported_media(first.modalities):
            saved = replace(saved, prompts={}, default_prompt_name=None)
        if not saved.trained:
            options = replace(options, dense=None)
        prompts, default_prompt_name = prompting.resolve_prompts(options, saved)
        complete = cut.layer == cut.anatomy.num_layers and self.tower_layers == self.tower_depths
        last_layer = complete and (options.norm == "final" or not cut.anatomy.final)
        width = states_width(first, anatomy, options.norm)
        later = later_modules(saved, width, options, name, last_layer=last_layer, pools=not cut.heads)
        modules = [first, *prompting.pool_spans(later, counting.placed, options.join)]
        super().__init__(
            modules=modules,
            device=options.device,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            truncate_dim=options.truncate_dim or saved.truncate_dim,
            similarity_fn_name=cast(Any, options.similarity_fn_name or saved.similarity_fn_name),
            trust_remote_code=options.trust_remote_code,
            model_card_data=names.CardData(local_files_only=True),
        )
        self.module_kwargs = dict(saved.module_kwargs)
        self.source = source
        self.name = name
        self.results_name = encoder_name(source, options)
        self.options = options
        self.layer = cut.layer
        self.num_layers = cut.anatomy.num_layers
        self.has_heads = cut.heads
        self.norm = options.norm
        self.pooling = cast(Any, "head" if cut.heads else pooling_name(modules[1:]))
        self.saved = saved
        self.max_pixels = options.max_pixels
        self.counting = counting
        self._anatomy = anatomy
        options.check_for_media(self.media, self.name)
        if options.bidirectional and not cut.heads:
            if getattr(first, "bypass", False):
                raise OptionError(f"`bidirectional` must be False for {name}: its blocks pass on several streams.")
            turn_mask_off(self[0], cut, self.name)
            if not isinstance(self[0], MemoryModule):
                verification.check_padding(self[0], *probe_features(self[0]))
        self.eval()
        self._makes_one_size = "image" not in self.media or verification.makes_one_size(first)
        if not cut.heads and ("audio" in self.media or suffers_from_padding(first.model)):
            verification.check_batches(self)
        if self.spans is not None:
            verification.check_is_causal(first, probe_features(first)[0], self.spans, self.name)
        with self.truncate_embeddings(None):
            dimension = self.get_embedding_dimension()
            size = options.truncate_dim
            if size is not None and dimension is not None and size > dimension:
                raise OptionError(f"`truncate_dim` must be at most {dimension} for {self.name}, but got {size}.")
            for module in prompting.modules_after_pooling(self, options):
                self.append(module.to(device=self.device, dtype=self.dtype))

    @property
    def revision(self) -> str | None:
        """Branch, tag or commit of the model on the hub."""
        return self.options.revision

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors and scores; training the encoder changes the spec."""
        modules: Any = [[type(module).__name__, getattr(module, "get_config_dict", dict)()] for module in self]
        prompts = sorted((name, text or "") for name, text in self.prompts.items())
        options = self.options
        return EncoderSpec(
            model=self.results_name,
            revision=options.revision,
            layer=self.layer,
            num_layers=self.num_layers,
            norm=self.norm,
            pooling=self.pooling,
            max_length=self.max_seq_length,
            dtype=str(self.dtype).removeprefix("torch."),
            prompts=(*prompts, ("", self.default_prompt_name or "")),
            bidirectional=options.bidirectional,
            adapters=tuple(names.base_name(adapter) for adapter in options.adapters),
            chat_template=options.chat_template,
            gguf_file=self.location.file,
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights_digest=weights_digest(self),
            tower=options.tower,
            similarity=self.similarity_fn_name,
            prompting=prompting.prompting_settings(options),
            parts=names.part_digests(self),
        )

    @property
    def anatomy(self) -> Anatomy:
        """The paths of the parts of the cut model."""
        first: Any = self[0]
        if getattr(first, "bypass", False):
            raise OptionError(
                f"`encoder` must have layers that one pass can read, but {self.name} changes its states after its last "
                "block. Read one layer at a time with `encode`, or pass norm='none'."
            )
        return first.anatomy if isinstance(first, MemoryModule) else self._anatomy or find_anatomy(first.model)

    @property
    def layers(self) -> LayerArgument:
        """The ``layer`` that creates this encoder: a number, or a number by name."""
        return dict(self.tower_layers) or self.layer

    @property
    def depths(self) -> int | Mapping[str, int]:
        """The number of blocks before the cut, by name where ``layers`` has names."""
        return self.tower_depths or self.num_layers

    def layer_argument(self, layer: int) -> LayerArgument:
        """Return the ``layer`` that creates the encoder of one of the layers that ``encode_layers`` numbers."""
        return layer

    def kept_blocks(self, layer: int) -> list[tuple[Anatomy, int]]:
        """Return each stack of blocks of the whole model, with the number that the encoder of a layer keeps."""
        if isinstance(self[0], MemoryModule):
            return [(self.anatomy, max(layer, 1))]
        config = getattr(self.transformer, "config", None)
        return [(self.anatomy, plan_cuts(self.anatomy, layer, self.norm, config=config)[0].keep)]

    def check_one_stack(self, argument: str) -> None:
        """Raise an :class:`OptionError` if ``argument`` needs one stack of blocks, and the model has several."""

    @property
    def transformer(self) -> nn.Module:
        """The model inside the first module."""
        first: Any = self[0]
        return first.model  # type: ignore[no-any-return]

    @property
    def media(self) -> list[str]:
        """The media of its inputs: ``"text"``, ``"image"``, ``"audio"``."""
        return supported_media(self.modalities)

    @property
    def preparer(self) -> Any:
        """The tokenizer, or the processor of a model without one."""
        return self.processor if self.tokenizer is None else self.tokenizer

    @property
    def sampling_rate(self) -> int | None:
        """Sampling rate of its audio model; waveforms at another rate are resampled."""
        return sampling_rate(self.processor) if "audio" in self.media else None

    @property
    def default_prompt(self) -> str:
        """The text of the default prompt; empty if there is none."""
        return self.prompts.get(self.default_prompt_name or "", "") or ""

    @property
    def after_pooling(self) -> list[str]:
        """Names of the modules after the first one, except the pooling."""
        poolings = (PoolingModule, PooledSpans)
        return [type(module).__name__ for module in list(self)[1:] if not isinstance(module, poolings)]

    @property
    def spans(self) -> PooledSpans | None:
        """The pooling of a template that marks a span; ``None`` for other poolings."""
        return next((module for module in self if isinstance(module, PooledSpans)), None)

    def needs_trust(self, *, stock: bool = False) -> bool:
        """Return whether a saved folder, or the stock form's, is loaded with ``trust_remote_code=True``."""
        return self.options.trust_remote_code or (self.spans is not None and not stock)

    def output_embeddings(self) -> Tensor:
        """Return the output embeddings of the language model, shape ``(V, D)``."""
        location, revision = self.location, self.options.revision
        with self.options.hub_access(), named_as_typed(self.source):
            if self.saved.first_path:
                folder = module_folder(location.folder, self.saved.first_path, revision)
                location, revision = Location(folder, location.file), None
            return output_embeddings(self.transformer, location, revision)

    def for_mteb(self) -> Any:
        """Return this encoder for mteb, with its media, number of parameters and memory in its ``ModelMeta``.

        ``mteb.evaluate`` accepts a text encoder directly, but records no size of a local SentenceTransformer, assumes
        that it supports only text, and refuses to run tasks of images or audio on it.
        """
        from mteb.models import SentenceTransformerEncoderWrapper

        wrapped = SentenceTransformerEncoderWrapper(self, target_sampling_rate=self.sampling_rate)
        size = sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())
        wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(
            update={
                "modalities": self.media,
                "n_parameters": sum(parameter.numel() for parameter in self.parameters()),
                "memory_usage_mb": round(size / 2**20, 1),
            }
        )
        return wrapped

    def model_card_text(
        self, repository: str | None = None, branch: str | None = None, *, stock_template: str | None = None
    ) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository.

        Args:
            repository: name of the repository; ``None`` for a folder.
            branch: branch of the repository.
            stock_template: template of the encoder's stock form, if the card describes it.
        """
        spec = self.spec
        data = cast(names.CardData, self.model_card_data)
        metadata = ModelCardData(
            library_name="sentence-transformers",
            base_model=None if spec.model.startswith("local/") else spec.model,
            language=data.language or None,
            license=data.license,
        )
        template = str(Path(__file__).with_name("model_card.md.jinja"))
        size = sum(parameter.numel() for parameter in self.parameters())
        place = {"repository": repository, "branch": branch, "location": repository or FOLDER, "size": size}
        is_built_in = self.source in (BUILT_IN, BUILT_IN_MINILM)
        source = f"{self.name} ({spec.model.removeprefix('local/')})" if is_built_in else self.name
        form = {"stock_template": stock_template, "trust": self.needs_trust(stock=stock_template is not None)}
        card = ModelCard.from_template(
            metadata, template, encoder=self, spec=spec, source=source, names=names, **place, **form
        )
        return f"{card}\n"


def _model_kwargs(options: EncoderOptions, saved: SavedFolder) -> dict[str, Any]:
    """Return the keywords of the model's ``from_pretrained``: from the options, or else the folder."""
    values = saved.keywords("model_kwargs") | dict(options.model_kwargs or {})
    dtype = values.pop("torch_dtype", None) or values.pop("dtype", None)
    names = ("dtype", "device_map", "attn_implementation", "quantization")
    values |= {"dtype": dtype} | {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if isinstance(values["dtype"], str) and values["dtype"] != "auto":
        values["dtype"] = getattr(torch, values["dtype"].removeprefix("torch."))
    if {"quantization", "quantization_config"} & values.keys():  # bitsandbytes quantizes on the device
        values.setdefault("device_map", options.device or get_device_name())
    return {name: value for name, value in values.items() if value is not None}
