"""Load and cut a model, assemble the modules of an encoder, and describe it: its spec, its media and its model card."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, Unpack, cast

import torch
from huggingface_hub import ModelCard, ModelCardData
from sentence_transformers.util import get_device_name
from torch import Tensor, nn

from midlayer_encoders._types import EncoderSpec, Layer, LayerArgument, Medium, Pooling
from midlayer_encoders.encoder import prompting
from midlayer_encoders.encoder import spec as names
from midlayer_encoders.encoder.first_module import CombinedLayers, LayersTransformer, MemoryModule, transformer_module
from midlayer_encoders.encoder.inputs import probe_features, sampling_rate, supported_media
from midlayer_encoders.encoder.options import EncoderKeywords, EncoderOptions, make_options, normalize_layer
from midlayer_encoders.encoder.sentence_transformers_internals import PlainOnDisk
from midlayer_encoders.encoder.verification import check_padding, check_states, turn_mask_off
from midlayer_encoders.errors import CutError, MidlayerError, OptionError, short_repr, warn_deprecated
from midlayer_encoders.models.anatomy import Anatomy, deepest_layer, find_anatomy, resolve_layer
from midlayer_encoders.models.cut import MOST_PLANS, Cut, JointCut, cut_model
from midlayer_encoders.models.hub import BUILT_IN_MINILM, model_location, output_embeddings
from midlayer_encoders.models.load import NoPlanError, load_cut
from midlayer_encoders.models.padding import suffers_from_padding, wants_padding
from midlayer_encoders.models.transformers_internals import gguf_read_once
from midlayer_encoders.validation import check_choice

# sentence-transformers replaces this placeholder by the repository when it pushes a folder.
_FOLDER = "sentence_transformers_model_id"


class BuiltEncoder(PlainOnDisk):
    """The construction and the description of a ``LayerEncoder``.

    Attributes:
        source: the requested model: a folder, a name on the hub, ``"built-in"``, or the name of a module.
        name: name of the model in results and errors.
        options: the options.
        layer: layer after which the model ends.
        num_layers: blocks of the complete model.
        tower_layers: layer of each tower of a joint model.
        mixture: layers that are combined, and their shares.
        norm: norm of the states.
        pooling: pooling of the states.
        max_pixels: the largest image size.
    """

    def _build_from_files(self, model: str, layer: LayerArgument, options: EncoderOptions) -> None:
        """Initialize an encoder of a folder or a name on the hub."""
        options.check_for_layer(layer)
        folder, gguf_file = model_location(model, options.gguf_file)
        if options.gguf_file not in (None, gguf_file):
            raise OptionError(f"`gguf_file` must be left out for {model!r}, but got {options.gguf_file!r}.")
        saved = prompting.SavedPrompts()
        if options.prompts is None and options.template is None:
            saved = prompting.load_saved_prompts(folder, options.revision, gguf_file=gguf_file)
        prompting.resolve_prompts(options, saved)  # raises before anything large is loaded
        name = "local/all-MiniLM-L6-v2" if model == BUILT_IN_MINILM else names.base_name(folder, gguf_file)
        remote_code = options.trust_remote_code
        source = {"revision": options.revision, "gguf_file": gguf_file, "trust_remote_code": remote_code}
        error: MidlayerError | None = None
        for plan in range(MOST_PLANS):
            try:
                parts = _load_plan(folder, layer, options, source, plan)
            except NoPlanError:
                break
            except CutError as reason:
                error = error or reason
            except (MidlayerError, OSError, torch.OutOfMemoryError):
                raise
            except ImportError as reason:
                cause = " ".join(str(reason).split())
                raise MidlayerError(f"{model!r} needs a library that is not installed: {cause}") from reason
            except Exception as reason:  # shallower models fail in their own ways
                if error is None:
                    error = CutError(
                        f"{name} cannot be built, or run, with the blocks up to layer {layer} alone: "
                        f"{type(reason).__name__}: {reason}. Try another layer."
                    )
                    error.__cause__ = reason
            else:
                return self._assemble(model, name, *parts, options, gguf_file, saved)
        assert error is not None
        raise error from error.__cause__

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        layer: Layer | Sequence[Layer],
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
            layer: a layer, or a list of layers, as in :class:`~midlayer_encoders.LayerEncoder`.
            processor: a transformers processor, or a function from a list of inputs to the module's arguments.
            medium: medium of its inputs.
            blocks: path of its list of blocks, if the rules do not find it.
            final: paths of the modules after its last block, likewise.
            keywords: those of :class:`~midlayer_encoders.EncoderOptions` that apply without files: ``norm``,
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
        requested = normalize_layer(layer)
        if isinstance(requested, Mapping):
            raise OptionError(f"`layer` must be one number for a module in memory, but got {requested}.")
        options.check_for_layer(requested)
        anatomy = find_anatomy(module, blocks=blocks, final=None if final is None else tuple(final))
        deepest = deepest_layer(requested, anatomy.num_layers, name=type(module).__name__)
        # The hook needs a block; layer 0 is its input.
        cut = Cut(anatomy, deepest, options.norm, max(deepest, 1), "last_hidden_state")
        first = MemoryModule(cut_model(copy.deepcopy(module).eval(), cut), processor, cut, medium)
        combined = _combined_layers(requested, options, cut)
        if combined is not None:
            first.layers = combined.layers
        alone, padded = probe_features(first)
        check_padding(first, alone, padded)
        if suffers_from_padding(first.model) and padded is not None and "attention_mask" not in padded:
            raise OptionError(
                "`processor` must return an `attention_mask`, or must not pad: padding changes the module's states."
            )
        name = f"module/{type(module).__name__}"
        encoder = cls.__new__(cls)
        encoder._assemble(name, name, first, cut, None, combined, options)
        return encoder

    def _assemble(
        self,
        source: str,
        name: str,
        first: Any,
        cut: Cut | JointCut,
        anatomy: Anatomy | None,
        combined: CombinedLayers | None,
        options: EncoderOptions,
        gguf_file: str | None = None,
        saved_prompts: prompting.SavedPrompts | None = None,
    ) -> None:
        """Initialize the encoder from its first module and the module that combines several layers, and check it."""
        counting = prompting.apply_template(first, options, name)
        takes_text = "text" in supported_media(first.modalities)
        saved = saved_prompts if saved_prompts is not None and takes_text else prompting.SavedPrompts()
        prompts, default_prompt_name = prompting.resolve_prompts(options, saved)
        towers = cut.towers if isinstance(cut, JointCut) else {}
        if towers and options.pooling is not None:
            raise OptionError(
                f"`pooling` must be None for {name}, whose heads pool, or pass `tower`, but got {options.pooling!r}."
            )
        modules = [first] if towers else [first, prompting.pooling_module(first, options.pooling)]
        if combined is not None:
            width = first.get_embedding_dimension()
            combined.embedding_dimension = width if combined.combine == "concat" else width // len(combined.layers)
            modules.append(combined)
        super().__init__(
            modules=modules,
            device=options.device,
            prompts=prompts,
            default_prompt_name=default_prompt_name,
            truncate_dim=options.truncate_dim,
            trust_remote_code=options.trust_remote_code,
            model_card_data=names.CardData(local_files_only=True),
        )
        main = cut.towers["image"] if isinstance(cut, JointCut) else cut
        self.source = source
        self.name = name
        self.options = options
        self.layer = main.layer
        self.num_layers = main.anatomy.num_layers
        self.tower_layers = {name: tower.layer for name, tower in towers.items()}
        self.mixture = () if combined is None else tuple(zip(combined.layers, combined.weights, strict=True))
        self.norm = options.norm
        self.pooling: Pooling = cast(Any, "head") if towers else options.pooling or "mean"
        self.saved_prompts = saved
        self.max_pixels = options.max_pixels
        self.counting = counting
        self._gguf_file = gguf_file
        self._truncation_warned = False
        self._anatomy = anatomy
        options.check_for_media(self.media, self.name)
        if isinstance(cut, Cut) and options.bidirectional:
            turn_mask_off(self[0], cut, self.name)
            if not isinstance(self[0], MemoryModule) and not wants_padding(self.transformer):
                check_padding(self[0], *probe_features(self[0]))
        self.eval()
        with self.truncate_embeddings(None):
            width = self.get_embedding_dimension()
            size = options.truncate_dim
            if size is not None and width is not None and size > width:
                raise OptionError(
                    f"`truncate_dim` must be at most {width}, the dimensions of {self.name}, but got {size}."
                )
            for module in prompting.modules_after_pooling(self, options):
                self.append(module.to(device=self.device, dtype=self.dtype))

    @property
    def layers(self) -> dict[str, int]:
        """The old name of ``tower_layers``."""
        warn_deprecated("`LayerEncoder.layers` is `tower_layers` now; the old name is removed in 0.4.")
        return self.tower_layers

    @property
    def spec(self) -> EncoderSpec:
        """Everything that changes this encoder's vectors and scores; training the encoder changes the spec."""
        modules = [[type(module).__name__, module.get_config_dict()] for module in self]  # type: ignore[operator]
        prompts = sorted((name, text or "") for name, text in self.prompts.items())
        options = self.options
        return EncoderSpec(
            model=self.name,
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
            gguf_file=self._gguf_file,
            truncate_dim=self.truncate_dim,
            modules=json.dumps(modules, sort_keys=True, default=str),
            weights_digest=names.weights_digest(self),
            tower=options.tower,
            tower_layers=tuple(self.tower_layers.items()),
            similarity=self.similarity_fn_name,
            prompting=prompting.prompting_settings(options),
            mixture=self.mixture,
        )

    @property
    def anatomy(self) -> Anatomy:
        """The paths of the parts of the cut model. A joint model has two; see ``tower``."""
        if self.tower_layers:
            raise OptionError(
                f"`encoder` must have one stack of layers, but {self.name} has two towers. Load one: tower='image'."
            )
        first: Any = self[0]
        return first.anatomy if isinstance(first, MemoryModule) else self._anatomy or find_anatomy(first.model)

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
        """Names of the modules after the pooling."""
        return [type(module).__name__ for module in list(self)[2:]]

    def output_embeddings(self) -> Tensor:
        """Return the output embeddings of the language model, shape ``(V, D)``."""
        folder, _ = model_location(self.source)
        return output_embeddings(self.transformer, folder, self.options.revision, gguf_file=self._gguf_file)

    def for_mteb(self) -> Any:
        """Return this encoder for mteb, with its media.

        ``mteb.evaluate`` accepts a text encoder directly, but assumes that any local SentenceTransformer supports only
        text, and refuses to run tasks of images or audio on it.
        """
        from mteb.models import SentenceTransformerEncoderWrapper

        wrapped = SentenceTransformerEncoderWrapper(self, target_sampling_rate=self.sampling_rate)
        wrapped.mteb_model_meta = wrapped.mteb_model_meta.model_copy(update={"modalities": self.media})
        return wrapped

    def model_card_text(self, repository: str | None = None, branch: str | None = None) -> str:
        """Return the README that ``save_pretrained`` writes to a folder, or ``push_to_hub`` to a repository."""
        spec = self.spec
        data = cast(names.CardData, self.model_card_data)
        metadata = ModelCardData(
            library_name="sentence-transformers",
            base_model=data.made_of if spec.model.startswith("local/") else spec.model,
            language=data.language or None,
            license=data.license,
            eval_results=list(data.scores) or None,
            model_name=(repository or _FOLDER) if data.scores else None,
            **dict(data.terms),
        )
        template = str(Path(__file__).with_name("model_card.md.jinja"))
        size = sum(parameter.numel() for parameter in self.parameters())
        place = {"repository": repository, "branch": branch, "location": repository or _FOLDER}
        card = ModelCard.from_template(metadata, template, encoder=self, spec=spec, names=names, size=size, **place)
        return f"{card}\n"


def _load_plan(
    folder: str, layer: LayerArgument, options: EncoderOptions, source: Mapping[str, Any], plan: int
) -> tuple[Any, Cut | JointCut, Anatomy | None, CombinedLayers | None]:
    """Load a model by one of the plans to read a layer, and verify the states."""
    with nullcontext() if source["gguf_file"] is None else gguf_read_once():
        loaded, cut = load_cut(
            folder,
            layer,
            norm=options.norm,
            tower=options.tower,
            dtype=None if options.dtype is None else getattr(torch, options.dtype),
            adapters=options.adapters,
            device_map=options.device_map,
            plan=plan,
            spare=True,
            **source,
        )
        first: Any = transformer_module(folder, loaded, cut, source, options)
    if options.device_map is None:
        first.to(options.device or get_device_name())
    if isinstance(cut, JointCut):
        return first, cut, None, None
    alone, padded = probe_features(first)
    anatomy = check_states(first, cut, alone, padded)
    combined = _combined_layers(layer, options, cut)
    if combined is not None:
        first.__class__ = LayersTransformer
        first.anatomy = anatomy
        first.layers = combined.layers
        first.norm = options.norm
    return first, cut, anatomy, combined


def _combined_layers(layer: LayerArgument, options: EncoderOptions, cut: Cut) -> CombinedLayers | None:
    """Return the module that combines several layers: their mean, in ascending order, or all in the given order."""
    if not isinstance(layer, list):
        return None
    layers = [resolve_layer(number, cut.anatomy.num_layers) for number in layer]
    weights = options.layer_weights or (1.0,) * len(layers)
    if options.combine == "concat":
        return CombinedLayers(layers, weights, "concat")
    shares = sorted((number, weight / sum(weights)) for number, weight in zip(layers, weights, strict=True))
    return CombinedLayers([number for number, _ in shares], [share for _, share in shares], "mean")
